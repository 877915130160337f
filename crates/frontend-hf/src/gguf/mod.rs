//! The GGUF file format, versions 2 and 3: header, metadata and tensor table, read where they lie.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. Reading allocates a table of keys and one of
//! tensors, each of which took more bytes in the file than its entry takes in a quarter of the table; texts and lists
//! stay in the file.
//!
//! A tensor's type is a number. Those of plain elements are known here; of any other, the encoding that has the number
//! says how many bytes its blocks take (`kernels/encodings/*.ron`), so that here is known only how much room there is.

mod alike;
mod change;
mod error;
mod inverse;
mod map;
mod scan;
mod solve;
#[cfg(test)]
mod tests;
mod write;

pub use change::{Change, RowOrder};
pub use error::GgufError;
pub use inverse::{AsGguf, InverseError, TensorSource, as_gguf, weights};
pub use map::{ChangeDecl, ContainerMap, MapError, Mapped};
use scan::{Cursor, Kind};
pub use scan::{List, Value};
pub use write::{Datum, GgufWriteError, Metadata, TensorLine, write_gguf};

use crate::safetensors::{StoredType, shown};

const MAGIC: &[u8] = b"GGUF";
/// Dimensions of a tensor, as ggml has it.
const MAX_RANK: usize = 4;
/// Longest key and longest name of a tensor, in bytes. Longer ones are no names.
const MAX_KEY: usize = 1 << 16;
const MAX_NAME: usize = 512;
const ALIGNMENT: &str = "general.alignment";

/// Whether a file begins as GGUF files do.
pub fn is_gguf(file: &[u8]) -> bool {
    file.starts_with(MAGIC)
}

/// How a tensor's values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// As elements.
    Plain(StoredType),
    /// As blocks of the type of this number.
    Blocks(u32),
}

impl Stored {
    /// Numbers of the types of plain elements (`ggml_type` of ggml.h).
    const PLAIN: [(u32, StoredType); 8] = [
        (0, StoredType::F32),
        (1, StoredType::F16),
        (24, StoredType::I8),
        (25, StoredType::I16),
        (26, StoredType::I32),
        (27, StoredType::I64),
        (28, StoredType::F64),
        (30, StoredType::Bf16),
    ];

    /// The number of a type of plain elements, where files have it.
    pub fn number(ty: StoredType) -> Option<u32> {
        Stored::PLAIN.iter().find(|(_, plain)| *plain == ty).map(|(number, _)| *number)
    }

    fn of(number: u32) -> Stored {
        let plain = Stored::PLAIN.iter().find(|(n, _)| *n == number);
        plain.map_or(Stored::Blocks(number), |(_, ty)| Stored::Plain(*ty))
    }
}

/// The tables of a file. Names and values are positions in it, so that these have no lifetime, and methods take the
/// bytes that [`Gguf::parse`] was given.
#[derive(Clone, Debug)]
pub struct Gguf {
    version: u32,
    /// By key.
    keys: Vec<Key>,
    /// By name.
    tensors: Vec<Tensor>,
}

#[derive(Clone, Copy, Debug)]
struct Key {
    name: Span,
    kind: Kind,
    value: usize,
}

/// A tensor of a [`Gguf`].
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    name: Span,
    /// Outermost first.
    dims: [u64; MAX_RANK],
    rank: u8,
    stored: Stored,
    offset: u64,
    room: u64,
}

impl Tensor {
    /// Its dimensions, outermost first: the other way round than in the file.
    pub fn shape(&self) -> &[u64] {
        &self.dims[..usize::from(self.rank)]
    }

    /// How it is stored.
    pub fn stored(&self) -> Stored {
        self.stored
    }

    /// Where its data begins in the file.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes up to the next tensor's data or the end of the file; of plain elements those of its data.
    pub fn room(&self) -> u64 {
        self.room
    }
}

/// Start and length in bytes.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: usize,
    len: u32,
}

impl Span {
    fn of(start: usize, text: &str) -> Span {
        Span { start, len: text.len() as u32 }
    }

    /// It was UTF-8 when the file was read; only a file changed since gives the default.
    fn text(self, file: &[u8]) -> &str {
        let bytes = file.get(self.start..self.start + self.len as usize).unwrap_or_default();
        std::str::from_utf8(bytes).unwrap_or_default()
    }
}

impl Key {
    /// Its value; `None` in a file that was changed since.
    fn read(self, file: &[u8]) -> Option<Value<'_>> {
        let inside = self.value <= file.len();
        let cursor = inside.then_some(Cursor { file, at: self.value });
        cursor?.value(self.kind, "", 0).ok()
    }
}

