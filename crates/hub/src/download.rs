//! Files from a hub into the cache: several at a time, each going on where it was cut.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};

use sha2::{Digest, Sha256};

use crate::Event;
use crate::cache::{Cache, make_parent};
use crate::client::{Client, Metadata};
use crate::error::HubError;
use crate::repository::Repository;

/// Files that come at a time.
const TOGETHER: usize = 4;
/// Bytes that are read at once.
const PART: usize = 256 << 10;
/// Bytes of one try that are progress: tries are counted from there anew.
const PROGRESS: u64 = 1 << 20;

/// What a thread tells.
enum Told {
    Bytes(u64),
    Notice(String),
}

/// Downloads files of a commit, which are not in its snapshot.
pub(crate) fn all(
    client: &Client,
    cache: &Cache,
    of: (&Repository, &str),
    names: &[String],
    event: &mut dyn FnMut(Event<'_>),
) -> Result<(), HubError> {
    let files = each(names, event, |name, _, _| client.metadata(of, name))?;
    let missing = |file: &Metadata| {
        if is_whole(&cache.blob(of.0, &file.etag), file) {
            return 0;
        }
        let begun = fs::metadata(incomplete(cache, of.0, file)).map_or(0, |m| m.len());
        file.size.saturating_sub(begun)
    };
    let mut wanted = files.clone();
    wanted.sort_unstable_by(|a, b| a.etag.cmp(&b.etag)); // equal contents come once
    wanted.dedup_by(|a, b| a.etag == b.etag);
    let total = wanted.iter().map(missing).fold(0, u64::saturating_add);
    check_room(cache.folder(), total)?;
    event(Event::Begin(total));
    let done = each(&wanted, event, |file, told, stop| {
        Download { client, cache, of, file, told, stop, seen: 0 }.run()
    });
    event(Event::End);
    done?;
    files.iter().try_for_each(|file| cache.link(of, &file.name, &file.etag))
}

/// Does something with each item, several at a time; what they tell is told here. The first error ends it.
fn each<T: Sync, R: Send>(
    items: &[T],
    event: &mut dyn FnMut(Event<'_>),
    work: impl Fn(&T, &Sender<Told>, &AtomicBool) -> Result<R, HubError> + Sync,
) -> Result<Vec<R>, HubError> {
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let results: Mutex<Vec<(usize, Result<R, HubError>)>> = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let (sender, told) = channel();
        for _ in 0..TOGETHER.min(items.len()) {
            let (sender, work, next, stop, results) =
                (sender.clone(), &work, &next, &stop, &results);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(i) else { break };
                    let result = work(item, &sender, stop);
                    if result.is_err() {
                        stop.store(true, Ordering::Relaxed);
                    }
                    results.lock().unwrap_or_else(PoisonError::into_inner).push((i, result));
                }
            });
        }
        drop(sender);
        for told in told {
            match told {
                Told::Bytes(bytes) => event(Event::Bytes(bytes)),
                Told::Notice(text) => event(Event::Notice(&text)),
            }
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    // What stopped the others before them.
    results.sort_by_key(|(i, result)| (matches!(result, Err(HubError::Stopped)), *i));
    results.into_iter().map(|(_, result)| result).collect()
}

/// Where contents lie until they are whole.
fn incomplete(cache: &Cache, repository: &Repository, file: &Metadata) -> PathBuf {
    cache.blob(repository, &format!("{}.incomplete", file.etag))
}

fn is_whole(blob: &Path, file: &Metadata) -> bool {
    fs::metadata(blob).is_ok_and(|meta| meta.is_file() && meta.len() == file.size)
}

/// One file on its way.
struct Download<'a> {
    client: &'a Client,
    cache: &'a Cache,
    of: (&'a Repository, &'a str),
    file: &'a Metadata,
    told: &'a Sender<Told>,
    stop: &'a AtomicBool,
    /// Bytes that were told of, from the first one on.
    seen: u64,
}

/// What is there of a file, and the digest of that.
struct Partial {
    file: File,
    path: PathBuf,
    len: u64,
    digest: Sha256,
}

