//! A checkpoint: one safetensors file, or several with an index; or a GGUF file, or the parts of one.

mod parts;
mod table;

use std::fmt;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

use infernum_ir::encoding::StoredTensor;

use crate::gguf::{Change, Gguf, GgufError};
use crate::model::matches;
use crate::safetensors::{HeaderError, StoredType};
use crate::source::{Bytes, ModelFiles, SourceError};
pub(crate) use table::part_of;
use table::{Row, Table};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// How many names a message lists before it only counts.
const LISTED: usize = 8;

/// A checkpoint could not be opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum CheckpointError {
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error("{file}: {error}")]
    Header { file: String, error: HeaderError },
    #[error("{place}: holds no *.safetensors file{hint}")]
    NoWeights { place: String, hint: &'static str },
    #[error(
        "{place}: holds several safetensors files and neither `{SINGLE}` nor `{INDEX}`: {}; rename \
         the one to use to `{SINGLE}`",
        Listed(files)
    )]
    Ambiguous { place: String, files: Vec<String> },
    #[error("{INDEX}: {error}")]
    Index { error: serde_json::Error },
    #[error("{INDEX}: tensor `{tensor}` is listed twice")]
    IndexDuplicate { tensor: String },
    #[error("{INDEX}: {shard:?} is not the plain name of a safetensors file")]
    ShardName { shard: String },
    #[error(
        "{INDEX}: names files that are not here: {}; the download is incomplete",
        Listed(shards)
    )]
    MissingShards { shards: Vec<String> },
    #[error(
        "{INDEX}: names tensors that their files do not hold: {}; index and files are from \
         different downloads, fetch the model again",
        Listed(tensors)
    )]
    NotInShard { tensors: Vec<String> },
    #[error("tensor `{tensor}` is both in {first} and in {second}; remove one of the two files")]
    InTwoShards { tensor: String, first: String, second: String },
    #[error("{file}: {error}")]
    Gguf { file: String, error: GgufError },
    #[error("{file}: {message}")]
    Parts { file: String, message: String },
}

/// The first names of a list, and how many more there are.
struct Listed<'a>(&'a [String]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = &self.0[..self.0.len().min(LISTED)];
        write!(f, "{}", shown.join(", "))?;
        match self.0.len() - shown.len() {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

/// Where a tensor's data lies. Together with [`Checkpoint::file_bytes`] this outlives any borrow of
/// the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorLocation {
    /// Index of the file, for [`Checkpoint::file_bytes`].
    pub file: usize,
    /// Start of the data in the file, in bytes.
    pub offset: usize,
    /// Length of the data, in bytes.
    pub len: usize,
}

/// One tensor of a checkpoint, borrowed from its file.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Name in the checkpoint.
    pub name: &'a str,
    /// Element type as stored.
    pub dtype: StoredType,
    /// Dimensions, outermost first.
    pub shape: &'a [u64],
    /// The elements, row-major and little-endian; `shape` times `dtype` in length. Not necessarily
    /// aligned, see [`TensorView::is_aligned`].
    pub data: &'a [u8],
    /// Name of the file that holds it, for messages.
    pub file: &'a str,
    /// The same data as a position, free of lifetimes.
    pub location: TensorLocation,
    /// In GGUF files the number of its type, where its values are in blocks: `dtype` is then bytes, and `data` may
    /// reach beyond them, as only its encoding says how many there are.
    pub blocks: Option<u32>,
    /// Which part of the tensor `name` along its first dimension, where it is one: `shape` is the part's, all else
    /// the whole tensor's.
    pub part: Option<u64>,
    /// What is to be done to it when it is read.
    pub change: Option<&'a Change>,
    /// Whether dimensions of 1 count for nothing, as in GGUF files.
    pub is_loose: bool,
}

