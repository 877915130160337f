//! What can be wrong with a GGUF file.

/// A GGUF file could not be read. Offsets count bytes from the start of the file.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum GgufError {
    #[error("expected a GGUF file, which begins with `GGUF`, found {found}")]
    Magic { found: String },
    #[error("is a big-endian GGUF file: expected a little-endian one; convert the model again")]
    BigEndian,
    #[error("is GGUF of version {found}: expected version 2 or 3; convert the model again")]
    Version { found: u32 },
    #[error(
        "ends at byte {end}, within {what} that begins at byte {at}; the download is incomplete, fetch it \
         again"
    )]
    Truncated { what: String, at: u64, end: u64 },
    #[error(
        "{what} at byte {at}: says that there are {count}, which the {left} bytes that follow cannot hold; \
         the file is corrupt"
    )]
    Count { what: String, at: u64, count: u64, left: u64 },
    #[error("{what} at byte {at}: expected UTF-8; the file is corrupt")]
    NotUtf8 { what: &'static str, at: u64 },
    #[error("key `{key}` at byte {at}: unknown type {found} of a value; expected 0 to 12")]
    ValueType { key: String, at: u64, found: u32 },
    #[error("key `{key}`: lists within lists, deeper than {most}; the file is corrupt")]
    Nested { key: String, most: u32 },
    #[error("key `{key}` is there twice; the file is corrupt")]
    DuplicateKey { key: String },
    #[error("key `{key}`: expected {expected}, found {found}")]
    Value { key: String, expected: &'static str, found: String },
    #[error("key `{key}` is missing")]
    MissingKey { key: String },
    #[error("tensor `{tensor}`: has {found} dimensions; expected at most {most}")]
    Rank { tensor: String, found: u32, most: usize },
    #[error("tensor `{tensor}`: shape {shape:?} is larger than a tensor can be")]
    Shape { tensor: String, shape: Vec<u64> },
    #[error("tensor `{tensor}` is there twice; the file is corrupt")]
    DuplicateTensor { tensor: String },
    #[error(
        "tensor `{tensor}`: its data begins {offset} bytes into those of all tensors, which is no multiple \
         of the file's alignment, {alignment}"
    )]
    Unaligned { tensor: String, offset: u64, alignment: u64 },
    #[error(
        "tensor `{tensor}`: needs {needed} bytes from byte {at} on, and the file ends at byte {end}; the \
         download is incomplete, fetch it again"
    )]
    OutOfRange { tensor: String, at: u64, needed: u64, end: u64 },
    #[error(
        "tensor `{tensor}`: needs {needed} bytes from byte {at} on, and `{next}` begins {room} bytes later; \
         the file is corrupt"
    )]
    Overlap { tensor: String, at: u64, needed: u64, next: String, room: u64 },
}
