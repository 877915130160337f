//! The models that are served: how they load, and what requests need to know of them.

use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use infernum::{Frontend, name_on_hub};
use infernum_link::Facts;

use super::error::ApiError;
use super::metrics::ModelMetrics;
use super::worker::{Untaken, Worker};

/// A model as the command line names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamedModel {
    pub(crate) name: String,
    /// `None` for the built-in demo.
    pub(crate) folder: Option<std::path::PathBuf>,
}

impl NamedModel {
    /// The built-in demo model.
    pub(crate) fn demo() -> NamedModel {
        NamedModel { name: "ember".to_owned(), folder: None }
    }

    /// `DIR`, named as the folder is, `ORG/NAME` of the hub, named so, or `NAME=` and either; `demo` is the built-in model.
    pub(crate) fn parse(text: &str) -> Result<NamedModel, String> {
        let (name, folder) = match text.split_once('=') {
            Some((name, folder)) => (Some(name.to_owned()), folder),
            None => (None, text),
        };
        let path = std::path::PathBuf::from(folder);
        let own = || {
            if let Some(name) = name_on_hub(&path) {
                return Some(name);
            }
            let full = path.canonicalize().unwrap_or_else(|_| path.clone());
            full.file_name().map(|n| n.to_string_lossy().into_owned())
        };
        let name = name.or_else(own).filter(|n| !n.is_empty());
        let name = name.ok_or_else(|| format!("expected DIR or NAME=DIR, found `{text}`"))?;
        if folder.is_empty() {
            return Err(format!("expected NAME=DIR, found `{text}`"));
        }
        Ok(NamedModel { name, folder: (folder != "demo").then_some(path) })
    }
}

/// A model that is ready.
pub(crate) struct Served {
    pub(crate) name: String,
    pub(crate) frontend: Frontend,
    pub(crate) max_length: usize,
    pub(crate) vocab: usize,
    /// Numbers of a row of output: of what does not generate, those of a vector, or scores.
    pub(crate) width: usize,
    pub(crate) worker: Worker,
    pub(crate) metrics: Arc<ModelMetrics>,
    pub(crate) about: Facts,
}

impl Served {
    /// A model whose front end and engines are there, or will be.
    pub(crate) fn new(
        name: &str,
        frontend: Frontend,
        facts: Facts,
        worker: Worker,
        metrics: Arc<ModelMetrics>,
    ) -> Served {
        Served {
            name: name.to_owned(),
            frontend,
            max_length: facts.max_length,
            vocab: facts.vocab,
            width: facts.width,
            worker,
            metrics,
            about: facts,
        }
    }

    /// Refuses `n` choices that would have to wait behind a full queue, before they are encoded.
    pub(crate) fn check_room(&self, n: usize) -> Result<(), ApiError> {
        // More than there is room for at all is refused as a value, not as a moment.
        if self.worker.engines() > 0 && n > self.worker.room() {
            return Ok(());
        }
        self.worker.check(n).map_err(|why| self.untaken(&why))
    }

    /// Tells that no engine takes a request.
    pub(crate) fn untaken(&self, why: &Untaken) -> ApiError {
        match why {
            Untaken::Busy => ApiError::busy(self.worker.retry_after()),
            Untaken::Gone => ApiError::engine_gone(),
        }
    }
}

/// A model on its way.
pub(crate) struct Entry {
    pub(crate) name: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    ready: OnceLock<Arc<Served>>,
}

impl Entry {
    pub(crate) fn new(name: &str) -> Entry {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let created = now.unwrap_or_default().as_secs();
        Entry { name: name.to_owned(), created, ready: OnceLock::new() }
    }

    /// The model is loaded.
    pub(crate) fn set(&self, served: Served) {
        let _ = self.ready.set(Arc::new(served)); // each is loaded once
    }

    /// The model, once it is loaded.
    pub(crate) fn served(&self) -> Option<&Arc<Served>> {
        self.ready.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_named() {
        let parse = |text| NamedModel::parse(text).map(|m| (m.name, m.folder));
        let dir = |text: &str| Some(std::path::PathBuf::from(text));
        assert_eq!(parse("a=/x/y"), Ok(("a".to_owned(), dir("/x/y"))));
        assert_eq!(parse("/x/y"), Ok(("y".to_owned(), dir("/x/y"))));
        let on_hub = parse("org/name@v1:Q8_0");
        assert!(on_hub.is_ok_and(|(name, _)| ["org/name:Q8_0", "name@v1:Q8_0"].contains(&&*name)));
        assert_eq!(parse("a=demo"), Ok(("a".to_owned(), None)));
        assert!(parse("=x").is_err() && parse("x=").is_err() && parse("").is_err());
    }
}
