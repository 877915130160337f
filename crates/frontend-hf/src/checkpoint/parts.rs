//! The files that a GGUF file has been split into: `NAME-00001-of-00003.gguf` and so on.

use super::{CheckpointError, Shard, check_unique};
use crate::gguf::{Gguf, GgufError};
use crate::source::ModelFiles;

/// Digits of the numbers in names.
const DIGITS: usize = 5;

/// The file called `name` and, where it is a part of several, all of them in order.
pub(super) fn open(files: &ModelFiles, name: &str) -> Result<Vec<Shard>, CheckpointError> {
    let missing = |name: &str| CheckpointError::Parts {
        file: files.name().to_owned(),
        message: format!(
            "the part `{name}` of this model is not here; the download is incomplete, fetch all parts"
        ),
    };
    let open = |name: &str| {
        let bytes = files.read(name)?.ok_or_else(|| missing(name))?;
        Shard::open(name, bytes)
    };
    let given = open(name)?;
    let (_, count) = numbers(&given)?;
    if count <= 1 {
        return Ok(vec![given]);
    }
    let fault =
        |file: &str, message: String| CheckpointError::Parts { file: file.to_owned(), message };
    let stem = name.strip_suffix(&format!("-of-{count:0DIGITS$}.gguf"));
    let stem = stem.and_then(|s| s.get(..s.len().checked_sub(DIGITS)?));
    let stem = stem.ok_or_else(|| {
        fault(name, format!("is one of {count} parts: expected a name such as NAME-00001-of-{count:0DIGITS$}.gguf"))
    })?;
    let (mut shards, mut tensors) = (Vec::new(), 0);
    for part in 0..count {
        let name = format!("{stem}{:0DIGITS$}-of-{count:0DIGITS$}.gguf", part + 1);
        let shard = open(&name)?;
        let found = numbers(&shard)?;
        if found != (part, count) {
            let message = format!(
                "expected part {} of {count} by its name, found part {} of {} by `split.no` and `split.count`",
                part + 1,
                found.0 + 1,
                found.1
            );
            return Err(fault(&name, message));
        }
        tensors += shard.table.len() as u64;
        shards.push(shard);
    }
    let said = value(&shards[0], "split.tensors.count")?;
    if let Some(said) = said.filter(|said| *said != tensors) {
        let message =
            format!("`split.tensors.count`: expected {tensors}, as all parts hold, found {said}");
        return Err(fault(&shards[0].name, message));
    }
    check_unique(&shards)?;
    Ok(shards)
}

/// Which part a file is, from 0, and of how many.
fn numbers(shard: &Shard) -> Result<(u64, u64), CheckpointError> {
    let count = value(shard, "split.count")?.unwrap_or(1);
    let part = value(shard, "split.no")?.unwrap_or(0);
    if part < count.max(1) && count < 100_000 {
        return Ok((part, count));
    }
    let message = format!(
        "`split.no`, `split.count`: expected a part of at most 99999, found {part} of {count}"
    );
    Err(CheckpointError::Parts { file: shard.name.clone(), message })
}

fn value(shard: &Shard, key: &str) -> Result<Option<u64>, CheckpointError> {
    let read = |gguf: &Gguf| gguf.whole(&shard.bytes, key);
    let found = shard.gguf().map_or(Ok(None), read);
    found.map_err(|error: GgufError| CheckpointError::Gguf { file: shard.name.clone(), error })
}
