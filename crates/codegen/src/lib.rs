//! From IR to plans.
//!
//! [`plan()`] freezes a module into a [`Plan`]: plain data that an executor replays without ever
//! seeing a graph.

mod buckets;
mod cache;
mod check;
pub mod compile;
pub mod cuda;
mod expand;
mod layout;
mod lower;
mod plan;
mod planner;
mod recipe;
mod summary;
mod tile_map;

pub use buckets::{plan, plan_buckets};
pub use cache::{CacheLayout, PlanePlace, slot_bytes};
pub use check::{FaultKind, PlanFault};
pub use compile::Limits;
pub use expand::{ExpandError, expand};
pub use infernum_passes::Bucket;
pub use layout::row_bytes;
pub use lower::PlanError;
pub use plan::{
    Arg, Argument, Asks, Carried, Kernel, KernelLaunch, Launch, Matmul, Plan, Program, ProgramCall,
    Recipe, Region, Run, Schedule, StateSpec, TargetKind, VERSION, Value, Weight, Yields,
};
pub use summary::Summary;
pub use tile_map::TileMap;
