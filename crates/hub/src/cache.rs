//! The cache's folder, laid out as Hugging Face's tools have it:
//!
//! ```text
//! models--ORG--NAME/blobs/ETAG                  contents; ETAG.incomplete while they come
//! models--ORG--NAME/snapshots/COMMIT/FILE       links to them
//! models--ORG--NAME/refs/REVISION               the commit that a branch or tag was
//! .locks/models--ORG--NAME/ETAG.lock            held by whoever downloads
//! ```

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::HubError;
use crate::repository::{Repository, is_inside};

/// Files of a snapshot that are looked at.
const MOST_FILES: usize = 100_000;

#[derive(Debug)]
pub(crate) struct Cache {
    folder: PathBuf,
}

impl Cache {
    pub(crate) fn new(folder: PathBuf) -> Cache {
        Cache { folder }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    fn repository(&self, repository: &Repository) -> PathBuf {
        self.folder.join(repository.folder())
    }

    /// The folder of a commit's files.
    pub(crate) fn snapshot(&self, repository: &Repository, commit: &str) -> PathBuf {
        self.repository(repository).join("snapshots").join(commit)
    }

    /// Where contents of this name are.
    pub(crate) fn blob(&self, repository: &Repository, etag: &str) -> PathBuf {
        self.repository(repository).join("blobs").join(etag)
    }

    fn reference(&self, repository: &Repository) -> PathBuf {
        self.repository(repository).join("refs").join(repository.revision())
    }

    /// The commit that the revision was when it was asked for last; a commit is itself.
    pub(crate) fn commit(&self, repository: &Repository) -> Result<Option<String>, HubError> {
        let path = self.reference(repository);
        let commit = match fs::read_to_string(&path) {
            Ok(text) => text.trim().to_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                repository.revision().to_owned()
            }
            Err(source) => return Err(HubError::Io { path, source }),
        };
        let is_there = !commit.contains('/')
            && is_inside(&commit)
            && self.snapshot(repository, &commit).is_dir();
        Ok(is_there.then_some(commit))
    }

    /// Names of a snapshot's files, sorted.
    pub(crate) fn files(
        &self,
        repository: &Repository,
        commit: &str,
    ) -> Result<Vec<String>, HubError> {
        let root = self.snapshot(repository, commit);
        let (mut found, mut folders) = (Vec::new(), vec![String::new()]);
        while let Some(folder) = folders.pop() {
            let path = root.join(&folder);
            let listed = fs::read_dir(&path).and_then(Iterator::collect::<io::Result<Vec<_>>>);
            for entry in listed.map_err(|source| HubError::Io { path: path.clone(), source })? {
                let Ok(name) = entry.file_name().into_string() else { continue };
                let name = if folder.is_empty() { name } else { format!("{folder}/{name}") };
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    folders.push(name);
                } else if root.join(&name).is_file() && found.len() < MOST_FILES {
                    found.push(name);
                }
            }
        }
        found.sort_unstable();
        Ok(found)
    }

    /// Notes which commit the revision is.
    pub(crate) fn keep(&self, repository: &Repository, commit: &str) -> Result<(), HubError> {
        if repository.revision() == commit {
            return Ok(());
        }
        let path = self.reference(repository);
        let old = fs::read_to_string(&path);
        if old.is_ok_and(|old| old.trim() == commit) {
            return Ok(());
        }
        make_parent(&path)?;
        let written = aside(&path, |new| fs::write(new, commit));
        written.map_err(|source| HubError::Io { path, source })
    }

    /// Waits until nobody else downloads these contents; `waits` is called where somebody does. Whoever holds the file
    /// may, and a process that dies lets go.
    pub(crate) fn lock(
        &self,
        repository: &Repository,
        etag: &str,
        waits: impl FnOnce(),
    ) -> Result<File, HubError> {
        let folder = self.folder.join(".locks").join(repository.folder());
        let path = folder.join(format!("{etag}.lock"));
        let lock = || {
            fs::create_dir_all(&folder)?;
            let file = File::options().create(true).append(true).open(&path)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(fs::TryLockError::WouldBlock) => {
                    waits();
                    file.lock()?;
                }
                Err(fs::TryLockError::Error(error)) => return Err(error),
            }
            Ok(file)
        };
        lock().map_err(|source| HubError::Io { path: path.clone(), source })
    }

    /// Has a snapshot's file be these contents.
    pub(crate) fn link(
        &self,
        (repository, commit): (&Repository, &str),
        name: &str,
        etag: &str,
    ) -> Result<(), HubError> {
        let path = self.snapshot(repository, commit).join(name);
        make_parent(&path)?;
        let up = "../".repeat(2 + name.matches('/').count());
        let made = aside(&path, |new| {
            #[cfg(unix)]
            return std::os::unix::fs::symlink(format!("{up}blobs/{etag}"), new);
            #[cfg(not(unix))]
            return {
                let _ = up;
                fs::hard_link(self.blob(repository, etag), new)
            };
        });
        made.map_err(|source| HubError::Io { path, source })
    }
}

/// Makes the folder that a file is to lie in.
pub(crate) fn make_parent(path: &Path) -> Result<(), HubError> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(|source| HubError::Io { path: folder.to_owned(), source })
}

/// Makes a file beside where it is to be, and moves it there: nobody sees half of it.
fn aside(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let (process, count) = (std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
    let mut new = path.as_os_str().to_owned();
    new.push(format!(".{process}-{count}.new"));
    let new = PathBuf::from(new);
    let _ = fs::remove_file(&new); // of a process of the same number that died
    make(&new)?;
    fs::rename(&new, path)
}
