//! The adapters of an engine: what they are called, where they are read, and from where front ends may have more of them.
//!
//! All of this is the engine's own: front ends know names, and no socket carries weights.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use infernum_runtime::{AdapterId, AdapterWeights, Engine, EngineError, Executor};

use crate::message::{AdapterPath, Cause, Refusal};

/// Bytes of an adapter's name.
const MOST_NAME: usize = 256;
/// Bytes of a path: no system opens longer ones.
const MOST_PATH: usize = 4096;
/// Adapters that may wait to be read.
const MOST_WAITING: usize = 64;

/// Reads the adapter in a folder and makes it ready for the engine; what is wrong with it, as text.
pub type ReadAdapter = Box<dyn Fn(&Path) -> Result<AdapterWeights, String> + Send + Sync>;

/// Where an engine's adapters come from.
pub struct AdapterFiles {
    /// The folder below which front ends may have adapters loaded, without links. Where there is none, they may neither load nor
    /// unload any.
    pub root: Option<PathBuf>,
    /// How they are read.
    pub read: ReadAdapter,
}

/// Of an engine without room for adapters.
impl Default for AdapterFiles {
    fn default() -> AdapterFiles {
        let read = |_: &Path| Err("the engine has no room for adapters".to_owned());
        AdapterFiles { root: None, read: Box::new(read) }
    }
}

/// Why an adapter is not loaded, or not unloaded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum AdapterRefused {
    #[error(
        "clients may neither load nor unload adapters here: --lora-root names the folder from which they may"
    )]
    NotAllowed,
    #[error("expected a name of 1 to {MOST_NAME} bytes without control characters")]
    Name,
    #[error("expected one that is free, and `{name}` is taken")]
    Taken { name: String },
    #[error("expected a folder below the one that --lora-root names")]
    Outside,
    #[error("{0}")]
    Files(String),
    #[error("there is no adapter `{name}`, or no longer")]
    Unknown { name: String },
    #[error("{MOST_WAITING} adapters wait to be read; try again when they are loaded")]
    Busy,
    #[error("the model sleeps: adapters are loaded when it is awake")]
    Asleep,
    #[error(
        "its files were not read: the engine has a bug, or no thread for it; its log says more"
    )]
    Unread,
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl From<&AdapterRefused> for Refusal {
    fn from(error: &AdapterRefused) -> Refusal {
        let value =
            |field: &str| Refusal::new(Cause::Value(field.to_owned()), format!("{field}: {error}"));
        let cause = match error {
            AdapterRefused::Name | AdapterRefused::Taken { .. } => return value("lora_name"),
            AdapterRefused::Outside | AdapterRefused::Files(_) => return value("lora_path"),
            AdapterRefused::Engine(error) => return Refusal::from(error),
            AdapterRefused::NotAllowed => Cause::AdaptersNotAllowed,
            AdapterRefused::Unknown { .. } => Cause::NoAdapter,
            AdapterRefused::Busy => Cause::Busy,
            AdapterRefused::Asleep => Cause::Asleep,
            AdapterRefused::Unread => Cause::Internal,
        };
        Refusal::new(cause, error.to_string())
    }
}

impl AdapterPath {
    /// Refuses a name that no model can have, and a path that no folder has.
    pub fn check(&self) -> Result<(), AdapterRefused> {
        check_name(&self.name)?;
        if self.path.len() > MOST_PATH { Err(AdapterRefused::Outside) } else { Ok(()) }
    }
}

/// Refuses what cannot be a model's name.
pub fn check_name(name: &str) -> Result<(), AdapterRefused> {
    let fits = (1..=MOST_NAME).contains(&name.len()) && !name.chars().any(char::is_control);
    if fits { Ok(()) } else { Err(AdapterRefused::Name) }
}

impl AdapterFiles {
    fn root(&self) -> Result<&Path, AdapterRefused> {
        self.root.as_deref().ok_or(AdapterRefused::NotAllowed)
    }

    /// Reads what a front end names, which must be below the root, whatever links there are.
    fn read_below(&self, path: &str) -> Result<Files, AdapterRefused> {
        let root = self.root()?;
        let full = root.join(path).canonicalize().map_err(|_| AdapterRefused::Outside)?;
        if !(full.starts_with(root) && full.is_dir()) {
            return Err(AdapterRefused::Outside);
        }
        let weights = (self.read)(&full).map_err(AdapterRefused::Files)?;
        Ok(Files { folder: full, weights })
    }
}

/// What was read.
pub(crate) struct Files {
    pub(crate) folder: PathBuf,
    pub(crate) weights: AdapterWeights,
}

/// What came of reading.
pub(crate) type Read = Result<Files, AdapterRefused>;

/// Where that is to go.
pub(crate) type Then = Box<dyn FnOnce(Read) + Send>;

/// Tells what came of reading, once: where it is dropped before, that nothing did.
struct Reading(Option<Then>);

