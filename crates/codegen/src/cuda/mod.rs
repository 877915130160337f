//! The CUDA target: templates become kernels, and kernels machine code. Needs no GPU.

pub mod abi;
mod apart;
mod attach;
mod c_expr;
mod cache;
mod choose;
mod decode;
mod geometry;
mod lines;
mod nvrtc;
mod order;
mod parts;
mod reach;
mod scan;
mod template;
mod text;
mod tuned;
mod tuned_file;
mod variants;

pub use apart::ceiling;
pub use attach::{CudaError, admitted, attach, reattach};
pub(crate) use attach::{meant_for, within};
pub use cache::{Cache, CacheError, Cubin};
pub use geometry::Geometry;
pub use nvrtc::{Compiler, NvrtcError};
pub use reach::{Unreached, unreached};
pub use template::{CheckSizes, Foreign, Library, Template, TemplateError, Variant};
pub use text::arguments as launch_arguments;
pub use tuned::{Choices, Chosen, Dropped, Made, Rivals, Site, TunedVariants, rivals};
pub use tuned_file::{TunedFile, TunedVariantsError};

use serde::{Deserialize, Serialize};

/// The device that kernels are made for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// As NVRTC names the architecture: `sm_90a`.
    pub arch: String,
    /// Its compute capability: major times ten plus minor.
    pub sm: u32,
    /// Multiprocessors.
    pub sms: u32,
}

impl Device {
    /// Architectures that kernels are made for, with the multiprocessors of a usual device.
    pub const KNOWN: [(&str, u32, u32); 6] = [
        ("sm_75", 75, 40),
        ("sm_80", 80, 108),
        ("sm_86", 86, 84),
        ("sm_89", 89, 128),
        ("sm_90a", 90, 132),
        ("sm_100a", 100, 148),
    ];

    /// A usual device of an architecture.
    pub fn named(arch: &str) -> Option<Device> {
        let found = Device::KNOWN.into_iter().find(|(name, ..)| *name == arch);
        found.map(|(arch, sm, sms)| Device { arch: arch.to_owned(), sm, sms })
    }

    /// Threads that a block may have.
    pub const BLOCK_THREADS: u32 = 1024;

    /// Bytes of shared memory that a block may ask for; `None` for a chip that we do not know. (CUDA C++
    /// Programming Guide, technical specifications per compute capability, less the KiB that the driver
    /// takes of each block from 8.0 on.)
    pub fn block_shared(&self) -> Option<u32> {
        match self.sm {
            75 => Some(64 << 10),
            80 | 87 => Some(163 << 10),
            86 | 89 | 120 | 121 => Some(99 << 10),
            90 | 100 | 103 => Some(227 << 10),
            _ => None,
        }
    }

    /// The device of a compute capability: what only this chip has (the `a` of `sm_90a`) is used.
    pub fn of(sm: u32, sms: u32) -> Device {
        let arch = if sm >= 90 { format!("sm_{sm}a") } else { format!("sm_{sm}") };
        Device { arch, sm, sms }
    }
}
