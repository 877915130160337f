//! What plans run on.

use std::sync::Arc;

use infernum_codegen::cuda::Device;
use infernum_passes::fuse::CostTable;
use infernum_runtime::cuda::{Gpu, GpuError};

use crate::error::Error;
use crate::options::{CompileOptions, DeviceId};

/// The target of plans for the host.
pub const CPU: &str = "cpu";

/// What plans run on. Cloning is cheap.
#[derive(Clone, Debug)]
pub enum Machine {
    /// The host.
    Cpu,
    /// A GPU that is open.
    Gpu(Arc<Gpu>),
}

impl Machine {
    /// What was asked for, or the first GPU if there is one, or the host.
    pub fn open(device: Option<DeviceId>) -> Result<Machine, Error> {
        match device {
            Some(DeviceId::Cuda(n)) => Ok(Machine::Gpu(Gpu::open(n)?)),
            Some(DeviceId::Cpu) => Ok(Machine::Cpu),
            None => first(Gpu::count(), || Gpu::open(0)),
        }
    }

    /// What kernels are compiled for; `None` for the host.
    pub fn device(&self) -> Option<Device> {
        match self {
            Machine::Cpu => None,
            Machine::Gpu(gpu) => Some(Device::of(gpu.sm, gpu.sms)),
        }
    }

    /// The name of its cost table, and the table.
    pub fn costs(&self, options: &CompileOptions) -> Result<(String, CostTable), Error> {
        match self.device() {
            None => Ok((CPU.to_owned(), options.cost_table(CPU)?)),
            Some(device) => options.device_costs(&device),
        }
    }

    /// The pipeline that `default` stands for.
    pub fn pipeline(&self) -> &'static str {
        match self {
            Machine::Cpu => "default",
            Machine::Gpu(_) => "cuda",
        }
    }
}

/// The first GPU, or the host where there is none. A GPU that fails is an error: what was bought for
/// speed must not give it up unsaid.
fn first(
    count: Result<i32, GpuError>,
    open: impl FnOnce() -> Result<Arc<Gpu>, GpuError>,
) -> Result<Machine, Error> {
    let opened = match count {
        Err(GpuError::NoDriver) | Ok(0) => return Ok(Machine::Cpu),
        count => count.and_then(|_| open()),
    };
    opened.map(Machine::Gpu).map_err(Error::FirstGpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_fails_is_not_passed_over() {
        let unused = || -> Result<Arc<Gpu>, GpuError> { panic!("there is none to open") };
        assert!(matches!(first(Err(GpuError::NoDriver), unused), Ok(Machine::Cpu)));
        assert!(matches!(first(Ok(0), unused), Ok(Machine::Cpu)));
        let broken = || GpuError::Call { call: "cuInit", message: "unknown error".to_owned() };
        for failed in [first(Err(broken()), unused), first(Ok(1), || Err(broken()))] {
            let message = failed.expect_err("it is broken").to_string();
            assert!(message.contains("cuInit") && message.contains("--device cpu"), "{message}");
        }
    }
}
