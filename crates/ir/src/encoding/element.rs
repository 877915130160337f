//! What stored memory is made of: more types than tensors have, as it is only ever decoded.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use super::Number;
use crate::DType;

/// Type of one stored element, little-endian. Every [`DType`] is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the variants are the field's own names")]
pub enum Element {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F16,
    Bf16,
    F32,
    /// 8-bit float, 4 exponent bits, no infinities (OCP `E4M3`).
    F8e4m3,
    F8e5m2,
    /// A power of two: 8 exponent bits and nothing else (OCP `E8M0`).
    F8e8m0,
}

impl Element {
    /// Every type, with its name.
    pub const ALL: [(Element, &'static str); 12] = [
        (Element::U8, "u8"),
        (Element::I8, "i8"),
        (Element::U16, "u16"),
        (Element::I16, "i16"),
        (Element::U32, "u32"),
        (Element::I32, "i32"),
        (Element::F16, "f16"),
        (Element::Bf16, "bf16"),
        (Element::F32, "f32"),
        (Element::F8e4m3, "f8e4m3"),
        (Element::F8e5m2, "f8e5m2"),
        (Element::F8e8m0, "f8e8m0"),
    ];

    /// The name used in files and messages.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|row| row.0 == self).map_or("?", |row| row.1)
    }

    /// Bytes of one.
    pub const fn size(self) -> u64 {
        match self {
            Element::U8 | Element::I8 | Element::F8e4m3 | Element::F8e5m2 | Element::F8e8m0 => 1,
            Element::U16 | Element::I16 | Element::F16 | Element::Bf16 => 2,
            Element::U32 | Element::I32 | Element::F32 => 4,
        }
    }

    /// Whether its values are whole numbers in type, too.
    pub const fn is_whole(self) -> bool {
        matches!(
            self,
            Element::U8 | Element::I8 | Element::U16 | Element::I16 | Element::U32 | Element::I32
        )
    }

    /// The value of `bytes`, of which there are [`Element::size`]; exact. NaN where there are not.
    pub fn read(self, bytes: &[u8]) -> Number {
        match (self, bytes) {
            (Element::U8, [b]) => Number::Int(i64::from(*b)),
            (Element::I8, [b]) => Number::Int(i64::from(*b as i8)),
            (Element::U16, [a, b]) => Number::Int(i64::from(u16::from_le_bytes([*a, *b]))),
            (Element::I16, [a, b]) => Number::Int(i64::from(i16::from_le_bytes([*a, *b]))),
            (Element::U32, [a, b, c, d]) => {
                Number::Int(i64::from(u32::from_le_bytes([*a, *b, *c, *d])))
            }
            (Element::I32, [a, b, c, d]) => {
                Number::Int(i64::from(i32::from_le_bytes([*a, *b, *c, *d])))
            }
            (Element::F16, [a, b]) => Number::Float(f16::from_le_bytes([*a, *b]).to_f32()),
            (Element::Bf16, [a, b]) => Number::Float(bf16::from_le_bytes([*a, *b]).to_f32()),
            (Element::F32, [a, b, c, d]) => Number::Float(f32::from_le_bytes([*a, *b, *c, *d])),
            (Element::F8e4m3, [b]) => Number::Float(e4m3(*b)),
            // The upper half of an f16.
            (Element::F8e5m2, [b]) => Number::Float(f16::from_le_bytes([0, *b]).to_f32()),
            (Element::F8e8m0, [b]) => Number::Float(e8m0(*b)),
            _ => Number::Float(f32::NAN),
        }
    }

    /// Whether `bytes`, of which there are [`Element::size`], are a finite number.
    pub(super) fn is_finite(self, bytes: &[u8]) -> bool {
        match (self, bytes) {
            // All bits of the exponent are set.
            (Element::F16, [_, b]) | (Element::F8e5m2, [b]) => b & 0x7c != 0x7c,
            (Element::Bf16, [a, b]) | (Element::F32, [_, _, a, b]) => {
                b & 0x7f != 0x7f || a & 0x80 == 0
            }
            (Element::F8e4m3, [b]) => b & 0x7f != 0x7f,
            (Element::F8e8m0, [b]) => *b != 255,
            _ => self.is_whole(),
        }
    }