impl Gguf {
    /// Reads and checks the tables of a whole file. On success the data of plain tensors lies within it, and no data
    /// begins within another tensor's plain data.
    pub fn parse(file: &[u8]) -> Result<Gguf, GgufError> {
        if !is_gguf(file) {
            let found = &file[..file.len().min(MAGIC.len())];
            return Err(GgufError::Magic { found: format!("`{}`", found.escape_ascii()) });
        }
        let mut cursor = Cursor { file, at: MAGIC.len() };
        let version = cursor.u32("the version")?;
        match version {
            2 | 3 => {}
            found if matches!(found.swap_bytes(), 1..=3) => return Err(GgufError::BigEndian),
            found => return Err(GgufError::Version { found }),
        }
        // A tensor takes at least the length of its name, its rank, type and offset; a key the length of its name,
        // the type of its value, and that.
        let tensors = cursor.count(24, "the tensors")?;
        let keys = cursor.count(13, "the keys")?;
        let keys = read_keys(&mut cursor, keys)?;
        let mut gguf = Gguf { version, keys, tensors: Vec::new() };
        let alignment = gguf.alignment(file)?;
        gguf.read_tensors(&mut cursor, tensors)?;
        gguf.place(file, (cursor.at as u64).next_multiple_of(alignment), alignment)?;
        gguf.tensors.sort_unstable_by(|a, b| a.name.text(file).cmp(b.name.text(file)));
        let twice = |w: &&[Tensor]| w[0].name.text(file) == w[1].name.text(file);
        match gguf.tensors.windows(2).find(twice) {
            Some(pair) => {
                Err(GgufError::DuplicateTensor { tensor: shown(pair[0].name.text(file)) })
            }
            None => Ok(gguf),
        }
    }