impl TensorView<'_> {
    /// Whether it has this shape. In GGUF files dimensions of 1 count for nothing.
    pub fn has_shape(&self, shape: &[u64]) -> bool {
        let more = |s: &[u64]| s.iter().copied().filter(|d| *d != 1).collect::<Vec<_>>();
        let (own, other) = (more(self.shape), more(shape));
        // A vector may be stored in rows.
        let vector = own.len() <= 1 || other.len() <= 1;
        let alike = vector && own.iter().product::<u64>() == other.iter().product::<u64>();
        self.shape == shape || (self.is_loose && (own == other || alike))
    }

    /// Whether it is stored as the tensor that is wanted: its elements, or in GGUF files its type.
    pub fn is_stored_as(&self, wanted: &StoredTensor) -> bool {
        if self.blocks.is_some() {
            return self.blocks == wanted.gguf;
        }
        let blocks = self.is_loose && wanted.gguf.is_some();
        !blocks && self.dtype.element() == Some(wanted.element)
    }

    /// How it is stored, for messages.
    pub fn stored_as(&self) -> String {
        self.blocks.map_or(self.dtype.to_string(), |number| format!("GGUF type {number}"))
    }

    /// Where its bytes lie, of which there are `len`: of a part, after those of the parts before it. `None` where the
    /// file has no room for them.
    pub fn place(&self, len: u64) -> Option<TensorLocation> {
        let start = self.part.unwrap_or(0).checked_mul(len)?;
        let end = start.checked_add(len)?;
        let offset = self.location.offset + usize::try_from(start).ok()?;
        let inside = end <= self.location.len as u64;
        inside.then_some(TensorLocation { offset, len: len as usize, ..self.location })
    }

    /// Whether the data may be viewed as a slice of its elements. False for files whose header
    /// length is not a multiple of the element size: read those with unaligned loads.
    pub fn is_aligned(&self) -> bool {
        let align = (self.dtype.bits() / 8).max(1) as usize;
        self.data.as_ptr().addr().is_multiple_of(align)
    }
}

/// All tensors of a model, in one or more mapped files. Opening reads headers only.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<Shard>,
    /// What is done to tensors whose names fit a pattern.
    changes: Vec<(String, Change)>,
}

#[derive(Debug)]
struct Shard {
    name: String,
    bytes: Bytes,
    table: Table,
}

impl Checkpoint {
    /// Opens the GGUF file and its parts, where the model is one; else `model.safetensors`, else every shard of `model.safetensors.index.json`, else the only
    /// `*.safetensors` file there is.
    ///
    /// The index must be true of the files: every tensor it lists is in the shard it names. Tensors
    /// that a shard holds beyond those are kept; whether a model expects them is the binder's
    /// question.
    pub fn open(files: &ModelFiles) -> Result<Checkpoint, CheckpointError> {
        if let Some(name) = files.gguf() {
            return Ok(Checkpoint::of(parts::open(files, name)?));
        }
        let name = match Stored::among(files.name(), &files.list()?)? {
            Stored::One(name) => name,
            Stored::Shards { index } => return open_shards(files, &index),
        };
        let missing = || CheckpointError::MissingShards { shards: vec![name.clone()] };
        let bytes = files.read(&name)?.ok_or_else(missing)?;
        Ok(Checkpoint::of(vec![Shard::open(&name, bytes)?]))
    }

    /// Opens one file, whatever its name.
    pub fn open_file(path: &Path) -> Result<Checkpoint, CheckpointError> {
        let name = path.display().to_string();
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let missing = || SourceError::Missing { path: path.to_owned() };
        let file = path.file_name().and_then(|n| n.to_str()).ok_or_else(missing)?;
        let bytes = ModelFiles::folder(folder)?.read(file)?.ok_or_else(missing)?;
        Ok(Checkpoint::of(vec![Shard::open(&name, bytes)?]))
    }

    fn of(files: Vec<Shard>) -> Checkpoint {
        Checkpoint { files, changes: Vec::new() }
    }

