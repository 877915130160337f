//! The CPU target.

mod check;
pub(crate) mod convert;
mod exec;
mod guard;
mod kernels;
mod memory;
pub mod simd;
mod state;

pub use crate::observe::{Observed, Observer};
pub use check::{check, unchecked};
pub use exec::{CpuExecutor, CpuOptions};
pub(crate) use kernels::float;
pub use kernels::has_kernel;
