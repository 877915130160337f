//! A cursor over a GGUF file that never reads beyond it, and the values of metadata where they lie.

use super::error::GgufError;
use crate::safetensors::shown;

/// Lists within lists that are accepted; known files have none.
const MAX_NESTING: u32 = 4;

/// Types of metadata values, by their numbers in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    List,
    U64,
    I64,
    F64,
}

impl Kind {
    const ALL: [Kind; 13] = [
        Kind::U8,
        Kind::I8,
        Kind::U16,
        Kind::I16,
        Kind::U32,
        Kind::I32,
        Kind::F32,
        Kind::Bool,
        Kind::Text,
        Kind::List,
        Kind::U64,
        Kind::I64,
        Kind::F64,
    ];

    fn of(number: u32) -> Option<Kind> {
        Kind::ALL.get(number as usize).copied()
    }

    /// Its number in files.
    pub(super) fn number(self) -> u32 {
        self as u32
    }

    /// Bytes of a value; the fewest there can be, for texts and lists.
    fn size(self) -> u64 {
        match self {
            Kind::U8 | Kind::I8 | Kind::Bool => 1,
            Kind::U16 | Kind::I16 => 2,
            Kind::U32 | Kind::I32 | Kind::F32 => 4,
            Kind::Text | Kind::U64 | Kind::I64 | Kind::F64 => 8,
            Kind::List => 12,
        }
    }
}

/// A metadata value, borrowed from its file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// A whole number of any type.
    Whole(i128),
    /// A float of either type.
    Real(f64),
    /// A flag.
    Bool(bool),
    /// Text. What is no UTF-8 is bytes.
    Text(&'a str),
    /// Text that is no UTF-8.
    Bytes(&'a [u8]),
    /// A list.
    List(List<'a>),
}

impl Value<'_> {
    /// What kind of value this is, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Value::Whole(_) => "a whole number",
            Value::Real(_) => "a number",
            Value::Bool(_) => "a flag",
            Value::Text(_) => "text",
            Value::Bytes(_) => "text that is no UTF-8",
            Value::List(_) => "a list",
        }
    }
}

/// A list of metadata values, borrowed from its file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct List<'a> {
    kind: Kind,
    len: usize,
    /// From the first value to the end of the file; they were read once, so that all are there.
    bytes: &'a [u8],
}

impl<'a> List<'a> {
    /// Number of values.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Whether the values are texts.
    pub fn is_text(self) -> bool {
        self.kind == Kind::Text
    }

    /// The values in order.
    pub fn iter(self) -> impl Iterator<Item = Value<'a>> {
        let mut cursor = Cursor { file: self.bytes, at: 0 };
        (0..self.len).map_while(move |_| cursor.value(self.kind, "", 0).ok())
    }
}

/// A place in a file.
#[derive(Clone, Copy)]
pub(super) struct Cursor<'a> {
    pub(super) file: &'a [u8],
    pub(super) at: usize,
}

type Result<T> = std::result::Result<T, GgufError>;

impl<'a> Cursor<'a> {
    fn left(self) -> u64 {
        (self.file.len() - self.at) as u64
    }

    fn take(&mut self, bytes: u64, what: &str) -> Result<&'a [u8]> {
        let end = usize::try_from(bytes).ok().and_then(|n| self.at.checked_add(n));
        let taken = end.and_then(|end| self.file.get(self.at..end));
        let taken = taken.ok_or_else(|| GgufError::Truncated {
            what: what.to_owned(),
            at: self.at as u64,
            end: self.file.len() as u64,
        })?;
        self.at += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let bytes = self.take(N as u64, what)?;
        let mut array = [0; N];
        array.copy_from_slice(bytes);
        Ok(array)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A number of things of which each takes at least `least` bytes.
    pub(super) fn count(&mut self, least: u64, what: &str) -> Result<usize> {
        let at = self.at as u64;
        let count = self.u64(what)?;
        let left = self.left();
        let fits = count.checked_mul(least).is_some_and(|bytes| bytes <= left);
        let fits = usize::try_from(count).ok().filter(|_| fits);
        fits.ok_or_else(|| GgufError::Count { what: what.to_owned(), at, count, left })
    }

