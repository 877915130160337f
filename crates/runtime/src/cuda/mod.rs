//! Running plans on an NVIDIA GPU. The driver is loaded at run time: without one, everything but
//! opening a [`Gpu`] works.

mod ahead;
mod blas;
mod ceiling;
mod code;
mod deferred;
mod driver;
mod exec;
mod frame;
mod graphs;
mod inputs;
mod lists;
mod options;
mod parts;
mod picks;
mod repack;
mod retarget;
mod tiles;
mod timer;
mod turn;
mod upload;
mod watch;

pub use crate::exec::GpuError;
pub use ceiling::{CEILING_BYTES, read_ceiling};
pub use driver::{DeviceMemory, Gpu};
pub use exec::CudaExecutor;
pub(crate) use frame::Frame;
pub use options::CudaOptions;
pub(crate) use watch::{DeviceState, Watch};