    /// Changes random bytes of one float so that its magnitude is from 2^exponent to 2^(exponent + 1), or the
    /// nearest that it has, of whole numbers nothing.
    pub(super) fn tame(self, bytes: &mut [u8], exponent: i32) {
        let biased = |bias: i32, most: i32| (exponent + bias).clamp(1, most) as u8;
        match (self, bytes) {
            (Element::F16, [_, b]) | (Element::F8e5m2, [b]) => *b = *b & 0x83 | biased(15, 30) << 2,
            (Element::Bf16, [a, b]) | (Element::F32, [_, _, a, b]) => {
                let biased = biased(127, 254);
                *a = *a & 0x7f | biased << 7;
                *b = *b & 0x80 | biased >> 1;
            }
            (Element::F8e4m3, [b]) => *b = *b & 0x87 | biased(7, 14) << 3,
            (Element::F8e8m0, [b]) => *b = biased(127, 254),
            _ => {}
        }
    }
}

fn e4m3(b: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(b >> 3 & 15), f32::from(b & 7));
    let magnitude = match exponent {
        15 if b & 7 == 7 => f32::NAN,
        0 => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if b & 128 == 0 { magnitude } else { -magnitude }
}

fn e8m0(b: u8) -> f32 {
    match b {
        255 => f32::NAN,
        // 2^-127 is subnormal.
        0 => f32::from_bits(1 << 22),
        _ => f32::from_bits(u32::from(b) << 23),
    }
}

impl From<DType> for Element {
    fn from(dtype: DType) -> Element {
        match dtype {
            DType::F32 => Element::F32,
            DType::F16 => Element::F16,
            DType::Bf16 => Element::Bf16,
            DType::I32 => Element::I32,
            DType::U32 => Element::U32,
            DType::F8e4m3 => Element::F8e4m3,
            DType::F8e5m2 => Element::F8e5m2,
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Element {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let found = Element::ALL.iter().find(|(_, name)| *name == s);
        found.map(|(element, _)| *element).ok_or_else(|| {
            let known: Vec<_> = Element::ALL.iter().map(|(_, name)| *name).collect();
            format!("expected an element type ({}), found `{s}`", known.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn float(element: Element, bytes: &[u8]) -> f32 {
        element.read(bytes).float()
    }

    #[test]
    fn small_floats_are_what_their_standard_says() {
        let e4m3 = |b| float(Element::F8e4m3, &[b]);
        assert_eq!([e4m3(0x00), e4m3(0x01), e4m3(0x08)], [0.0, 2f32.powi(-9), 2f32.powi(-6)]);
        assert_eq!([e4m3(0x38), e4m3(0xb8), e4m3(0x7e)], [1.0, -1.0, 448.0]);
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        let e5m2 = |b| float(Element::F8e5m2, &[b]);
        assert_eq!([e5m2(0x3c), e5m2(0x7b), e5m2(0x01)], [1.0, 57344.0, 2f32.powi(-16)]);
        assert!(e5m2(0x7c).is_infinite() && e5m2(0x7e).is_nan());
        let e8m0 = |b| float(Element::F8e8m0, &[b]);
        assert_eq!([e8m0(127), e8m0(128), e8m0(1)], [1.0, 2.0, 2f32.powi(-126)]);
        assert_eq!(f64::from(e8m0(0)), 2f64.powi(-127));
        assert!(e8m0(255).is_nan());
    }

    #[test]
    fn tame_floats_are_neither_large_nor_small() {
        for (element, _) in Element::ALL.into_iter().filter(|(e, _)| !e.is_whole()) {
            for (fill, exponent) in [(0x00, -5), (0x5a, -5), (0xff, -5), (0xff, -2), (0xa5, 3)] {
                let mut bytes = vec![fill; element.size() as usize];
                element.tame(&mut bytes, exponent);
                let value = element.read(&bytes).float().abs();
                let from = 2f32.powi(exponent);
                assert!((from..2.0 * from).contains(&value), "{element}: {value}");
            }
        }
    }

    #[test]
    fn finite_is_what_reads_as_finite() {
        for (element, _) in Element::ALL {
            for high in 0..=u16::MAX {
                let mut bytes = [1, 0, 0, 0];
                let size = element.size() as usize;
                let word = high.to_le_bytes();
                bytes[size.saturating_sub(2)..size].copy_from_slice(&word[2 - size.min(2)..]);
                let bytes = &bytes[..size];
                let finite = element.read(bytes).float().is_finite();
                assert_eq!(element.is_finite(bytes), finite, "{element}: {bytes:?}");
            }
        }
    }

    #[test]
    fn whole_numbers_have_their_signs() {
        assert_eq!(Element::I8.read(&[0xff]), Number::Int(-1));
        assert_eq!(Element::U8.read(&[0xff]), Number::Int(255));
        assert_eq!(Element::U32.read(&[0xff; 4]), Number::Int(u32::MAX.into()));
        assert_eq!(Element::I16.read(&[0, 0x80]), Number::Int(-32768));
    }
}