    /// A length in bytes and so many bytes; where they begin.
    fn bytes(&mut self, what: &str) -> Result<(usize, &'a [u8])> {
        let len = self.u64(what)?;
        let at = self.at;
        Ok((at, self.take(len, what)?))
    }

    /// A name of at most `most` bytes; where it begins.
    pub(super) fn name(&mut self, most: usize, what: &'static str) -> Result<(usize, &'a str)> {
        let (at, bytes) = self.bytes(what)?;
        if bytes.len() > most {
            let (count, left) = (bytes.len() as u64, most as u64);
            return Err(GgufError::Count { what: what.to_owned(), at: at as u64, count, left });
        }
        let text = std::str::from_utf8(bytes);
        Ok((at, text.map_err(|_| GgufError::NotUtf8 { what, at: at as u64 })?))
    }

    /// The type of the value of `key`.
    pub(super) fn kind(&mut self, key: &str) -> Result<Kind> {
        let at = self.at as u64;
        let found = self.u32("the type of a value")?;
        Kind::of(found).ok_or_else(|| GgufError::ValueType { key: shown(key), at, found })
    }

    /// A value; leaves the cursor behind it.
    pub(super) fn value(&mut self, kind: Kind, key: &str, depth: u32) -> Result<Value<'a>> {
        const WHAT: &str = "a value";
        Ok(match kind {
            Kind::U8 => Value::Whole(u8::from_le_bytes(self.array(WHAT)?).into()),
            Kind::I8 => Value::Whole(i8::from_le_bytes(self.array(WHAT)?).into()),
            Kind::U16 => Value::Whole(u16::from_le_bytes(self.array(WHAT)?).into()),
            Kind::I16 => Value::Whole(i16::from_le_bytes(self.array(WHAT)?).into()),
            Kind::U32 => Value::Whole(u32::from_le_bytes(self.array(WHAT)?).into()),
            Kind::I32 => Value::Whole(i32::from_le_bytes(self.array(WHAT)?).into()),
            Kind::U64 => Value::Whole(u64::from_le_bytes(self.array(WHAT)?).into()),
            Kind::I64 => Value::Whole(i64::from_le_bytes(self.array(WHAT)?).into()),
            Kind::F32 => Value::Real(decimal(f32::from_le_bytes(self.array(WHAT)?))),
            Kind::F64 => Value::Real(f64::from_le_bytes(self.array(WHAT)?)),
            Kind::Bool => Value::Bool(self.array::<1>(WHAT)? != [0]),
            Kind::Text => {
                let (_, bytes) = self.bytes("a text")?;
                std::str::from_utf8(bytes).map_or(Value::Bytes(bytes), Value::Text)
            }
            Kind::List => Value::List(self.list(key, depth)?),
        })
    }

    fn list(&mut self, key: &str, depth: u32) -> Result<List<'a>> {
        if depth == MAX_NESTING {
            return Err(GgufError::Nested { key: shown(key), most: MAX_NESTING });
        }
        let kind = self.kind(key)?;
        let len = self.count(kind.size(), "a list's values")?;
        let bytes = &self.file[self.at..];
        match kind {
            Kind::Text => {
                for _ in 0..len {
                    self.bytes("a text")?;
                }
            }
            Kind::List => {
                for _ in 0..len {
                    self.list(key, depth + 1)?;
                }
            }
            _ => drop(self.take(len as u64 * kind.size(), "a list")?),
        }
        Ok(List { kind, len, bytes })
    }
}

/// The shortest number that rounds to `x`: what was written before it became an f32, where that had up to six digits, as
/// `1e-5` has.
fn decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}