impl Download<'_> {
    /// Downloads the file, unless it is there.
    fn run(mut self) -> Result<(), HubError> {
        let (blob, path) = (
            self.cache.blob(self.of.0, &self.file.etag),
            incomplete(self.cache, self.of.0, self.file),
        );
        make_parent(&blob)?;
        let waits = || {
            let text =
                format!("`{}`: waiting for another process that downloads it", self.file.name);
            self.tell(Told::Notice(text));
        };
        let _held = self.cache.lock(self.of.0, &self.file.etag, waits)?;
        if is_whole(&blob, self.file) {
            return Ok(());
        }
        let mut partial = Partial::open(path.clone())?;
        if partial.len > self.file.size {
            partial.restart()?;
        }
        self.seen = partial.len;
        self.complete(&mut partial)?;
        if let Err(error) = self.check(&partial) {
            // The beginning was of something else, or the end is: from now on it is all of one download.
            partial.restart()?;
            self.tell(Told::Notice(format!("{error}; downloading it anew")));
            self.complete(&mut partial)?;
            if let Err(error) = self.check(&partial) {
                let _ = fs::remove_file(&path);
                return Err(error);
            }
        }
        let Partial { file, .. } = partial;
        let moved = file.sync_all().and_then(|()| fs::rename(&path, &blob));
        moved.map_err(|source| HubError::Io { path: blob, source })
    }

    /// Reads on until the file is whole, in as many tries as bring it further.
    fn complete(&mut self, partial: &mut Partial) -> Result<(), HubError> {
        let mut tried = 0;
        while partial.len < self.file.size {
            let before = partial.len;
            let message = match self.read_on(partial) {
                Ok(()) if partial.len == self.file.size => break,
                Ok(()) => "it ended early".to_owned(),
                Err(Broken::Connection(message)) => message,
                Err(Broken::Hub(error)) if error.is_passing() => error.to_string(),
                Err(Broken::Hub(error)) => return Err(error),
            };
            tried = if partial.len.saturating_sub(before) >= PROGRESS { 1 } else { tried + 1 };
            if tried >= self.client.tries {
                return Err(HubError::Cut {
                    file: self.file.name.clone(),
                    tries: tried,
                    found: partial.len,
                    expected: self.file.size,
                    message,
                });
            }
            self.client.wait(tried);
        }
        Ok(())
    }

    /// Reads what comes of one request.
    fn read_on(&mut self, partial: &mut Partial) -> Result<(), Broken> {
        let (start, body) = self.client.read(self.of, &self.file.name, partial.len)?;
        if start < partial.len {
            partial.restart()?; // the hub does not read on
        }
        let mut reader = body.into_reader();
        let mut buffer = vec![0; PART];
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(HubError::Stopped.into());
            }
            let read = reader.read(&mut buffer).map_err(|e| Broken::Connection(e.to_string()))?;
            if read == 0 {
                return Ok(());
            }
            if partial.len + read as u64 > self.file.size {
                let (file, expected) = (self.file.name.clone(), self.file.size);
                return Err(HubError::Longer { file, expected }.into());
            }
            partial.write(&buffer[..read])?;
            let new = partial.len.saturating_sub(self.seen);
            if new > 0 {
                self.seen = partial.len;
                self.tell(Told::Bytes(new));
            }
        }
    }

    fn check(&self, partial: &Partial) -> Result<(), HubError> {
        let Some(expected) = self.file.sha256() else { return Ok(()) };
        let found = format!("{:x}", partial.digest.clone().finalize());
        if found.eq_ignore_ascii_case(expected) {
            return Ok(());
        }
        let (file, expected) = (self.file.name.clone(), expected.to_owned());
        Err(HubError::Checksum { file, expected, found })
    }

    fn tell(&self, told: Told) {
        let _ = self.told.send(told); // whoever listens outlives this
    }
}

/// Why a request brought no whole file.
enum Broken {
    /// It can be asked for again.
    Connection(String),
    Hub(HubError),
}

impl From<HubError> for Broken {
    fn from(error: HubError) -> Broken {
        Broken::Hub(error)
    }
}

impl Partial {
    /// What an earlier download has left, if one did.
    fn open(path: PathBuf) -> Result<Partial, HubError> {
        let file = File::options().create(true).truncate(false).read(true).write(true).open(&path);
        let file = file.map_err(|source| HubError::Io { path: path.clone(), source })?;
        let mut partial = Partial { file, path, len: 0, digest: Sha256::new() };
        let mut buffer = vec![0; PART];
        loop {
            let read = partial.file.read(&mut buffer).map_err(|e| partial.error(e))?;
            if read == 0 {
                return Ok(partial);
            }
            partial.digest.update(&buffer[..read]);
            partial.len += read as u64;
        }
    }

    /// Forgets what is there.
    fn restart(&mut self) -> Result<(), HubError> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        emptied.map_err(|e| self.error(e))?;
        (self.len, self.digest) = (0, Sha256::new());
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        self.file.write_all(bytes).map_err(|e| self.error(e))?;
        self.digest.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn error(&self, source: io::Error) -> HubError {
        let folder = self.path.parent().unwrap_or(&self.path);
        if source.kind() == io::ErrorKind::StorageFull {
            return HubError::Full { folder: folder.to_owned() };
        }
        HubError::Io { path: self.path.clone(), source }
    }
}

/// Refuses what the disk has no room for.
fn check_room(folder: &Path, needed: u64) -> Result<(), HubError> {
    fs::create_dir_all(folder)
        .map_err(|source| HubError::Io { path: folder.to_owned(), source })?;
    match free_space(folder) {
        Some(free) if free < needed => Err(HubError::NoSpace {
            folder: folder.to_owned(),
            needed: needed.div_ceil(1 << 20),
            free: free >> 20,
        }),
        _ => Ok(()),
    }
}

/// Bytes that may still be written to a folder's disk, where the system says.
#[cfg(unix)]
fn free_space(folder: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(folder).ok()?;
    disk.f_bavail.checked_mul(disk.f_frsize)
}

#[cfg(not(unix))]
fn free_space(_: &Path) -> Option<u64> {
    None
}
