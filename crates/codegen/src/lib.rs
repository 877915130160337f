//! From IR to plans.
//!
//! [`plan()`] freezes a module into a [`Plan`]: plain data that an executor replays without ever
//! seeing a graph.

pub mod compile;
mod lower;
mod plan;
mod planner;
mod recipe;

pub use compile::Limits;
pub use lower::{PlanError, plan};
pub use plan::{
    Arg, Call, Carried, Launch, Plan, Program, Recipe, Region, StateSpec, Summary, TargetKind,
    VERSION, Value, Weight,
};
