//! Models of the Hugging Face hub: found in its cache, or downloaded into it.
//!
//! The cache is laid out as Hugging Face's own tools lay it out (`blobs`, `snapshots`, `refs`, locks), so that what one
//! has downloaded the others find. A repository is asked for once ([`Hub::snapshot`]); which of its files are wanted is
//! the caller's choice ([`Snapshot::fetch`]).
//!
//! What a hub says is not trusted: names and etags that could leave the cache's folder are refused, no more is read of a
//! file than it said there is, and a token goes to the hub itself and to no host that it redirects to.

mod cache;
mod client;
mod download;
mod error;
mod repository;
mod settings;

use std::path::PathBuf;
use std::sync::Arc;

use cache::Cache;
use client::Client;

pub use error::{HubError, NotCached};
pub use repository::{Repository, RepositoryError};
pub use settings::Settings;

/// What a download tells on its way, on the thread that asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// So many bytes are missing, all files together.
    Begin(u64),
    /// So many more have come.
    Bytes(u64),
    /// All are there, or it failed.
    End,
    /// Something that one should know although it goes on.
    Notice(&'a str),
}

/// A hub, and the cache of what came from it.
#[derive(Debug)]
pub struct Hub {
    client: Client,
    cache: Cache,
    offline: bool,
}

/// A repository's files as they are at one commit.
#[derive(Debug)]
pub struct Snapshot<'a> {
    hub: &'a Hub,
    repository: &'a Repository,
    commit: String,
    files: Vec<String>,
    /// Why nothing can be downloaded, where nothing can.
    cut_off: Option<Arc<HubError>>,
}

impl Hub {
    /// A hub with these settings.
    pub fn new(settings: &Settings) -> Result<Hub, HubError> {
        let cache = Cache::new(settings.cache.clone().ok_or(HubError::NoCache)?);
        Ok(Hub { client: Client::new(settings)?, cache, offline: settings.offline })
    }

    /// The hub, the cache and the token that the environment names, as Hugging Face's tools read it.
    pub fn from_env() -> Result<Hub, HubError> {
        Hub::new(&Settings::from_env()?)
    }

    /// The repository as the hub has it now. Where the hub cannot be reached, or is not to be asked, it is as the cache
    /// has it.
    pub fn snapshot<'a>(&'a self, repository: &'a Repository) -> Result<Snapshot<'a>, HubError> {
        let cut_off = if self.offline {
            HubError::Offline
        } else {
            match self.client.info(repository) {
                Ok((commit, files)) => {
                    return Ok(Snapshot { hub: self, repository, commit, files, cut_off: None });
                }
                Err(error) if error.is_passing() => error,
                Err(error) => return Err(error),
            }
        };
        let Some(commit) = self.cache.commit(repository)? else {
            let (repository, cache) = (repository.clone(), self.cache.folder().to_owned());
            let (missing, why) = (Vec::new(), Arc::new(cut_off));
            let lacks = NotCached { repository, cache, missing, why };
            return Err(HubError::NotCached(Box::new(lacks)));
        };
        let files = self.cache.files(repository, &commit)?;
        Ok(Snapshot { hub: self, repository, commit, files, cut_off: Some(Arc::new(cut_off)) })
    }
}

impl Snapshot<'_> {
    /// Names of the files that there are; of those in the cache, where nothing can be downloaded. Folders are parted by `/`.
    pub fn files(&self) -> &[String] {
        &self.files
    }

    /// The folder in which files lie once they were fetched.
    pub fn folder(&self) -> PathBuf {
        self.hub.cache.snapshot(self.repository, &self.commit)
    }

    /// Why nothing can be downloaded, where nothing can.
    pub fn cut_off(&self) -> Option<&HubError> {
        self.cut_off.as_deref()
    }

    /// Downloads those of the files that are not in the cache.
    pub fn fetch(
        &self,
        files: &[String],
        event: &mut dyn FnMut(Event<'_>),
    ) -> Result<(), HubError> {
        let folder = self.folder();
        let mut missing = Vec::new();
        for name in files {
            if !repository::is_inside(name) {
                return Err(HubError::Name { name: error::shown(name) });
            }
            if !folder.join(name).is_file() && !missing.contains(name) {
                missing.push(name.clone());
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        if self.cut_off.is_some() {
            return Err(self.lacks(missing));
        }
        let (client, cache) = (&self.hub.client, &self.hub.cache);
        download::all(client, cache, (self.repository, &self.commit), &missing, event)
    }

    /// The error that says that these files are needed, and not in the cache.
    pub fn lacks(&self, missing: Vec<String>) -> HubError {
        HubError::NotCached(Box::new(NotCached {
            repository: self.repository.clone(),
            cache: self.hub.cache.folder().to_owned(),
            missing,
            why: self.cut_off.clone().unwrap_or_else(|| Arc::new(HubError::Offline)),
        }))
    }

    /// Notes that the repository's revision is this commit, for times without a hub: once all files that are needed were fetched.
    pub fn keep(&self) -> Result<(), HubError> {
        match self.cut_off {
            None => self.hub.cache.keep(self.repository, &self.commit),
            Some(_) => Ok(()),
        }
    }
}