    /// The same, its tensors changed when they are read where their names fit a pattern.
    #[must_use]
    pub fn with_changes(self, changes: Vec<(String, Change)>) -> Checkpoint {
        Checkpoint { changes, ..self }
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.files.iter().enumerate().find_map(|(i, shard)| {
            shard.table.find(&shard.bytes, name).map(|row| self.view(i, row))
        })
    }

    /// All tensors: file by file, by name within a file.
    pub fn tensors(&self) -> impl Iterator<Item = TensorView<'_>> {
        self.files.iter().enumerate().flat_map(move |(i, shard)| {
            shard.table.rows(&shard.bytes).map(move |row| self.view(i, row))
        })
    }

    /// All names, in the order of [`Checkpoint::tensors`].
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors().map(|t| t.name)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.files.iter().map(|shard| shard.table.len()).sum()
    }

    /// True when there is no tensor at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of all tensors' data together.
    pub fn data_len(&self) -> u64 {
        self.tensors().map(|t| t.data.len() as u64).sum()
    }

    fn view<'a>(&'a self, file: usize, row: Row<'a>) -> TensorView<'a> {
        let shard = &self.files[file];
        let (offset, len) = (row.offset as usize, row.len as usize);
        let change = self.changes.iter().find(|(pattern, _)| matches(pattern, row.name));
        TensorView {
            name: row.name,
            dtype: row.dtype,
            shape: row.shape,
            data: shard.bytes.get(offset..offset + len).unwrap_or_default(),
            file: &shard.name,
            location: TensorLocation { file, offset, len },
            blocks: row.blocks,
            part: row.part,
            change: change.map(|(_, change)| change),
            is_loose: shard.gguf().is_some(),
        }
    }

    /// The tables of the first file and its bytes, where it is a GGUF file: its metadata is the model's.
    pub fn gguf(&self) -> Option<(&Gguf, &[u8])> {
        let first = self.files.first()?;
        Some((first.gguf()?, &first.bytes))
    }

    /// Number of files.
    pub fn file_count(&self) -> usize {
        self.files.len()
    }

    /// A handle on a whole file that keeps its mapping alive, for [`TensorLocation`]s into it.
    pub fn file_bytes(&self, file: usize) -> Option<Bytes> {
        self.files.get(file).map(|shard| shard.bytes.clone())
    }

    /// A file's name.
    pub fn file_name(&self, file: usize) -> Option<&str> {
        self.files.get(file).map(|shard| shard.name.as_str())
    }
}

impl Shard {
    fn open(name: &str, bytes: Bytes) -> Result<Shard, CheckpointError> {
        let table = Table::parse(name, &bytes)?;
        Ok(Shard { name: name.into(), bytes, table })
    }

    fn gguf(&self) -> Option<&Gguf> {
        if let Table::Gguf(gguf) = &self.table { Some(gguf) } else { None }
    }
}

/// Which of a model's files its safetensors weights are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    /// This one.
    One(String),
    /// Those that this index names: [`shards`] reads it.
    Shards {
        /// Its name.
        index: String,
    },
}

impl Stored {
    /// Chooses among the names of a model's files; `place` is what messages call it.
    pub fn among(place: &str, names: &[String]) -> Result<Stored, CheckpointError> {
        let has = |name: &str| names.iter().any(|n| n == name);
        if has(SINGLE) {
            return Ok(Stored::One(SINGLE.to_owned()));
        }
        if has(INDEX) {
            return Ok(Stored::Shards { index: INDEX.to_owned() });
        }
        let is = |name: &String, ending: &str| name.to_ascii_lowercase().ends_with(ending);
        let mut found: Vec<String> =
            names.iter().filter(|n| is(n, ".safetensors") && !n.contains('/')).cloned().collect();
        match (found.pop(), found.is_empty()) {
            (Some(name), true) => Ok(Stored::One(name)),
            (Some(name), false) => {
                found.push(name);
                Err(CheckpointError::Ambiguous { place: place.into(), files: found })
            }
            (None, _) => {
                let other = names.iter().any(|n| is(n, ".bin") || is(n, ".pth") || is(n, ".pt"));
                let hint = if other {
                    "; it has PyTorch files, which can run code when read: convert them to safetensors first"
                } else {
                    ""
                };
                Err(CheckpointError::NoWeights { place: place.into(), hint })
            }
        }
    }
}

