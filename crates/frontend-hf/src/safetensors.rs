//! The safetensors file format: a zero-copy header reader and a minimal writer.
//!
//! A file is a little-endian `u64` header length, a JSON header, and the tensors' bytes. Format:
//! <https://github.com/huggingface/safetensors#format>.
//!
//! This reader is ours, and not the `safetensors` crate's, because of its memory bound: however the
//! header was made, parsing it allocates at most twice its length. Names stay in the file, the
//! tables are counted before they are filled, and duplicates are found by sorting in place.
//!
//! The format does not promise alignment: where the header length is not a multiple of the element
//! size, no tensor's data is aligned in memory. Such files exist, so they are accepted, and consumers
//! must read elements with unaligned-safe loads (or ask [`Entry::offset`] first).

mod dtype;
mod error;
mod scan;
mod write;

pub use dtype::StoredType;
pub use error::HeaderError;
pub(crate) use error::shown;
use scan::{RawStr, RawTensor};
pub use write::{TensorData, TensorOut, WriteError, write_safetensors};

/// Longest header the format allows, in bytes.
pub const MAX_HEADER: u64 = 100_000_000;
/// Highest number of dimensions accepted. The format sets no limit; checkpoints use at most 5, and
/// without one a header of `[1,1,1,…]` would drive tables four times its size.
pub const MAX_RANK: usize = 8;

/// The validated tensor table of one file, sorted by name.
///
/// Names and data are positions in the file, so the table has no lifetime and every method that
/// needs them takes the bytes that [`Header::parse`] was given.
#[derive(Debug, Clone)]
pub struct Header {
    entries: Vec<Entry>,
    dims: Vec<u64>,
    /// Names that had JSON escapes, decoded, end to end.
    decoded: String,
}

/// One tensor of a [`Header`].
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    offset: u64,
    len: u64,
    name: Span,
    first_dim: u32,
    rank: u8,
    dtype: StoredType,
    /// Whether `name` points into `Header::decoded` instead of the file.
    escaped: bool,
}

/// Start and length in bytes; a header is at most 100 MB, so 32 bits hold both.
#[derive(Debug, Clone, Copy)]
struct Span {
    start: u32,
    len: u32,
}

impl Span {
    fn text(self, bytes: &[u8]) -> &[u8] {
        bytes.get(self.start as usize..(self.start + self.len) as usize).unwrap_or_default()
    }
}

impl Entry {
    /// Element type as stored.
    pub fn dtype(&self) -> StoredType {
        self.dtype
    }

