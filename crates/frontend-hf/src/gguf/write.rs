//! GGUF files, version 3, written: metadata, the table of tensors, and their data one after the other.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::scan::Kind;
use super::{MAGIC, MAX_NAME, MAX_RANK};
use crate::safetensors::shown;
use crate::save::save;

const VERSION: u32 = 3;
/// Tensors begin at multiples of it: what files have that do not say.
const ALIGNMENT: u64 = 32;

/// A GGUF file could not be written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum GgufWriteError {
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("{}: `{name}` is given twice", path.display())]
    Twice { path: PathBuf, name: String },
    #[error(
        "{}: tensor `{name}`: expected a name of at most {MAX_NAME} bytes and at most {MAX_RANK} dimensions, found \
         shape {shape:?}",
        path.display()
    )]
    Tensor { path: PathBuf, name: String, shape: Vec<u64> },
    #[error("{}: tensor `{name}`: expected {expected} bytes, found {found}", path.display())]
    Size { path: PathBuf, name: String, expected: u64, found: u64 },
    #[error("{}: tensor `{name}`: {message}", path.display())]
    Data { path: PathBuf, name: String, message: String },
    #[error("{}: what was written cannot be read as it is meant: {message}", path.display())]
    Check { path: PathBuf, message: String },
}

/// A value of metadata.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the variants are the types' own names")]
pub enum Datum {
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(String),
    U32s(Vec<u32>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    Bools(Vec<bool>),
    Texts(Vec<String>),
    /// A value of another file: its type and what follows it there.
    Copied(Vec<u8>),
}

impl Datum {
    fn kind(&self) -> Kind {
        match self {
            Datum::U32(_) | Datum::U32s(_) => Kind::U32,
            Datum::I32(_) | Datum::I32s(_) => Kind::I32,
            Datum::F32(_) | Datum::F32s(_) => Kind::F32,
            Datum::Bool(_) | Datum::Bools(_) => Kind::Bool,
            Datum::Text(_) | Datum::Texts(_) => Kind::Text,
            Datum::Copied(_) => Kind::U8,
        }
    }

    /// Its type and its bytes.
    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let kind = self.kind().number();
        let mut list = |len: usize| {
            out.write_all(&Kind::List.number().to_le_bytes())?;
            out.write_all(&kind.to_le_bytes())?;
            out.write_all(&(len as u64).to_le_bytes())
        };
        match self {
            Datum::U32s(items) => list(items.len())?,
            Datum::I32s(items) => list(items.len())?,
            Datum::F32s(items) => list(items.len())?,
            Datum::Bools(items) => list(items.len())?,
            Datum::Texts(items) => list(items.len())?,
            Datum::Copied(_) => {}
            _ => out.write_all(&kind.to_le_bytes())?,
        }
        match self {
            Datum::U32(x) => out.write_all(&x.to_le_bytes()),
            Datum::I32(x) => out.write_all(&x.to_le_bytes()),
            Datum::F32(x) => out.write_all(&x.to_le_bytes()),
            Datum::Bool(x) => out.write_all(&[u8::from(*x)]),
            Datum::Text(x) => text(out, x),
            Datum::U32s(items) => items.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())),
            Datum::I32s(items) => items.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())),
            Datum::F32s(items) => items.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())),
            Datum::Bools(items) => items.iter().try_for_each(|x| out.write_all(&[u8::from(*x)])),
            Datum::Texts(items) => items.iter().try_for_each(|x| text(out, x)),
            Datum::Copied(bytes) => out.write_all(bytes),
        }
    }
}

/// Metadata: keys and their values, as they are written.
pub type Metadata = Vec<(String, Datum)>;

/// A line of the table of tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorLine {
    /// Its name.
    pub name: String,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Number of its type.
    pub kind: u32,
    /// Bytes of its data.
    pub bytes: u64,
}

/// Writes a file, or nothing where that fails. `data` gives the bytes of the tensor of an index, which is asked for once
/// and in order; `check` sees the file before it has its name.
pub fn write_gguf(
    path: &Path,
    metadata: &[(String, Datum)],
    tensors: &[TensorLine],
    mut data: impl FnMut(usize) -> Result<Vec<u8>, String>,
    check: impl FnOnce(&Path) -> Result<(), String>,
) -> Result<(), GgufWriteError> {
    check_table(path, metadata, tensors)?;
    let io = |error| GgufWriteError::Io { path: path.to_owned(), error };
    let write = |out: &mut _| {
        let head = head(metadata, tensors).map_err(Fault::Io)?;
        write_padded(out, &head)?;
        for (i, tensor) in tensors.iter().enumerate() {
            let fault = |message| GgufWriteError::Data {
                path: path.to_owned(),
                name: tensor.name.clone(),
                message,
            };
            let bytes = data(i).map_err(|message| Fault::Other(fault(message)))?;
            if bytes.len() as u64 != tensor.bytes {
                return Err(Fault::Other(GgufWriteError::Size {
                    path: path.to_owned(),
                    name: tensor.name.clone(),
                    expected: tensor.bytes,
                    found: bytes.len() as u64,
                }));
            }
            write_padded(out, &bytes)?;
        }
        Ok(())
    };
    let check = |temporary: &Path| {
        let wrong = |message| GgufWriteError::Check { path: path.to_owned(), message };
        check(temporary).map_err(|message| Fault::Other(wrong(message)))
    };
    save(path, write, check).map_err(|fault| match fault {
        Fault::Io(error) => io(error),
        Fault::Other(error) => error,
    })
}

/// What ends a write.
enum Fault {
    Io(io::Error),
    Other(GgufWriteError),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Fault {
        Fault::Io(error)
    }
}

fn check_table(
    path: &Path,
    metadata: &[(String, Datum)],
    tensors: &[TensorLine],
) -> Result<(), GgufWriteError> {
    let keys = metadata.iter().map(|(key, _)| key.as_str()).collect();
    let names = tensors.iter().map(|t| t.name.as_str()).collect();
    for mut all in [keys, names] as [Vec<&str>; 2] {
        all.sort_unstable();
        if let Some(pair) = all.windows(2).find(|w| w[0] == w[1]) {
            return Err(GgufWriteError::Twice { path: path.to_owned(), name: shown(pair[0]) });
        }
    }
    match tensors.iter().find(|t| t.name.len() > MAX_NAME || t.shape.len() > MAX_RANK) {
        Some(t) => Err(GgufWriteError::Tensor {
            path: path.to_owned(),
            name: shown(&t.name),
            shape: t.shape.clone(),
        }),
        None => Ok(()),
    }
}

/// Header, metadata and the table of tensors.
fn head(metadata: &[(String, Datum)], tensors: &[TensorLine]) -> io::Result<Vec<u8>> {
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        text(&mut out, key)?;
        value.write(&mut out)?;
    }
    let mut offset = 0u64;
    for tensor in tensors {
        text(&mut out, &tensor.name)?;
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().rev().for_each(|dim| out.extend(dim.to_le_bytes()));
        out.extend(tensor.kind.to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += tensor.bytes.next_multiple_of(ALIGNMENT);
    }
    Ok(out)
}

fn text(out: &mut impl Write, text: &str) -> io::Result<()> {
    out.write_all(&(text.len() as u64).to_le_bytes())?;
    out.write_all(text.as_bytes())
}

/// Bytes, and zeros up to where the next ones begin.
fn write_padded(out: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    let len = bytes.len() as u64;
    out.write_all(bytes)?;
    out.write_all(&[0; ALIGNMENT as usize][..(len.next_multiple_of(ALIGNMENT) - len) as usize])
}
