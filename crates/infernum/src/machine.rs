//! What plans run on.

use std::sync::Arc;

use infernum_codegen::cuda::Device;
use infernum_passes::fuse::CostTable;
use infernum_runtime::cuda::Gpu;

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
        Ok(match device {
            Some(DeviceId::Cuda(n)) => Machine::Gpu(Gpu::open(n)?),
            None if Gpu::count().is_ok_and(|n| n > 0) => Machine::Gpu(Gpu::open(0)?),
            Some(DeviceId::Cpu) | None => Machine::Cpu,
        })
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
        let Some(device) = self.device() else {
            return Ok((CPU.to_owned(), options.cost_table(CPU)?));
        };
        // A chip without a table of its own has that of the one before it.
        let known = Device::KNOWN.iter().rev().filter(|(_, sm, _)| *sm <= device.sm);
        for (name, ..) in known {
            if CostTable::named(name, options.data.as_deref()).is_ok() {
                return Ok(((*name).to_owned(), options.cost_table(name)?));
            }
        }
        Err(Error::NoCosts { arch: device.arch })
    }

    /// The pipeline that `default` stands for.
    pub fn pipeline(&self) -> &'static str {
        match self {
            Machine::Cpu => "default",
            Machine::Gpu(_) => "cuda",
        }
    }
}
