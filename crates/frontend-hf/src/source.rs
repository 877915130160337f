//! Where a model's files come from: a folder on disk, or a list embedded in the binary.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use crate::gguf::is_gguf;

/// A model's files could not be found or read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum SourceError {
    #[error(
        "{}: no such folder; give the folder that holds config.json and *.safetensors, a .gguf file, or a model of \
         the Hugging Face hub as ORG/NAME",
        path.display()
    )]
    Missing { path: PathBuf },
    #[error(
        "{}: is a file, not a folder, and no GGUF file, which begins with `GGUF`; give the folder that holds \
         it, or a .gguf file",
        path.display()
    )]
    NotAFolder { path: PathBuf },
    #[error("{file:?} is not a plain file name; a model's files lie directly in its folder")]
    BadName { file: String },
    #[error("{}: is not a regular file", path.display())]
    NotAFile { path: PathBuf },
    #[error(
        "{}: is a link to a file that does not exist; the download is incomplete, fetch the model again",
        path.display()
    )]
    DanglingLink { path: PathBuf },
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
}

/// A file's contents: a read-only mapping or a static slice. Cloning is cheap and copies no data.
#[derive(Clone)]
pub struct Bytes(Repr);

#[derive(Clone)]
enum Repr {
    Static(&'static [u8]),
    Mapped(Arc<Mmap>),
}

impl Bytes {
    /// Wraps data that lives as long as the program.
    pub const fn from_static(data: &'static [u8]) -> Self {
        Bytes(Repr::Static(data))
    }
}

impl AsRef<[u8]> for Bytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Repr::Static(data) => data,
            Repr::Mapped(map) => map,
        }
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({} bytes)", self.len())
    }
}

/// Files embedded in the binary: `(file name, contents)`.
pub type Embedded = &'static [(&'static str, &'static [u8])];

/// The files of one model.
#[derive(Clone, Debug)]
pub struct ModelFiles {
    name: String,
    place: Place,
    /// The one that holds all of the model, where it is a GGUF file: its name in its folder.
    gguf: Option<String>,
}

#[derive(Clone, Debug)]
enum Place {
    Folder(PathBuf),
    Embedded(Embedded),
}

impl ModelFiles {
    /// The files in the folder at `path`, which must exist.
    pub fn folder(path: impl Into<PathBuf>) -> Result<Self, SourceError> {
        let path = path.into();
        match fs::metadata(&path) {
            Ok(meta) if meta.is_dir() => {
                let name = path.display().to_string();
                Ok(ModelFiles { name, place: Place::Folder(path), gguf: None })
            }
            Ok(_) => Err(SourceError::NotAFolder { path }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(SourceError::Missing { path })
            }
            Err(error) => Err(SourceError::Io { path, error }),
        }
    }

    /// Files embedded in the binary, under a name for error messages.
    pub fn embedded(name: impl Into<String>, files: Embedded) -> Self {
        ModelFiles { name: name.into(), place: Place::Embedded(files), gguf: None }
    }

    /// What is at `path`: a folder, or a GGUF file, which holds all of a model or with others of its folder its parts.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, SourceError> {
        let path = path.into();
        if !path.is_file() {
            return ModelFiles::folder(path);
        }
        let missing = || SourceError::Missing { path: path.clone() };
        let file = path.file_name().and_then(|n| n.to_str()).ok_or_else(missing)?.to_owned();
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
        let folder = ModelFiles::folder(parent.unwrap_or(Path::new(".")))?;
        if !folder.read(&file)?.is_some_and(|bytes| is_gguf(&bytes)) {
            return Err(SourceError::NotAFolder { path });
        }
        Ok(ModelFiles { name: path.display().to_string(), gguf: Some(file), ..folder })
    }

    /// The same under another name for messages.
    #[must_use]
    pub fn named(self, name: String) -> ModelFiles {
        ModelFiles { name, ..self }
    }

    /// The name of the GGUF file that holds the model, where one does.
    pub fn gguf(&self) -> Option<&str> {
        self.gguf.as_deref()
    }

    /// The folder's path or the embedded model's name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The folder on disk, if there is one.
    pub fn path(&self) -> Option<&Path> {
        match &self.place {
            Place::Folder(path) => Some(path),
            Place::Embedded(_) => None,
        }
    }

    /// The contents of the file `file`, or `None` when there is no such file.
    ///
    /// `file` may come from the model itself (shard names do), so anything but a plain file name
    /// is refused. Links are followed: the Hugging Face cache is made of them.
    pub fn read(&self, file: &str) -> Result<Option<Bytes>, SourceError> {
        check_name(file)?;
        match &self.place {
            Place::Folder(folder) => read_file(folder.join(file)),
            Place::Embedded(files) => {
                let found = files.iter().find(|(name, _)| *name == file);
                Ok(found.map(|(_, data)| Bytes::from_static(data)))
            }
        }
    }

    /// The same of a file in a folder of the model's own: modules beside the weights have such.
    pub fn read_in(&self, folder: &str, file: &str) -> Result<Option<Bytes>, SourceError> {
        check_name(folder)?;
        check_name(file)?;
        match &self.place {
            Place::Folder(top) => read_file(top.join(folder).join(file)),
            Place::Embedded(_) => Ok(None),
        }
    }

    /// The names of all files, sorted. Names that are not UTF-8 are left out.
    pub fn list(&self) -> Result<Vec<String>, SourceError> {
        let mut names = match &self.place {
            Place::Embedded(files) => files.iter().map(|(name, _)| (*name).to_owned()).collect(),
            Place::Folder(folder) => list_folder(folder)
                .map_err(|error| SourceError::Io { path: folder.clone(), error })?,
        };
        names.sort_unstable();
        Ok(names)
    }
}

