//! Element types: plain scalars and the block-quantised formats.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Element type of a tensor.
///
/// Scalar types store one value per element. Block formats store `block().0` values in
/// `block().1` bytes and appear only on weights.
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
    /// GGUF blocks (`ggml-common.h`).
    Q4_0,
    Q8_0,
    Q4K,
    Q6K,
    Gptq4,
    Awq4,
}

impl DType {
    /// Every element type, in printing order.
    pub const ALL: [DType; 13] = [
        DType::F32,
        DType::F16,
        DType::Bf16,
        DType::I32,
        DType::U32,
        DType::F8e4m3,
        DType::F8e5m2,
        DType::Q4_0,
        DType::Q8_0,
        DType::Q4K,
        DType::Q6K,
        DType::Gptq4,
        DType::Awq4,
    ];

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
            DType::Q4_0 => "q4_0",
            DType::Q8_0 => "q8_0",
            DType::Q4K => "q4_k",
            DType::Q6K => "q6_k",
            DType::Gptq4 => "gptq4",
            DType::Awq4 => "awq4",
        }
    }

    /// `(values, bytes)` of the smallest addressable unit.
    pub const fn block(self) -> (u64, u64) {
        match self {
            DType::F32 | DType::I32 | DType::U32 => (1, 4),
            DType::F16 | DType::Bf16 => (1, 2),
            DType::F8e4m3 | DType::F8e5m2 => (1, 1),
            DType::Q4_0 => (32, 18),
            DType::Q8_0 => (32, 34),
            DType::Q4K => (256, 144),
            DType::Q6K => (256, 210),
            // Group scales and zero points live in tensors of their own.
            DType::Gptq4 | DType::Awq4 => (8, 4),
        }
    }

    /// Bytes of `n` contiguous values; `None` when `n` is not a whole number of blocks or the
    /// product overflows.
    pub fn bytes(self, n: u64) -> Option<u64> {
        let (values, bytes) = self.block();
        if n.is_multiple_of(values) { (n / values).checked_mul(bytes) } else { None }
    }

    /// True for the floating-point scalar types.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::Bf16 | DType::F8e4m3 | DType::F8e5m2)
    }

    /// True for the block-quantised formats.
    pub const fn is_quantised(self) -> bool {
        self.block().0 > 1
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
