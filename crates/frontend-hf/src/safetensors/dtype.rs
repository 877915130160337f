//! Element types of the file format.

use std::fmt;

use infernum_ir::DType;
use infernum_ir::encoding::Element;

macro_rules! stored_types {
    ($($variant:ident $name:literal $bits:literal,)*) => {
        /// Element type of a stored tensor: every type that the format defines, whether or not the
        /// engine can compute with it. A tensor of any of them may exist in a file.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs, reason = "the variants are the format's own names")]
        pub enum StoredType { $($variant,)* }

        impl StoredType {
            /// Every type of the format.
            pub const ALL: &[StoredType] = &[$(StoredType::$variant,)*];

            /// The name used in file headers.
            pub const fn name(self) -> &'static str {
                match self { $(StoredType::$variant => $name,)* }
            }

            /// Bits of one element; some types share bytes.
            pub const fn bits(self) -> u64 {
                match self { $(StoredType::$variant => $bits,)* }
            }
        }
    };
}

stored_types! {
    Bool "BOOL" 8,
    F4 "F4" 4,
    F6E2m3 "F6_E2M3" 6,
    F6E3m2 "F6_E3M2" 6,
    U8 "U8" 8,
    I8 "I8" 8,
    F8e5m2 "F8_E5M2" 8,
    F8e4m3 "F8_E4M3" 8,
    F8e8m0 "F8_E8M0" 8,
    F8e4m3fnuz "F8_E4M3FNUZ" 8,
    F8e5m2fnuz "F8_E5M2FNUZ" 8,
    I16 "I16" 16,
    U16 "U16" 16,
    F16 "F16" 16,
    Bf16 "BF16" 16,
    I32 "I32" 32,
    U32 "U32" 32,
    F32 "F32" 32,
    C64 "C64" 64,
    F64 "F64" 64,
    I64 "I64" 64,
    U64 "U64" 64,
}

impl StoredType {
    /// The type with this header name.
    pub fn from_name(name: &str) -> Option<StoredType> {
        StoredType::ALL.iter().copied().find(|t| t.name() == name)
    }

    /// The engine's type with the same bytes, where it has one.
    pub const fn ir(self) -> Option<DType> {
        match self {
            StoredType::F32 => Some(DType::F32),
            StoredType::F16 => Some(DType::F16),
            StoredType::Bf16 => Some(DType::Bf16),
            StoredType::I32 => Some(DType::I32),
            StoredType::U32 => Some(DType::U32),
            StoredType::F8e4m3 => Some(DType::F8e4m3),
            StoredType::F8e5m2 => Some(DType::F8e5m2),
            StoredType::Bool
            | StoredType::F4
            | StoredType::F6E2m3
            | StoredType::F6E3m2
            | StoredType::U8
            | StoredType::I8
            | StoredType::F8e8m0
            | StoredType::F8e4m3fnuz
            | StoredType::F8e5m2fnuz
            | StoredType::I16
            | StoredType::U16
            | StoredType::C64
            | StoredType::F64
            | StoredType::I64
            | StoredType::U64 => None,
        }
    }

    /// The type of such elements.
    pub const fn of(element: Element) -> StoredType {
        match element {
            Element::U8 => StoredType::U8,
            Element::I8 => StoredType::I8,
            Element::U16 => StoredType::U16,
            Element::I16 => StoredType::I16,
            Element::U32 => StoredType::U32,
            Element::I32 => StoredType::I32,
            Element::F16 => StoredType::F16,
            Element::Bf16 => StoredType::Bf16,
            Element::F32 => StoredType::F32,
            Element::F8e4m3 => StoredType::F8e4m3,
            Element::F8e5m2 => StoredType::F8e5m2,
            Element::F8e8m0 => StoredType::F8e8m0,
        }
    }

    /// As what encodings may be made of, where it is such.
    pub const fn element(self) -> Option<Element> {
        match self {
            StoredType::U8 => Some(Element::U8),
            StoredType::I8 => Some(Element::I8),
            StoredType::U16 => Some(Element::U16),
            StoredType::I16 => Some(Element::I16),
            StoredType::U32 => Some(Element::U32),
            StoredType::I32 => Some(Element::I32),
            StoredType::F16 => Some(Element::F16),
            StoredType::Bf16 => Some(Element::Bf16),
            StoredType::F32 => Some(Element::F32),
            StoredType::F8e4m3 => Some(Element::F8e4m3),
            StoredType::F8e5m2 => Some(Element::F8e5m2),
            StoredType::F8e8m0 => Some(Element::F8e8m0),
            StoredType::Bool
            | StoredType::F4
            | StoredType::F6E2m3
            | StoredType::F6E3m2
            | StoredType::F8e4m3fnuz
            | StoredType::F8e5m2fnuz
            | StoredType::C64
            | StoredType::F64
            | StoredType::I64
            | StoredType::U64 => None,
        }
    }

    /// Bytes of a tensor of this shape; `None` when the product overflows or does not end on a
    /// whole byte.
    pub fn byte_len(self, shape: &[u64]) -> Option<u64> {
        let count = shape.iter().try_fold(1_u64, |n, &d| n.checked_mul(d))?;
        let bits = count.checked_mul(self.bits())?;
        (bits % 8 == 0).then_some(bits / 8)
    }
}

impl fmt::Display for StoredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
