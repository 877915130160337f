//! What a file of a checkpoint says of its tensors, whichever format it has.

use super::CheckpointError;
use crate::gguf::{Gguf, Stored, Tensor, is_gguf};
use crate::safetensors::{Entry, Header, StoredType};

/// The tensors of one file.
#[derive(Debug)]
pub(super) enum Table {
    Safetensors(Header),
    Gguf(Gguf),
}

/// One tensor of a file.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    pub(super) name: &'a str,
    pub(super) dtype: StoredType,
    /// In GGUF files the number of its type, where its values are in blocks.
    pub(super) blocks: Option<u32>,
    pub(super) shape: &'a [u64],
    /// Which of the parts along its first dimension, where it is one: `offset` and `len` are the whole tensor's.
    pub(super) part: Option<u64>,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Table {
    /// Reads the tables of a file, in the format that it begins as.
    pub(super) fn parse(name: &str, bytes: &[u8]) -> Result<Table, CheckpointError> {
        let file = || name.to_owned();
        if is_gguf(bytes) {
            let gguf = Gguf::parse(bytes);
            return gguf
                .map(Table::Gguf)
                .map_err(|error| CheckpointError::Gguf { file: file(), error });
        }
        let header = Header::parse(bytes);
        header
            .map(Table::Safetensors)
            .map_err(|error| CheckpointError::Header { file: file(), error })
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Table::Safetensors(header) => header.len(),
            Table::Gguf(gguf) => gguf.tensors().len(),
        }
    }

    /// All tensors, by name.
    pub(super) fn rows<'a>(&'a self, file: &'a [u8]) -> impl Iterator<Item = Row<'a>> {
        (0..self.len()).map(move |i| match self {
            Table::Safetensors(header) => plain(header, file, &header.entries()[i]),
            Table::Gguf(gguf) => gguf_row(gguf, file, &gguf.tensors()[i]),
        })
    }

    /// The tensor of that name. Of a GGUF file `NAME[i]` is the part `i` of the tensor `NAME` along its first
    /// dimension: of experts that are stored as one, an expert.
    pub(super) fn find<'a>(&'a self, file: &'a [u8], name: &str) -> Option<Row<'a>> {
        match self {
            Table::Safetensors(header) => {
                header.find(file, name).map(|entry| plain(header, file, entry))
            }
            Table::Gguf(gguf) => {
                if let Some(tensor) = gguf.find(file, name) {
                    return Some(gguf_row(gguf, file, tensor));
                }
                let (whole, part) = part_of(name)?;
                let row = gguf_row(gguf, file, gguf.find(file, whole)?);
                let (parts, shape) = row.shape.split_first()?;
                (part < *parts).then_some(Row { part: Some(part), shape, ..row })
            }
        }
    }
}

/// The tensor that `NAME[i]` is a part of, and which.
pub(crate) fn part_of(name: &str) -> Option<(&str, u64)> {
    let (whole, part) = name.strip_suffix(']')?.rsplit_once('[')?;
    Some((whole, part.parse().ok()?))
}

fn plain<'a>(header: &'a Header, file: &'a [u8], entry: &'a Entry) -> Row<'a> {
    Row {
        name: header.name(file, entry),
        dtype: entry.dtype(),
        blocks: None,
        shape: header.shape(entry),
        part: None,
        offset: entry.offset(),
        len: entry.len(),
    }
}

fn gguf_row<'a>(gguf: &'a Gguf, file: &'a [u8], tensor: &'a Tensor) -> Row<'a> {
    let (dtype, blocks) = match tensor.stored() {
        Stored::Plain(dtype) => (dtype, None),
        Stored::Blocks(number) => (StoredType::U8, Some(number)),
    };
    Row {
        name: gguf.name(file, tensor),
        dtype,
        blocks,
        shape: tensor.shape(),
        part: None,
        offset: tensor.offset(),
        len: tensor.room(),
    }
}
