//! Messages as bytes: the length in four bytes, the lowest first, then MessagePack.

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::LinkError;

/// Bytes of a frame's length.
const HEAD: usize = 4;

/// Writes a message behind what is in `out`.
pub fn push(out: &mut Vec<u8>, message: &impl Serialize) -> Result<(), LinkError> {
    let start = out.len();
    out.extend_from_slice(&[0; HEAD]);
    let written = rmp_serde::encode::write(out, message);
    let length = out.len() - start - HEAD;
    match (written, u32::try_from(length)) {
        (Ok(()), Ok(length)) => {
            out[start..start + HEAD].copy_from_slice(&length.to_le_bytes());
            Ok(())
        }
        (Err(error), _) => {
            out.truncate(start);
            Err(LinkError::Message(error.to_string()))
        }
        (Ok(()), Err(_)) => {
            out.truncate(start);
            Err(LinkError::Frame { found: length, most: u32::MAX as usize })
        }
    }
}

/// Reads the bytes of a message of at most `most` bytes into `buffer`, which holds nothing else then. Memory grows with what
/// came, not with what the length says.
pub async fn read(
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut Vec<u8>,
    most: usize,
) -> Result<(), LinkError> {
    let mut head = [0; HEAD];
    if let Err(error) = stream.read_exact(&mut head).await {
        return Err(match error.kind() {
            std::io::ErrorKind::UnexpectedEof => LinkError::Ended,
            _ => error.into(),
        });
    }
    let length = u32::from_le_bytes(head) as usize;
    if length > most {
        return Err(LinkError::Frame { found: length, most });
    }
    buffer.clear();
    let found = stream.take(length as u64).read_to_end(buffer).await?;
    if found < length { Err(LinkError::Ended) } else { Ok(()) }
}

/// The message that bytes are. All of them belong to it.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, LinkError> {
    let mut left = bytes;
    let message = rmp_serde::decode::from_read(&mut left);
    let message = message.map_err(|e| LinkError::Message(e.to_string()))?;
    if left.is_empty() {
        return Ok(message);
    }
    Err(LinkError::Message(format!("expected its end, found {} more bytes", left.len())))
}