impl Reading {
    fn ends(&mut self, read: Read) {
        if let Some(then) = self.0.take() {
            then(read);
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.ends(Err(AdapterRefused::Unread));
    }
}

/// A front end that wants an adapter, and its name for that.
#[derive(Clone, Copy)]
pub(crate) struct Whose {
    pub(crate) peer: u64,
    pub(crate) key: u64,
}

/// An adapter that a front end wants.
struct Wanted {
    whose: Whose,
    adapter: AdapterPath,
    then: Then,
}

/// An adapter that the engine has.
struct Loaded {
    name: String,
    id: AdapterId,
    folder: PathBuf,
}

/// The adapters that an engine has, and has to have again when it wakes.
#[derive(Default)]
pub(crate) struct Adapters {
    files: Arc<AdapterFiles>,
    /// In the order of loading.
    loaded: Vec<Loaded>,
    /// The one that is being read, by name.
    reading: Option<(Whose, String)>,
    /// Those that are read after it, one at a time.
    waiting: VecDeque<Wanted>,
}

impl Adapters {
    pub(crate) fn of(files: AdapterFiles) -> Adapters {
        Adapters { files: Arc::new(files), ..Adapters::default() }
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.loaded.iter().map(|loaded| loaded.name.clone()).collect()
    }

    pub(crate) fn find(&self, name: String) -> Result<AdapterId, AdapterRefused> {
        check_name(&name)?;
        let found = self.loaded.iter().find(|loaded| loaded.name == name);
        found.map(|loaded| loaded.id).ok_or(AdapterRefused::Unknown { name })
    }

    /// Reads an adapter and loads it, for whoever may name any folder.
    pub(crate) fn load<E: Executor>(
        &mut self,
        engine: &mut Engine<E>,
        name: &str,
        folder: &Path,
    ) -> Result<(), AdapterRefused> {
        let weights = (self.files.read)(folder).map_err(AdapterRefused::Files)?;
        self.insert(engine, name, Files { folder: folder.to_owned(), weights })
    }

    fn insert<E: Executor>(
        &mut self,
        engine: &mut Engine<E>,
        name: &str,
        Files { folder, weights }: Files,
    ) -> Result<(), AdapterRefused> {
        self.check_free(name)?;
        let id = engine.load_adapter(&weights)?;
        tracing::info!(adapter = name, "loaded");
        self.loaded.push(Loaded { name: name.to_owned(), id, folder });
        Ok(())
    }

    fn check_free(&self, name: &str) -> Result<(), AdapterRefused> {
        if self.loaded.iter().any(|loaded| loaded.name == name) {
            return Err(AdapterRefused::Taken { name: name.to_owned() });
        }
        Ok(())
    }

    /// Takes an adapter out that a front end does not want any more.
    pub(crate) fn remove(&mut self, name: String) -> Result<AdapterId, AdapterRefused> {
        self.files.root()?;
        check_name(&name)?;
        let at = self.loaded.iter().position(|loaded| loaded.name == name);
        let Loaded { name, id, .. } =
            self.loaded.remove(at.ok_or(AdapterRefused::Unknown { name })?);
        tracing::info!(adapter = name, "unloaded");
        Ok(id)
    }

    /// Has an adapter read when its turn comes.
    pub(crate) fn want(
        &mut self,
        whose: Whose,
        adapter: AdapterPath,
        then: Then,
        asleep: bool,
    ) -> Result<(), AdapterRefused> {
        self.files.root()?;
        adapter.check()?;
        self.check_free(&adapter.name)?;
        if asleep {
            return Err(AdapterRefused::Asleep);
        }
        if self.waiting.len() >= MOST_WAITING {
            return Err(AdapterRefused::Busy);
        }
        self.waiting.push_back(Wanted { whose, adapter, then });
        self.read_next();
        Ok(())
    }

    /// Loads what was read, unless the engine sleeps by now; tells whose it is, and what came of it.
    pub(crate) fn was_read<E: Executor>(
        &mut self,
        engine: Option<&mut Engine<E>>,
        read: Read,
    ) -> Option<(Whose, Result<(), AdapterRefused>)> {
        let (whose, name) = self.reading.take()?;
        let loaded = match (read, engine) {
            (Ok(files), Some(engine)) => self.insert(engine, &name, files),
            (Ok(_), None) => Err(AdapterRefused::Asleep),
            (Err(error), _) => Err(error),
        };
        self.read_next();
        Some((whose, loaded))
    }

    /// Forgets what a front end wanted that is gone.
    pub(crate) fn leave(&mut self, peer: u64) {
        self.waiting.retain(|wanted| wanted.whose.peer != peer);
    }

    /// Has the next adapter read, on a thread of its own: steps do not wait for files.
    fn read_next(&mut self) {
        if self.reading.is_some() {
            return;
        }
        let Some(Wanted { whose, adapter, then }) = self.waiting.pop_front() else { return };
        let AdapterPath { name, path } = adapter;
        self.reading = Some((whose, name));
        let (files, mut reading) = (self.files.clone(), Reading(Some(then)));
        let read = move || reading.ends(files.read_below(&path));
        if let Err(error) = std::thread::Builder::new().name("adapter".to_owned()).spawn(read) {
            tracing::error!(%error, "no thread to read an adapter");
        }
    }

    /// Loads all into an engine that was made again, by the names that requests have for them.
    pub(crate) fn restore<E: Executor>(&self, engine: &mut Engine<E>) -> Result<(), String> {
        self.loaded.iter().try_for_each(|Loaded { name, id, folder }| {
            let weights = (self.files.read)(folder).map_err(|e| {
                format!(
                    "the adapter `{name}`: {e}; unload it, or put its files back where they were"
                )
            })?;
            engine.load_adapter_as(*id, &weights).map_err(|e| e.to_string())
        })
    }
}
