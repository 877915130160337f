//! The CPU target.

pub(crate) mod convert;
mod exec;
mod kernels;
mod memory;
pub mod simd;
mod state;

pub use exec::{CpuExecutor, CpuOptions, Observed, Observer};
pub use kernels::has_kernel;