    /// Version of the format.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The value of a key.
    pub fn get<'a>(&self, file: &'a [u8], key: &str) -> Option<Value<'a>> {
        let at = self.keys.binary_search_by(|k| k.name.text(file).cmp(key)).ok()?;
        self.keys[at].read(file)
    }

    /// All keys with their values, in the order of their names.
    pub fn entries<'a>(&'a self, file: &'a [u8]) -> impl Iterator<Item = (&'a str, Value<'a>)> {
        self.keys.iter().filter_map(move |k| Some((k.name.text(file), k.read(file)?)))
    }

    /// All keys with their values as they lie in the file.
    pub fn copied(&self, file: &[u8]) -> Metadata {
        let value = |key: &Key| {
            let mut cursor = Cursor { file, at: key.value };
            cursor.value(key.kind, "", 0).ok()?;
            let value = file.get(key.value..cursor.at)?;
            Some(Datum::Copied([&key.kind.number().to_le_bytes()[..], value].concat()))
        };
        let keys = self.keys.iter();
        keys.filter_map(|k| Some((k.name.text(file).to_owned(), value(k)?))).collect()
    }

    /// The text of a key, where it is there.
    pub fn text<'a>(&self, file: &'a [u8], key: &str) -> Result<Option<&'a str>, GgufError> {
        match self.get(file, key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(key, "text", other)),
        }
    }

    /// The whole number of at least 0 of a key, where it is there.
    pub fn whole(&self, file: &[u8], key: &str) -> Result<Option<u64>, GgufError> {
        const EXPECTED: &str = "a whole number of at least 0";
        let Some(value) = self.get(file, key) else { return Ok(None) };
        let whole = if let Value::Whole(n) = value { u64::try_from(n).ok() } else { None };
        whole.map(Some).ok_or_else(|| wrong(key, EXPECTED, value))
    }

    /// The flag of a key, where it is there.
    pub fn flag(&self, file: &[u8], key: &str) -> Result<Option<bool>, GgufError> {
        match self.get(file, key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(wrong(key, "a flag", other)),
        }
    }

    /// The list of a key, where it is there.
    pub fn list<'a>(&self, file: &'a [u8], key: &str) -> Result<Option<List<'a>>, GgufError> {
        match self.get(file, key) {
            None => Ok(None),
            Some(Value::List(list)) => Ok(Some(list)),
            Some(other) => Err(wrong(key, "a list", other)),
        }
    }

    /// All tensors, in the order of their names.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// A tensor's name.
    pub fn name<'a>(&self, file: &'a [u8], tensor: &Tensor) -> &'a str {
        tensor.name.text(file)
    }

    /// The tensor called `name`.
    pub fn find(&self, file: &[u8], name: &str) -> Option<&Tensor> {
        let at = self.tensors.binary_search_by(|t| t.name.text(file).cmp(name)).ok()?;
        Some(&self.tensors[at])
    }

    fn alignment(&self, file: &[u8]) -> Result<u64, GgufError> {
        const DEFAULT: u64 = 32;
        const EXPECTED: &str = "a power of two of at most 65536";
        let found = self.whole(file, ALIGNMENT)?.unwrap_or(DEFAULT);
        if found.is_power_of_two() && found <= 1 << 16 {
            return Ok(found);
        }
        let key = ALIGNMENT.to_owned();
        Err(GgufError::Value { key, expected: EXPECTED, found: found.to_string() })
    }

    fn read_tensors(&mut self, cursor: &mut Cursor<'_>, count: usize) -> Result<(), GgufError> {
        self.tensors.reserve_exact(count);
        for _ in 0..count {
            let (at, name) = cursor.name(MAX_NAME, "a tensor's name")?;
            let tensor = || shown(name);
            let found = cursor.u32("a tensor's rank")?;
            if found as usize > MAX_RANK {
                return Err(GgufError::Rank { tensor: tensor(), found, most: MAX_RANK });
            }
            let rank = found as usize;
            let mut dims = [0; MAX_RANK];
            for dim in dims[..rank].iter_mut().rev() {
                *dim = cursor.u64("a tensor's shape")?;
            }
            let shape = &dims[..rank];
            let elements = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
            if elements.is_none_or(|n| n > 1 << 60) {
                return Err(GgufError::Shape { tensor: tensor(), shape: shape.to_vec() });
            }
            let stored = Stored::of(cursor.u32("a tensor's type")?);
            let offset = cursor.u64("a tensor's offset")?;
            let (name, rank) = (Span::of(at, name), rank as u8);
            self.tensors.push(Tensor { name, dims, rank, stored, offset, room: 0 });
        }
        Ok(())
    }

    /// Finds where each tensor's data lies, from the offsets after `start`.
    fn place(&mut self, file: &[u8], start: u64, alignment: u64) -> Result<(), GgufError> {
        let end = file.len() as u64;
        // What is empty takes no room from what begins where it lies.
        let elements = |t: &Tensor| t.shape().iter().product::<u64>();
        self.tensors.sort_unstable_by_key(|t| (t.offset, elements(t) > 0));
        let next: Vec<u64> = self.tensors.iter().skip(1).map(|t| t.offset).collect();
        for i in 0..self.tensors.len() {
            let tensor = self.tensors[i];
            let name = || shown(tensor.name.text(file));
            if !tensor.offset.is_multiple_of(alignment) {
                let (tensor, offset) = (name(), tensor.offset);
                return Err(GgufError::Unaligned { tensor, offset, alignment });
            }
            let needed = match tensor.stored {
                Stored::Plain(ty) => ty.byte_len(tensor.shape()).unwrap_or(u64::MAX),
                Stored::Blocks(_) => u64::from(elements(&tensor) > 0),
            };
            let at = start.saturating_add(tensor.offset);
            if at.checked_add(needed).is_none_or(|to| to > end) {
                return Err(GgufError::OutOfRange { tensor: name(), at, needed, end });
            }
            let room = next.get(i).map_or(end - at, |next| next - tensor.offset);
            if needed > room {
                let next = shown(self.tensors[i + 1].name.text(file));
                return Err(GgufError::Overlap { tensor: name(), at, needed, next, room });
            }
            let room = room.min(end - at);
            let room = if matches!(tensor.stored, Stored::Plain(_)) { needed } else { room };
            self.tensors[i].offset = at;
            self.tensors[i].room = room;
        }
        Ok(())
    }
}

fn read_keys(cursor: &mut Cursor<'_>, count: usize) -> Result<Vec<Key>, GgufError> {
    let mut keys = Vec::with_capacity(count);
    for _ in 0..count {
        let (at, name) = cursor.name(MAX_KEY, "a key")?;
        let kind = cursor.kind(name)?;
        let value = cursor.at;
        cursor.value(kind, name, 0)?;
        keys.push(Key { name: Span::of(at, name), kind, value });
    }
    let file = cursor.file;
    keys.sort_unstable_by(|a, b| a.name.text(file).cmp(b.name.text(file)));
    match keys.windows(2).find(|w| w[0].name.text(file) == w[1].name.text(file)) {
        Some(pair) => Err(GgufError::DuplicateKey { key: shown(pair[0].name.text(file)) }),
        None => Ok(keys),
    }
}

fn wrong(key: &str, expected: &'static str, found: Value<'_>) -> GgufError {
    GgufError::Value { key: shown(key), expected, found: found.kind().to_owned() }
}
