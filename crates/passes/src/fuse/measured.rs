//! Measured microseconds, which go before what the cost model says.

use std::path::Path;

use infernum_frontend_hf::spec::{Source, read_ron};
use infernum_ir::{DType, Op, SourceError, Type};
use serde::{Deserialize, Serialize};

use crate::Bucket;
use crate::data::DataError;

/// A file of measurements (`--costs FILE`).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename = "Measurements", deny_unknown_fields)]
pub struct Measurements {
    /// On what, and when.
    #[serde(default)]
    pub doc: String,
    /// What was measured.
    pub calls: Vec<Measured>,
}

/// The time of the calls that these keys fit; one that is left out fits all. Of several that fit a
/// call the one with most keys counts, and of those the last.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// The target, as in `kernels/costs/`.
    pub target: String,
    /// The op.
    pub op: String,
    /// The steps it holds for: every bucket within this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bucket: Option<Bucket>,
    /// The element type of the first operand of floats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<DType>,
    /// The operands' types in IR text, such as `bf16[T, 2048]`, `_` for one that is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operands: Option<Vec<String>>,
    /// Microseconds of one call.
    pub us: f64,
}

impl Measurements {
    /// Reads a file.
    pub fn open(path: &Path) -> Result<Measurements, DataError> {
        let shown = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => Measurements::parse(&Source::new(&shown, &text)),
            Err(source) => Err(DataError::Io { path: shown, source }),
        }
    }

    /// Reads a file's text.
    pub fn parse(source: &Source) -> Result<Measurements, DataError> {
        let read: Measurements = read_ron(source)?;
        match read.calls.iter().position(|m| !m.us.is_finite() || m.us < 0.0) {
            None => Ok(read),
            Some(i) => {
                let message = format!(
                    "entry {}, `{}`: expected microseconds, found {}",
                    i + 1,
                    read.calls[i].op,
                    read.calls[i].us
                );
                Err(SourceError::new(&source.file, &source.text, 0..1, message).into())
            }
        }
    }
}

impl Measured {
    /// Whether it was measured on `target` and holds for every step of `bucket`.
    pub(super) fn is_of(&self, target: &str, bucket: Bucket) -> bool {
        let holds =
            |b: &Bucket| b.min <= bucket.min && bucket.max <= b.max && (!b.decode || bucket.decode);
        self.target == target && self.bucket.as_ref().is_none_or(holds)
    }

    /// Whether it is of calls of `op` on operands of these types.
    pub(super) fn fits(&self, op: Op, operands: &[Option<&Type>]) -> bool {
        let shown = |ty: Option<&Type>| ty.map_or_else(|| "_".to_owned(), ToString::to_string);
        self.op == op.name
            && self.dtype.is_none_or(|d| element_type(operands) == Some(d))
            && self
                .operands
                .as_ref()
                .is_none_or(|o| o.iter().cloned().eq(operands.iter().copied().map(shown)))
    }

    /// How many keys it has.
    pub(super) fn specificity(&self) -> usize {
        usize::from(self.operands.is_some())
            + usize::from(self.bucket.is_some())
            + usize::from(self.dtype.is_some())
    }
}

/// The element type of the first operand of floats.
pub(super) fn element_type(operands: &[Option<&Type>]) -> Option<DType> {
    let mut tensors = operands.iter().flatten().filter_map(|t| t.tensor().ok());
    tensors.find(|t| t.dtype.is_float()).map(|t| t.dtype)
}
