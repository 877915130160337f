//! The models that are served: how they load, and what requests need to know of them.

use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use infernum::{Frontend, name_on_hub};
use infernum_link::Facts;
use infernum_runtime::Request;

use super::error::ApiError;
use super::metrics::ModelMetrics;
use super::worker::{Gone, Rooms, Running, Untaken, Worker};

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
#[derive(Clone)]
pub(crate) struct Served {
    pub(crate) name: String,
    pub(crate) frontend: Arc<Frontend>,
    pub(crate) max_length: usize,
    pub(crate) vocab: usize,
    /// Numbers of a row of output: of what does not generate, those of a vector, or scores.
    pub(crate) width: usize,
    pub(crate) worker: Arc<Worker>,
    pub(crate) metrics: Arc<ModelMetrics>,
    pub(crate) about: Facts,
    /// Where this is a model with an adapter, whose name it goes by: the model's name.
    pub(crate) parent: Option<String>,
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
            frontend: Arc::new(frontend),
            max_length: facts.max_length,
            vocab: facts.vocab,
            width: facts.width,
            worker: Arc::new(worker),
            metrics,
            about: facts,
            parent: None,
        }
    }

    /// The model with an adapter, under the adapter's name.
    fn adapted(&self, name: &str) -> Served {
        Served { name: name.to_owned(), parent: Some(self.name.clone()), ..self.clone() }
    }

    /// The adapter that requests are computed with, by name.
    fn adapter(&self) -> Option<&str> {
        self.parent.as_ref().map(|_| &*self.name)
    }

    /// Whether it is the model of this name with an adapter.
    pub(crate) fn is_of(&self, model: &str) -> bool {
        self.parent.as_deref() == Some(model)
    }

    /// Takes room for requests, at an engine that has the adapter, if there is one.
    pub(crate) fn admit(&self, requests: &[Request]) -> Result<Rooms, Untaken> {
        self.worker.admit(requests, self.adapter())
    }

    /// Hands requests over, to be computed with the adapter, if there is one.
    pub(crate) fn submit(&self, requests: Vec<Request>, rooms: Rooms) -> Result<Running, Gone> {
        self.worker.submit(requests, self.adapter(), rooms)
    }

    /// Refuses `n` choices that would have to wait behind a full queue, before they are encoded.
    pub(crate) fn check_room(&self, n: usize) -> Result<(), ApiError> {
        // More than there is room for at all is refused as a value, not as a moment.
        if self.worker.engines() > 0 && n > self.worker.room() {
            return Ok(());
        }
        self.worker.check(n, self.adapter()).map_err(|why| self.untaken(&why))
    }

    /// Tells that no engine takes a request.
    pub(crate) fn untaken(&self, why: &Untaken) -> ApiError {
        match why {
            Untaken::Busy => ApiError::busy(self.worker.retry_after()),
            Untaken::Asleep => ApiError::asleep(&self.name),
            Untaken::Gone => ApiError::engine_gone(),
        }
    }

    /// Refuses what has to wait until the model is woken.
    pub(crate) fn check_awake(&self) -> Result<(), ApiError> {
        if self.worker.asleep() { Err(ApiError::asleep(&self.name)) } else { Ok(()) }
    }

    /// Tells that an engine has not answered.
    pub(crate) fn gone(&self) -> ApiError {
        self.check_awake().err().unwrap_or_else(ApiError::engine_gone)
    }
}

/// A model on its way.
pub(crate) struct Entry {
    pub(crate) name: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    /// Whether it comes before others, the smaller first: the place of its engine among those that were named.
    pub(crate) rank: usize,
    ready: OnceLock<Arc<Served>>,
}

impl Entry {
    pub(crate) fn new(name: &str) -> Entry {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let created = now.unwrap_or_default().as_secs();
        Entry { name: name.to_owned(), created, rank: 0, ready: OnceLock::new() }
    }

    pub(crate) fn ranked(self, rank: usize) -> Entry {
        Entry { rank, ..self }
    }

    /// The model is loaded: gives it as requests have it.
    pub(crate) fn set(&self, served: Served) -> Arc<Served> {
        self.ready.get_or_init(|| Arc::new(served)).clone() // each is loaded once
    }

    /// The adapters that its engines have, in the order of their loading.
    pub(crate) fn adapter_names(&self) -> Vec<String> {
        self.served().map(|served| served.worker.adapters()).unwrap_or_default()
    }

    /// The model with an adapter of its engines'.
    pub(crate) fn adapter(&self, name: &str) -> Option<Served> {
        let served = self.served().filter(|served| served.worker.has_adapter(name))?;
        Some(served.adapted(name))
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
