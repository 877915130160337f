//! The CUDA target: templates become kernels, and kernels machine code. Needs no GPU.

pub mod abi;
mod attach;
mod c_expr;
mod cache;
mod decode;
mod geometry;
mod nvrtc;
mod reach;
mod template;
mod text;
mod tuned;
mod variants;

pub use attach::{CudaError, admitted, attach, ceiling};
pub use cache::{Cache, CacheError, Cubin};
pub use geometry::Geometry;
pub use nvrtc::{Compiler, NvrtcError};
pub use reach::{Unreached, unreached};
pub use template::{CheckSizes, Foreign, Library, Template, TemplateError, Variant};
pub use text::arguments as launch_arguments;
pub use tuned::{TunedVariants, TunedVariantsError, site, sites};

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

    /// The device of a compute capability: what only this chip has (the `a` of `sm_90a`) is used.
    pub fn of(sm: u32, sms: u32) -> Device {
        let arch = if sm >= 90 { format!("sm_{sm}a") } else { format!("sm_{sm}") };
        Device { arch, sm, sms }
    }
}
