//! What can be wrong with a header.

use super::{MAX_HEADER, MAX_RANK, StoredType};

/// Why a file's header was refused. Positions are byte offsets in the file; the caller adds the
/// file's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum HeaderError {
    #[error("is {file_len} bytes long, too short for a safetensors file; download it again")]
    TooShort { file_len: usize },
    #[error("is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder")]
    LfsPointer,
    #[error(
        "declares a header of {header_len} bytes, the limit is {MAX_HEADER}; it is not a safetensors \
         file, or corrupt"
    )]
    HeaderTooLong { header_len: u64 },
    #[error(
        "declares a header of {header_len} bytes but is only {file_len} bytes long; the download is \
         incomplete, fetch it again"
    )]
    HeaderTruncated { header_len: u64, file_len: usize },
    #[error("byte {at}: the header is not valid UTF-8; the file is corrupt, download it again")]
    NotUtf8 { at: usize },
    #[error("byte {at}: header: expected {expected}, found {found}")]
    Json { at: usize, expected: &'static str, found: String },
    #[error(
        "tensor `{tensor}`: unknown field `{field}`; a tensor has `dtype`, `shape` and `data_offsets`"
    )]
    UnknownField { tensor: String, field: String },
    #[error("tensor `{tensor}`: `{field}` is given twice")]
    DuplicateField { tensor: String, field: &'static str },
    #[error("tensor `{tensor}`: `{field}` is missing")]
    MissingField { tensor: String, field: &'static str },
    #[error("tensor `{tensor}`: unknown dtype `{dtype}`")]
    UnknownDtype { tensor: String, dtype: String },
    #[error("tensor `{tensor}`: has more than {MAX_RANK} dimensions")]
    TooManyDims { tensor: String },
    #[error(
        "tensor `{tensor}`: shape {shape:?} of {dtype} has no byte length (too large, or not whole bytes)"
    )]
    BadShape { tensor: String, shape: Vec<u64>, dtype: StoredType },
    #[error(
        "tensor `{tensor}`: shape {shape:?} of {dtype} needs {needed} bytes, data_offsets span {span}; \
         the file is corrupt, download it again"
    )]
    Size { tensor: String, shape: Vec<u64>, dtype: StoredType, needed: u64, span: u64 },
    #[error("tensor `{tensor}`: data_offsets [{begin}, {end}] descend; the file is corrupt")]
    Descending { tensor: String, begin: u64, end: u64 },
    #[error(
        "tensor `{tensor}`: data_offsets [{begin}, {end}] end beyond the {data_len} bytes of data \
         present; the download is incomplete, fetch it again"
    )]
    OutOfRange { tensor: String, begin: u64, end: u64, data_len: u64 },
    #[error(
        "tensor `{tensor}`: data begins at {begin}, inside the previous tensor, which ends at {covered}; \
         the file is corrupt"
    )]
    Overlap { tensor: String, begin: u64, covered: u64 },
    #[error(
        "tensor `{tensor}`: data begins at {begin}, but the previous tensor ends at {covered}; the \
         bytes between belong to no tensor, the file is corrupt"
    )]
    Gap { tensor: String, begin: u64, covered: u64 },
    #[error(
        "holds {data_len} bytes of data, its tensors cover only {covered}; the file is corrupt, \
         download it again"
    )]
    Trailing { covered: u64, data_len: u64 },
    #[error("tensor `{tensor}`: is listed twice; the file is corrupt")]
    Duplicate { tensor: String },
}

/// Text from a file, made fit for a message: control characters escaped, long text cut.
pub(crate) fn shown(text: &str) -> String {
    const LIMIT: usize = 120;
    let mut out: String = text.chars().take(LIMIT).flat_map(char::escape_debug).collect();
    if text.chars().nth(LIMIT).is_some() {
        out.push('…');
    }
    out
}