    /// Position of the data in the file, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length of the data, in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True when the tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Header {
    /// Reads and checks the header of a whole file.
    ///
    /// On success every entry's data lies within `file`, its length is its shape times its element
    /// size, and the tensors cover the data section exactly once.
    pub fn parse(file: &[u8]) -> Result<Header, HeaderError> {
        let (json, data_start) = split(file)?;
        let json = std::str::from_utf8(json)
            .map_err(|e| HeaderError::NotUtf8 { at: 8 + e.valid_up_to() })?;

        let (mut tensors, mut dims, mut decoded) = (0, 0, 0);
        scan::header(json, |tensor| {
            tensors += 1;
            dims += tensor.rank;
            decoded += if tensor.name.escaped { tensor.name.text.len() } else { 0 };
            Ok(())
        })?;
        let mut header = Header {
            entries: Vec::with_capacity(tensors),
            dims: Vec::with_capacity(dims),
            decoded: String::with_capacity(decoded),
        };
        scan::header(json, |tensor| header.push(&tensor))?;

        header.check_layout(file, (file.len() - data_start) as u64)?;
        for entry in &mut header.entries {
            entry.offset += data_start as u64;
        }
        header.sort_by_name(file)?;
        Ok(header)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True when the file holds no tensor.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All tensors, in the byte order of their names.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The tensor called `name`.
    pub fn find(&self, file: &[u8], name: &str) -> Option<&Entry> {
        let found =
            self.entries.binary_search_by(|e| self.name_bytes(file, e).cmp(name.as_bytes()));
        found.ok().map(|i| &self.entries[i])
    }

    /// An entry's name.
    pub fn name<'a>(&'a self, file: &'a [u8], entry: &Entry) -> &'a str {
        // It was UTF-8 when the header was parsed; only a file changed since gives the default.
        std::str::from_utf8(self.name_bytes(file, entry)).unwrap_or_default()
    }

    /// An entry's dimensions, outermost first.
    pub fn shape(&self, entry: &Entry) -> &[u64] {
        &self.dims[entry.first_dim as usize..][..usize::from(entry.rank)]
    }

    /// An entry's data.
    pub fn data<'a>(&self, file: &'a [u8], entry: &Entry) -> &'a [u8] {
        file.get(entry.offset as usize..(entry.offset + entry.len) as usize).unwrap_or_default()
    }

    fn name_bytes<'a>(&'a self, file: &'a [u8], entry: &Entry) -> &'a [u8] {
        entry.name.text(if entry.escaped { self.decoded.as_bytes() } else { file })
    }

    /// Appends one tensor, checking everything that concerns it alone.
    fn push(&mut self, raw: &RawTensor<'_>) -> Result<(), HeaderError> {
        let dtype = StoredType::from_name(raw.dtype).ok_or_else(|| HeaderError::UnknownDtype {
            tensor: shown(raw.name.text),
            dtype: shown(raw.dtype),
        })?;
        let shape = &raw.dims[..raw.rank];
        let (begin, end) = raw.data_offsets;
        let tensor = || shown(raw.name.text);
        if end < begin {
            return Err(HeaderError::Descending { tensor: tensor(), begin, end });
        }
        let needed = dtype.byte_len(shape).ok_or_else(|| HeaderError::BadShape {
            tensor: tensor(),
            shape: shape.to_vec(),
            dtype,
        })?;
        if needed != end - begin {
            return Err(HeaderError::Size {
                tensor: tensor(),
                shape: shape.to_vec(),
                dtype,
                needed,
                span: end - begin,
            });
        }
        let first_dim = self.dims.len() as u32;
        self.dims.extend_from_slice(shape);
        let name = self.keep_name(raw.name);
        self.entries.push(Entry {
            offset: begin,
            len: needed,
            name,
            first_dim,
            rank: raw.rank as u8,
            dtype,
            escaped: raw.name.escaped,
        });
        Ok(())
    }

    fn keep_name(&mut self, name: RawStr<'_>) -> Span {
        if !name.escaped {
            return Span { start: (8 + name.start) as u32, len: name.text.len() as u32 };
        }
        let start = self.decoded.len();
        scan::unescape(name.text, &mut self.decoded);
        Span { start: start as u32, len: (self.decoded.len() - start) as u32 }
    }

    /// The tensors must cover `0..data_len` without gap or overlap. Offsets are still relative to
    /// the data section here.
    fn check_layout(&mut self, file: &[u8], data_len: u64) -> Result<(), HeaderError> {
        self.entries.sort_unstable_by_key(|e| (e.offset, e.len));
        let mut covered = 0;
        for entry in &self.entries {
            let tensor = || shown(self.name(file, entry));
            let (begin, end) = (entry.offset, entry.offset + entry.len); // end was read as a u64
            if end > data_len {
                return Err(HeaderError::OutOfRange { tensor: tensor(), begin, end, data_len });
            }
            if begin < covered {
                return Err(HeaderError::Overlap { tensor: tensor(), begin, covered });
            }
            if begin > covered {
                return Err(HeaderError::Gap { tensor: tensor(), begin, covered });
            }
            covered = end;
        }
        if covered < data_len {
            return Err(HeaderError::Trailing { covered, data_len });
        }
        Ok(())
    }

    fn sort_by_name(&mut self, file: &[u8]) -> Result<(), HeaderError> {
        let mut entries = std::mem::take(&mut self.entries);
        entries.sort_unstable_by(|a, b| self.name_bytes(file, a).cmp(self.name_bytes(file, b)));
        let same = |a, b| self.name_bytes(file, a) == self.name_bytes(file, b);
        if let Some([entry, ..]) = entries.windows(2).find(|w| same(&w[0], &w[1])) {
            return Err(HeaderError::Duplicate { tensor: shown(self.name(file, entry)) });
        }
        self.entries = entries;
        Ok(())
    }
}

/// Splits a file into its JSON header and the position where its data starts.
fn split(file: &[u8]) -> Result<(&[u8], usize), HeaderError> {
    if file.starts_with(b"version https://git-lfs") {
        return Err(HeaderError::LfsPointer);
    }
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(HeaderError::TooShort { file_len: file.len() });
    };
    let header_len = u64::from_le_bytes(*length);
    if header_len > MAX_HEADER {
        return Err(HeaderError::HeaderTooLong { header_len });
    }
    match rest.get(..header_len as usize) {
        Some(json) => Ok((json, 8 + json.len())),
        None => Err(HeaderError::HeaderTruncated { header_len, file_len: file.len() }),
    }
}

#[cfg(test)]
mod tests;
