//! Element types of values.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Element type of a tensor. How a weight is stored is another matter: its [`Encoding`](crate::Encoding).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the variants are the field's own names")]
pub enum DType {
    F32,
    F16,
    Bf16,
    I32,
    U32,
    /// 8-bit float, 4 exponent bits, no infinities (OCP `E4M3`).
    F8e4m3,
    F8e5m2,
}

impl DType {
    /// Every element type, in printing order.
    pub const ALL: [DType; 7] =
        [DType::F32, DType::F16, DType::Bf16, DType::I32, DType::U32, DType::F8e4m3, DType::F8e5m2];

    /// The name used in IR text and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::U32 => "u32",
            DType::F8e4m3 => "f8e4m3",
            DType::F8e5m2 => "f8e5m2",
        }
    }

    /// Bytes of one value.
    pub const fn size(self) -> u64 {
        match self {
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F16 | DType::Bf16 => 2,
            DType::F8e4m3 | DType::F8e5m2 => 1,
        }
    }

    /// Bytes of `n` values; `None` when the product overflows.
    pub fn bytes(self, n: u64) -> Option<u64> {
        n.checked_mul(self.size())
    }

    /// True for the floating-point types.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::Bf16 | DType::F8e4m3 | DType::F8e5m2)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        DType::ALL.into_iter().find(|d| d.name() == s).ok_or_else(|| {
            let known: Vec<_> = DType::ALL.iter().map(|d| d.name()).collect();
            format!("unknown element type `{s}`; known: {}", known.join(", "))
        })
    }
}
