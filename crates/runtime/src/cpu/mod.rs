//! The CPU target.

mod exec;
mod importance;
pub(crate) mod kernels;
pub(crate) mod memory;
mod packed;
pub mod simd;
mod state;

pub(crate) use exec::WrapKernel;
pub use exec::{CpuExecutor, CpuOptions};
pub use importance::Importance;
pub use kernels::has_kernel;
pub use memory::HostMemory;