fn check_name(file: &str) -> Result<(), SourceError> {
    if is_plain_name(file) {
        return Ok(());
    }
    Err(SourceError::BadName { file: file.chars().take(200).collect() })
}

fn is_plain_name(file: &str) -> bool {
    !file.is_empty() && file != "." && file != ".." && !file.contains(['/', '\\', ':', '\0'])
}

fn read_file(path: PathBuf) -> Result<Option<Bytes>, SourceError> {
    // A pipe would block the open, a device would map to nonsense: look before opening.
    match fs::metadata(&path) {
        Ok(meta) if meta.is_file() => {}
        Ok(_) => return Err(SourceError::NotAFile { path }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return if path.is_symlink() {
                Err(SourceError::DanglingLink { path })
            } else {
                Ok(None)
            };
        }
        Err(error) => return Err(SourceError::Io { path, error }),
    }
    match File::open(&path).and_then(|file| crate::mmap::map(&file)) {
        Ok(map) => Ok(Some(Bytes(Repr::Mapped(Arc::new(map))))),
        Err(error) => Err(SourceError::Io { path, error }),
    }
}

fn list_folder(folder: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if !entry.file_type()?.is_dir()
            && let Ok(name) = entry.file_name().into_string()
        {
            names.push(name);
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_reads_lists_and_shares_one_mapping() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("b.txt"), "bee").unwrap();
        fs::write(dir.path().join("a.txt"), "").unwrap();
        fs::create_dir(dir.path().join("sub")).unwrap();
        let files = ModelFiles::folder(dir.path()).unwrap();
        assert_eq!(files.list().unwrap(), ["a.txt", "b.txt"]);
        let bytes = files.read("b.txt").unwrap().unwrap();
        let copy = bytes.clone();
        assert_eq!(&*bytes, b"bee");
        assert_eq!(bytes.as_ptr(), copy.as_ptr());
        assert_eq!(&*files.read("a.txt").unwrap().unwrap(), b"");
        assert!(files.read("c.txt").unwrap().is_none());
        assert!(matches!(files.read("sub"), Err(SourceError::NotAFile { .. })));
    }

    #[test]
    fn names_cannot_leave_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let files = ModelFiles::folder(dir.path()).unwrap();
        for name in ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "C:x", "a\0"] {
            assert!(matches!(files.read(name), Err(SourceError::BadName { .. })), "{name:?}");
        }
    }

    #[test]
    fn wrong_paths_say_what_to_give() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("model.safetensors");
        fs::write(&file, "").unwrap();
        let message = ModelFiles::folder(&file).unwrap_err().to_string();
        assert!(message.contains("is a file, not a folder"), "{message}");
        let message = ModelFiles::folder(dir.path().join("nope")).unwrap_err().to_string();
        assert!(message.contains("no such folder"), "{message}");
    }

    #[cfg(unix)]
    #[test]
    fn a_dangling_link_is_not_an_absent_file() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("gone", dir.path().join("config.json")).unwrap();
        let files = ModelFiles::folder(dir.path()).unwrap();
        assert!(matches!(files.read("config.json"), Err(SourceError::DanglingLink { .. })));
    }

    #[test]
    fn embedded_files_read_the_same_way() {
        let files = ModelFiles::embedded("demo", &[("config.json", b"{}"), ("a", b"")]);
        assert_eq!((files.name(), files.path()), ("demo", None));
        assert_eq!(files.list().unwrap(), ["a", "config.json"]);
        assert_eq!(&*files.read("config.json").unwrap().unwrap(), b"{}");
        assert!(files.read("b").unwrap().is_none());
    }
}
