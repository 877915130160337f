//! From IR to plans.
//!
//! [`plan()`] freezes a module into a [`Plan`]: plain data that an executor replays without ever
//! seeing a graph.

mod buckets;
pub mod compile;
mod expand;
mod layout;
mod lower;
mod plan;
mod planner;
mod recipe;

pub use buckets::{plan, plan_buckets};
pub use compile::Limits;
pub use expand::{ExpandError, expand};
pub use lower::PlanError;
pub use plan::{
    Arg, Bucket, Call, Carried, Launch, Plan, Program, Recipe, Region, Schedule, StateSpec,
    Summary, TargetKind, VERSION, Value, Weight,
};