/// The names of the files that an index names, sorted.
pub fn shards(index: &[u8]) -> Result<Vec<String>, CheckpointError> {
    let mut names: Vec<String> = read_index(index)?.into_iter().map(|(_, shard)| shard).collect();
    names.sort_unstable();
    names.dedup();
    Ok(names)
}

fn open_shards(files: &ModelFiles, index: &str) -> Result<Checkpoint, CheckpointError> {
    let missing = || CheckpointError::MissingShards { shards: vec![index.to_owned()] };
    let index = files.read(index)?.ok_or_else(missing)?;
    let map = read_index(&index)?;
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for name in shards(&index)? {
        match files.read(&name)? {
            Some(bytes) => found.push(Shard::open(&name, bytes)?),
            None => missing.push(name),
        }
    }
    if !missing.is_empty() {
        return Err(CheckpointError::MissingShards { shards: missing });
    }
    check_index(&map, &found)?;
    check_unique(&found)?;
    Ok(Checkpoint::of(found))
}

/// The index's `(tensor, shard)` pairs, sorted by tensor.
fn read_index(index: &[u8]) -> Result<Vec<(String, String)>, CheckpointError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: Pairs,
    }
    let Index { weight_map: Pairs(mut map) } =
        serde_json::from_slice(index).map_err(|error| CheckpointError::Index { error })?;
    map.sort_unstable();
    if let Some(pair) = map.windows(2).find(|w| w[0].0 == w[1].0) {
        return Err(CheckpointError::IndexDuplicate { tensor: pair[0].0.clone() });
    }
    let is_weights = |name: &str| name.ends_with(".safetensors") && !name.contains(['/', '\\']);
    match map.iter().find(|(_, shard)| !is_weights(shard)) {
        Some((_, shard)) => Err(CheckpointError::ShardName { shard: shard.clone() }),
        None => Ok(map),
    }
}

/// A JSON object of strings as pairs, so that a key given twice is seen.
struct Pairs(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairsVisitor;
        impl<'de> Visitor<'de> for PairsVisitor {
            type Value = Pairs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensor names and file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(PairsVisitor)
    }
}

fn check_index(map: &[(String, String)], shards: &[Shard]) -> Result<(), CheckpointError> {
    let holds = |(tensor, name): &&(String, String)| {
        let shard = shards.iter().find(|shard| shard.name == *name);
        shard.is_some_and(|shard| shard.table.find(&shard.bytes, tensor).is_some())
    };
    let absent = map.iter().filter(|pair| !holds(pair));
    let tensors: Vec<String> = absent.map(|(t, shard)| format!("`{t}` ({shard})")).collect();
    if tensors.is_empty() { Ok(()) } else { Err(CheckpointError::NotInShard { tensors }) }
}

