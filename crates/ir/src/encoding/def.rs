//! An encoding as its file says it.

use serde::{Deserialize, Serialize};

use crate::expr::Value;

/// An encoding as its file says it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EncodingDef {
    /// Its name in types.
    pub name: String,
    /// What it is and where it comes from.
    pub doc: String,
    /// What is stored.
    pub stored: Stored,
    /// Constant lists that the expressions may look into; one of whole numbers is whole.
    pub tables: Vec<(String, Vec<f64>)>,
    /// Names for numbers, and for element types, that the texts may use.
    pub constants: Vec<(String, Value)>,
    /// Names for expressions; each may use those before it.
    pub lets: Vec<(String, String)>,
    /// The values that share scale and minimum.
    pub group: Group,
    /// What is stored of each value.
    pub code: Code,
    /// What is subtracted from a code first: a whole number that is the same throughout a group.
    pub zero: Option<String>,
    /// What a code is multiplied by: an expression that is the same throughout a group.
    pub scale: String,
    /// What is then subtracted; the same throughout a group.
    pub minimum: Option<String>,
    /// A condition on the keys of a checkpoint's `quantization_config`, under which its weights may be
    /// so.
    pub when: Option<String>,
    /// Whether activations may be rounded to codes of its kind where they are multiplied with its weights, by what the
    /// checkpoint's scheme says: a condition on the same keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activations: Option<String>,
    /// Number of the type in GGUF files.
    pub gguf: Option<u32>,
    /// Whether it is the packed form: see [`packing`](super::packing).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub packed: bool,
}

/// What is stored. Types are written `f16` for one element, `u8 [32]` for several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Stored {
    /// Blocks along K, in one tensor.
    Blocks {
        /// Values of a block.
        values: u64,
        /// Its fields in order, without gaps: names and types.
        fields: Vec<(String, String)>,
    },
    /// Tensors whose names differ in the last part.
    Tensors {
        /// The last part of the name of the weight that they stand for; `*` for any.
        of: String,
        /// Last parts of their names, and types; dimensions are expressions over N and K. `*` stands for the
        /// last part of the weight's name.
        tensors: Vec<(String, String)>,
        /// Of these, the ones that may hold a single element, which then stands for all.
        broadcast: Vec<String>,
        /// Patterns of the names of tensors that may be there besides, and that no value depends on.
        unused: Vec<String>,
    },
}

/// A rectangle of values; an extent left out is that of the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Rows.
    pub n: Option<u64>,
    /// Columns.
    pub k: Option<u64>,
}

/// What is stored of a value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Code {
    /// What kind of number it is.
    pub kind: CodeKind,
    /// Bits that it needs.
    pub bits: u32,
    /// The number.
    pub value: String,
}

/// Kinds of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "named as usual")]
pub enum CodeKind {
    /// A whole number from 0 on.
    Unsigned,
    /// A whole number in two's complement.
    Signed,
    E4m3,
    E5m2,
    E2m1,
    /// An entry of a table.
    Table,
}

impl CodeKind {
    /// The name used in files.
    pub const fn name(self) -> &'static str {
        match self {
            CodeKind::Unsigned => "unsigned",
            CodeKind::Signed => "signed",
            CodeKind::E4m3 => "e4m3",
            CodeKind::E5m2 => "e5m2",
            CodeKind::E2m1 => "e2m1",
            CodeKind::Table => "table",
        }
    }
}

/// A definition that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct EncodingFault {
    /// What it is about.
    pub of: FaultIn,
    /// Byte offset in that text.
    pub at: usize,
    /// What was expected and found.
    pub message: String,
}

/// A text of a definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named after the definition's fields")]
pub enum FaultIn {
    Name,
    /// A field or tensor.
    Part(usize),
    /// A named expression.
    Let(usize),
    Code,
    Zero,
    Scale,
    Minimum,
    When,
    Activations,
}
