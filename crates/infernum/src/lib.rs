//! An LLM inference engine that works like a compiler, as a library.
//!
//! [`ModelOptions`] opens a model, [`Machine`] is what it runs on, and a [`Loader`] compiles it for that machine,
//! loads the plan, and makes an [`Engine`](infernum_runtime::Engine) of it.

mod error;
mod load;
mod machine;
mod options;
mod plan_file;
mod prefill;
mod progress;
pub mod tune;

pub use error::Error;
pub use load::{Capacity, Loader, engine_limits};
pub use machine::{CPU, Machine};
#[cfg(feature = "cli")]
pub use options::named;
pub use options::{
    CacheOptions, CompileOptions, DeviceId, DeviceIdError, ModelOptions, RunOptions,
};
pub use plan_file::PlanFileError;
pub use prefill::prefill;
pub use progress::{Progress, Stage};
