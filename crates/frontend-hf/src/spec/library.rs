//! Where specs and blocks are found: embedded in the binary, with a folder of the user's on top.

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use include_dir::{Dir, include_dir};
use infernum_ir::expr::{Expr, ExprError};
use infernum_ir::{SourceError, is_there, nearest};

use crate::source::ModelFiles;

static EMBEDDED: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/models");

/// The demo model that is part of the binary.
pub fn demo() -> ModelFiles {
    static FILES: LazyLock<Vec<(&'static str, &'static [u8])>> = LazyLock::new(|| {
        let files = EMBEDDED.get_dir("demo").into_iter().flat_map(Dir::files);
        files.filter_map(|f| Some((f.path().file_name()?.to_str()?, f.contents()))).collect()
    });
    ModelFiles::embedded("the built-in demo model", &FILES)
}

/// A text with the name that errors give it.
#[derive(Clone, Debug)]
pub struct Source {
    /// As the user would name the file.
    pub file: Arc<str>,
    /// Its contents.
    pub text: Arc<str>,
    dir: Option<PathBuf>,
}

impl Source {
    /// A text that is no file; what it includes comes from the library.
    pub fn new(file: &str, text: &str) -> Source {
        Source { file: file.into(), text: text.into(), dir: None }
    }

    /// An error at `slice`, a piece of the text.
    pub fn at(&self, slice: &str, message: impl Into<String>) -> SourceError {
        let start = self.offset(slice);
        SourceError::new(&self.file, &self.text, start..start + slice.len().max(1), message)
    }

    /// Parses an expression where it is written: `text` is a piece of the text.
    pub fn expression(&self, text: &str) -> Result<Expr, SourceError> {
        text.parse().map_err(|e: ExprError| self.at_offset(text, e.at, e.message))
    }

    /// An error so many bytes into `slice`, a piece of the text.
    pub fn at_offset(&self, slice: &str, by: usize, message: impl Into<String>) -> SourceError {
        let start = self.offset(slice) + by.min(slice.len());
        SourceError::new(&self.file, &self.text, start..start + 1, message)
    }

    /// Where in the text `slice` is; `None` where it is no piece of it.
    pub(crate) fn find(&self, slice: &str) -> Option<usize> {
        let at = slice.as_ptr().addr().checked_sub(self.text.as_ptr().addr())?;
        (at + slice.len() <= self.text.len()).then_some(at)
    }

    fn offset(&self, slice: &str) -> usize {
        slice.as_ptr().addr().wrapping_sub(self.text.as_ptr().addr()).min(self.text.len())
    }
}

/// A data file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// The file exists and cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// There is no such file.
    #[error("there is no `{name}`{hint}; looked in {looked}")]
    Missing {
        /// What was asked for.
        name: String,
        /// The nearest name.
        hint: String,
        /// The places searched.
        looked: String,
    },
}

/// The data files: ours, and a folder (`--data DIR`) whose `models/` overrides and adds to them.
#[derive(Clone, Debug, Default)]
pub struct Library {
    overlay: Option<PathBuf>,
}

impl Library {
    /// The embedded files, with `data` on top.
    pub fn new(data: Option<&Path>) -> Library {
        Library { overlay: data.map(|d| d.join("models")) }
    }

    /// A spec of the user's own, by path.
    pub fn open(path: &Path) -> Result<Source, LibraryError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| LibraryError::Io { path: path.to_owned(), source })?;
        Ok(Source {
            file: path.display().to_string().into(),
            text: text.into(),
            dir: path.parent().map(Path::to_owned),
        })
    }

    /// The file `name` that `from` names: beside it when it is the user's own, else in the
    /// library. A file that names itself means the one it hides.
    pub fn included(&self, name: &str, from: &Source) -> Result<Source, LibraryError> {
        let mut places = [&from.dir, &self.overlay].into_iter().flatten().map(|dir| dir.join(name));
        let other = |path: &PathBuf| is_there(path) && *path.display().to_string() != *from.file;
        match places.find(other) {
            Some(path) => Library::open(&path),
            None => self.built_in(name),
        }
    }

    /// A file of the library, named from `models/`.
    pub fn file(&self, name: &str) -> Result<Source, LibraryError> {
        match self.overlay.as_ref().map(|dir| dir.join(name)).filter(|path| is_there(path)) {
            Some(path) => Library::open(&path),
            None => self.built_in(name),
        }
    }

    fn built_in(&self, name: &str) -> Result<Source, LibraryError> {
        let text = EMBEDDED.get_file(name).and_then(|f| f.contents_utf8());
        let source = text.map(|text| Source::new(&format!("models/{name}"), text));
        source.ok_or_else(|| self.missing(name))
    }

    fn missing(&self, name: &str) -> LibraryError {
        let known: Vec<_> = EMBEDDED
            .dirs()
            .chain([&EMBEDDED])
            .flat_map(Dir::files)
            .filter_map(|f| f.path().to_str())
            .collect();
        let overlay = self.overlay.as_ref().map(|d| format!("{} and ", d.display()));
        LibraryError::Missing {
            name: name.to_owned(),
            hint: nearest(name, known),
            looked: format!("{}the built-in models/", overlay.unwrap_or_default()),
        }
    }

    /// Every shared block's file, by name; the user's hide ours.
    pub fn blocks(&self) -> Result<Vec<Source>, LibraryError> {
        self.folder("blocks")
    }

    /// Every file of a folder in `models/`, by name; the user's hide ours.
    pub fn folder(&self, folder: &str) -> Result<Vec<Source>, LibraryError> {
        let mut names: Vec<String> = Vec::new();
        let own = self.overlay.as_ref().map(|d| d.join(folder)).filter(|d| d.is_dir());
        if let Some(dir) = own {
            let io = |source| LibraryError::Io { path: dir.clone(), source };
            for entry in std::fs::read_dir(&dir).map_err(io)? {
                let name = entry.map_err(io)?.file_name().into_string();
                names.extend(name.map(|n| format!("{folder}/{n}")));
            }
        }
        let ours = EMBEDDED.get_dir(folder).into_iter().flat_map(Dir::files);
        names.extend(ours.filter_map(|f| f.path().to_str()).map(str::to_owned));
        names.retain(|n| Path::new(n).extension().is_some_and(|e| e == "ron"));
        names.sort();
        names.dedup();
        names.iter().map(|n| self.file(n)).collect()
    }

    /// Every family file, the user's first; a file of the same name hides the built-in one.
    pub fn families(&self) -> Result<Vec<Source>, LibraryError> {
        let mut names: Vec<String> = Vec::new();
        if let Some(dir) = self.overlay.as_ref().filter(|d| is_there(d)) {
            let io = |source| LibraryError::Io { path: dir.clone(), source };
            for entry in std::fs::read_dir(dir).map_err(io)? {
                names.extend(entry.map_err(io)?.file_name().into_string());
            }
        }
        let files = EMBEDDED.files().filter_map(|f| f.path().to_str());
        names.extend(files.map(str::to_owned));
        names.retain(|n| Path::new(n).extension().is_some_and(|e| e == "ron"));
        names.sort();
        names.dedup();
        names.iter().map(|n| self.file(n)).collect()
    }
}