fn check_unique(shards: &[Shard]) -> Result<(), CheckpointError> {
    let mut all: Vec<(&str, &str)> = shards
        .iter()
        .flat_map(|s| s.table.rows(&s.bytes).map(|row| (row.name, &*s.name)))
        .collect();
    all.sort_unstable();
    match all.windows(2).find(|w| w[0].0 == w[1].0) {
        Some(pair) => Err(CheckpointError::InTwoShards {
            tensor: pair[0].0.into(),
            first: pair[0].1.into(),
            second: pair[1].1.into(),
        }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::safetensors::{TensorData, TensorOut, write_safetensors};

    fn save(path: &Path, names: &[&str]) {
        let tensors: Vec<_> = names
            .iter()
            .map(|name| TensorOut { name, shape: &[2], data: TensorData::F32(&[1.0, 2.0]) })
            .collect();
        write_safetensors(path, &tensors).unwrap();
    }

    fn open(dir: &tempfile::TempDir) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::open(&ModelFiles::folder(dir.path()).unwrap())
    }

    fn sharded(index: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        save(&dir.path().join("s1.safetensors"), &["a", "c"]);
        save(&dir.path().join("s2.safetensors"), &["b"]);
        fs::write(dir.path().join(INDEX), index).unwrap();
        dir
    }

    #[test]
    fn one_file_opens_under_its_usual_name_or_as_the_only_one() {
        for name in [SINGLE, "odd.safetensors"] {
            let dir = tempfile::tempdir().unwrap();
            save(&dir.path().join(name), &["x"]);
            let checkpoint = open(&dir).unwrap();
            let tensor = checkpoint.tensor("x").unwrap();
            assert_eq!(
                (tensor.shape, tensor.dtype, tensor.file),
                (&[2][..], StoredType::F32, name)
            );
            assert!(tensor.is_aligned());
            assert!(checkpoint.tensor("y").is_none());
        }
    }

    #[test]
    fn shards_open_together_and_locations_outlive_the_checkpoint() {
        let dir = sharded(
            r#"{"metadata": {"total_size": 24}, "weight_map":
                {"a": "s1.safetensors", "b": "s2.safetensors", "c": "s1.safetensors"}}"#,
        );
        let checkpoint = open(&dir).unwrap();
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "c", "b"]);
        assert_eq!((checkpoint.len(), checkpoint.file_count(), checkpoint.data_len()), (3, 2, 24));
        let location = checkpoint.tensor("b").unwrap().location;
        let bytes = checkpoint.file_bytes(location.file).unwrap();
        drop(checkpoint);
        let data = &bytes[location.offset..][..location.len];
        assert_eq!(data, [1.0_f32.to_le_bytes(), 2.0_f32.to_le_bytes()].concat());
    }

    #[test]
    fn a_lying_index_is_refused() {
        let cases = [
            (r#"{"weight_map": {"a": "s2.safetensors"}}"#, "do not hold: `a` (s2.safetensors)"),
            (r#"{"weight_map": {"a": "s3.safetensors"}}"#, "not here: s3.safetensors"),
            (r#"{"weight_map": {"a": "../s1.safetensors"}}"#, "plain name"),
            (r#"{"weight_map": {"a": "s1.safetensors", "a": "s1.safetensors"}}"#, "listed twice"),
            (r#"{"weight_map": []}"#, "an object of tensor names"),
            ("{}", "missing field `weight_map`"),
        ];
        for (index, expected) in cases {
            let message = open(&sharded(index)).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn a_tensor_in_two_shards_is_refused() {
        let dir = sharded(r#"{"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors"}}"#);
        save(&dir.path().join("s2.safetensors"), &["a", "b"]);
        let message = open(&dir).unwrap_err().to_string();
        assert!(
            message.contains("`a` is both in s1.safetensors and in s2.safetensors"),
            "{message}"
        );
    }

    #[test]
    fn a_folder_without_one_clear_choice_says_so() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("pytorch_model.bin"), "").unwrap();
        let message = open(&dir).unwrap_err().to_string();
        assert!(message.contains("convert them to safetensors"), "{message}");
        save(&dir.path().join("a.safetensors"), &["x"]);
        save(&dir.path().join("b.safetensors"), &["x"]);
        let message = open(&dir).unwrap_err().to_string();
        assert!(message.contains("a.safetensors, b.safetensors"), "{message}");
    }

    #[test]
    fn header_errors_name_the_file() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(SINGLE), "short").unwrap();
        let message = open(&dir).unwrap_err().to_string();
        assert!(message.starts_with("model.safetensors: is 5 bytes long"), "{message}");
    }
}
