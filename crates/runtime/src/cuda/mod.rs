//! Running plans on an NVIDIA GPU. The driver is loaded at run time: without one, everything but
//! opening a [`Gpu`] works.

mod blas;
mod ceiling;
mod check;
mod code;
mod compiled;
mod driver;
mod exec;
mod frame;
mod graphs;
mod guards;
mod inputs;
mod penalised;
mod retarget;
mod turn;
mod upload;

pub use ceiling::{CEILING_BYTES, read_ceiling};
pub use check::{check, unchecked};
pub use compiled::{CompiledKernel, compile};
pub use driver::{DeviceMemory, Gpu, GpuError};
pub use exec::{CudaExecutor, CudaOptions};
