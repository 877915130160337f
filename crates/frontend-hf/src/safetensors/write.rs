//! A minimal writer: tensors of floats, or of bytes as they are, written whole or not at all.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use half::bf16;

use super::StoredType;
use crate::save::save;

/// A tensor could not be written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum WriteError {
    #[error("{}: tensor `{tensor}`: shape {shape:?} does not describe {len} values", path.display())]
    Shape { path: PathBuf, tensor: String, shape: Vec<u64>, len: usize },
    #[error("{}: tensor `{tensor}`: is given twice, or has a reserved name", path.display())]
    Name { path: PathBuf, tensor: String },
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
}

/// The values of a tensor to write, row-major.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the variants are the types' own names")]
pub enum TensorData<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F64(&'a [f64]),
    /// Elements of any type whose elements are whole bytes, as the file has them.
    Bytes(StoredType, &'a [u8]),
}

/// A tensor to write. The shape's product is the number of values.
#[derive(Clone, Copy, Debug)]
pub struct TensorOut<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// Dimensions, outermost first.
    pub shape: &'a [u64],
    /// Values.
    pub data: TensorData<'a>,
}

impl TensorData<'_> {
    fn dtype(self) -> StoredType {
        match self {
            TensorData::F32(_) => StoredType::F32,
            TensorData::Bf16(_) => StoredType::Bf16,
            TensorData::F64(_) => StoredType::F64,
            TensorData::Bytes(dtype, _) => dtype,
        }
    }

    fn len(self) -> usize {
        match self {
            TensorData::F32(v) => v.len(),
            TensorData::Bf16(v) => v.len(),
            TensorData::F64(v) => v.len(),
            TensorData::Bytes(dtype, v) => v.len() / (dtype.bits() as usize / 8).max(1),
        }
    }

    fn write(self, out: &mut impl Write) -> io::Result<()> {
        match self {
            TensorData::F32(v) => v.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())),
            TensorData::Bf16(v) => v.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())),
            TensorData::F64(v) => v.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())),
            TensorData::Bytes(_, v) => out.write_all(v),
        }
    }
}

/// Writes `tensors` to `path`: first to a temporary file beside it, then renamed over it, so that a
/// reader sees the old file or the whole new one. Data is aligned to its element size.
pub fn write_safetensors(path: &Path, tensors: &[TensorOut<'_>]) -> Result<(), WriteError> {
    // Widest elements first keeps every tensor aligned, as the format's own writer does.
    let mut order: Vec<&TensorOut<'_>> = tensors.iter().collect();
    order.sort_by_key(|t| (std::cmp::Reverse(t.data.dtype().bits()), t.name));
    check(path, &order)?;
    save(path, |out| write_to(out, &order), |_| Ok(()))
        .map_err(|error| WriteError::Io { path: path.into(), error })
}

fn check(path: &Path, tensors: &[&TensorOut<'_>]) -> Result<(), WriteError> {
    for tensor in tensors {
        let (dtype, len) = (tensor.data.dtype(), tensor.data.len());
        if dtype.byte_len(tensor.shape) != Some(len as u64 * dtype.bits() / 8) {
            return Err(WriteError::Shape {
                path: path.into(),
                tensor: tensor.name.into(),
                shape: tensor.shape.into(),
                len,
            });
        }
    }
    let mut names: Vec<&str> = tensors.iter().map(|t| t.name).collect();
    names.push("__metadata__");
    names.sort_unstable();
    match names.windows(2).find(|w| w[0] == w[1]) {
        Some(pair) => Err(WriteError::Name { path: path.into(), tensor: pair[0].into() }),
        None => Ok(()),
    }
}

/// Writes the whole file to `out`.
fn write_to(out: &mut impl Write, tensors: &[&TensorOut<'_>]) -> io::Result<()> {
    let header = header(tensors);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    tensors.iter().try_for_each(|tensor| tensor.data.write(out))
}

/// The JSON header, padded with spaces so that the data starts at a multiple of 8.
fn header(tensors: &[&TensorOut<'_>]) -> String {
    let mut begin = 0;
    let items = tensors.iter().map(|tensor| {
        let dtype = tensor.data.dtype();
        let end = begin + tensor.data.len() as u64 * dtype.bits() / 8;
        let info = serde_json::json!({
            "dtype": dtype.name(),
            "shape": tensor.shape,
            "data_offsets": [begin, end],
        });
        begin = end;
        (tensor.name.to_owned(), info)
    });
    let mut text = serde_json::Value::Object(items.collect()).to_string();
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    text
}
