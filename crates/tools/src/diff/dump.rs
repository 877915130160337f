//! What another implementation computed: a file that `dump_hidden.py` writes.
//!
//! The file may be anybody's: its header is read within bounds, a tensor is read only once its size is known to be
//! that of a value of ours, and nothing else is sized by it.

use std::path::{Path, PathBuf};

use infernum_frontend_hf::safetensors::StoredType;
use infernum_frontend_hf::{Checkpoint, CheckpointError, TensorView};

/// Most tokens: a layer's values are all held at once, also those of tokens by tokens.
const MOST_TOKENS: usize = 512;
/// Most tensors within a layer that are looked at.
const MOST_NAMES: usize = 4096;

/// The file says something else than it should.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub(crate) enum DumpError {
    #[error(transparent)]
    File(#[from] CheckpointError),
    #[error("{}: expected {expected}, found {found}; `infernum diff --script` prints the script that makes such a file", path.display())]
    Content { path: PathBuf, expected: String, found: String },
}

/// The file, read as far as its header.
pub(crate) struct Dump {
    path: PathBuf,
    file: Checkpoint,
    /// What was computed.
    pub(crate) tokens: Vec<u32>,
}

/// A tensor of the file.
pub(crate) struct Theirs {
    pub(crate) shape: Vec<u64>,
    pub(crate) data: Vec<f64>,
}

impl Dump {
    pub(crate) fn open(path: &Path) -> Result<Dump, DumpError> {
        let file = Checkpoint::open_file(path)?;
        let mut dump = Dump { path: path.to_owned(), file, tokens: Vec::new() };
        let expected = format!("a tensor `tokens`, i32 or i64 [T] of 1 to {MOST_TOKENS} ids");
        let wrong = |found: String| dump.content(&expected, found);
        let tokens = dump.file.tensor("tokens").ok_or_else(|| wrong("none".to_owned()))?;
        let fits = matches!(tokens.shape, [n] if (1..=MOST_TOKENS as u64).contains(n));
        let ids = (fits && is_integer(tokens.dtype)).then(|| numbers(&tokens)).flatten();
        let ids = ids.ok_or_else(|| wrong(shown(&tokens)))?;
        let bad = ids.iter().find(|id| !(0.0..=f64::from(u32::MAX)).contains(*id));
        if let Some(bad) = bad {
            return Err(wrong(format!("the id {bad}")));
        }
        dump.tokens = ids.into_iter().map(|id| id as u32).collect();
        Ok(dump)
    }

    /// The tensor of that name, which must have so many elements.
    pub(crate) fn expect(&self, name: &str, shape: &[u64]) -> Result<Theirs, DumpError> {
        let expected = || format!("a tensor `{name}`, a float type {shape:?}");
        let tensor = self.file.tensor(name);
        let tensor = tensor.ok_or_else(|| self.content(&expected(), "none".to_owned()))?;
        let fits = tensor.shape == shape && !is_integer(tensor.dtype);
        let data = fits.then(|| numbers(&tensor)).flatten();
        let data = data.ok_or_else(|| self.content(&expected(), shown(&tensor)))?;
        Ok(Theirs { shape: tensor.shape.to_vec(), data })
    }

    /// The tensor of that name, if there is one of floats with so many elements.
    pub(crate) fn find(&self, name: &str, elements: usize) -> Option<Theirs> {
        let tensor = self.file.tensor(name).filter(|t| !is_integer(t.dtype))?;
        let count = tensor.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d))?;
        if count != elements as u64 {
            return None;
        }
        Some(Theirs { shape: tensor.shape.to_vec(), data: numbers(&tensor)? })
    }

    /// The names of what was computed within a stage, `STAGE/..` and `STAGE:..`, without the stage's name.
    pub(crate) fn within(&self, stage: &str) -> Vec<&str> {
        let all = self.file.names().filter_map(|n| n.strip_prefix(stage));
        all.filter(|rest| rest.starts_with(['/', ':'])).take(MOST_NAMES).collect()
    }

    /// How much a rounding to the coarsest element type of what it holds changes a value, relative to it.
    pub(crate) fn rounding(&self) -> f64 {
        let all = self.file.tensors().filter(|t| !is_integer(t.dtype));
        let coarse = all.map(|t| t.dtype).any(|dtype| dtype == StoredType::Bf16);
        2f64.powi(if coarse { -8 } else { -24 })
    }

    pub(crate) fn content(&self, expected: &str, found: String) -> DumpError {
        DumpError::Content { path: self.path.clone(), expected: expected.to_owned(), found }
    }
}

fn is_integer(dtype: StoredType) -> bool {
    matches!(dtype, StoredType::I32 | StoredType::I64 | StoredType::U32)
}

fn shown(tensor: &TensorView<'_>) -> String {
    format!("{} {:?}", tensor.dtype, tensor.shape)
}

/// A tensor's elements; `None` if they are of no type that such files have.
fn numbers(tensor: &TensorView<'_>) -> Option<Vec<f64>> {
    fn each<const N: usize>(data: &[u8], value: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        data.as_chunks::<N>().0.iter().map(|bytes| value(*bytes)).collect()
    }
    let data = tensor.data;
    Some(match tensor.dtype {
        StoredType::F64 => each(data, f64::from_le_bytes),
        StoredType::F32 => each(data, |b| f64::from(f32::from_le_bytes(b))),
        StoredType::Bf16 => {
            each(data, |b| f64::from(f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)))
        }
        StoredType::I32 => each(data, |b| f64::from(i32::from_le_bytes(b))),
        StoredType::U32 => each(data, |b| f64::from(u32::from_le_bytes(b))),
        StoredType::I64 => each(data, |b| i64::from_le_bytes(b) as f64),
        _ => return None,
    })
}
