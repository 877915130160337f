//! What can go wrong on the way from a name to its files.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::repository::Repository;

/// A model could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "named after what failed; the fields are named in the messages")]
pub enum HubError {
    #[error("there is no folder to download to: set HF_HOME, or HOME")]
    NoCache,
    #[error("HF_ENDPOINT: expected an address such as https://hub.example.com, found `{found}`")]
    Endpoint { found: String },
    #[error("the token of HF_TOKEN, or of a login, has characters that no token has")]
    Token,
    #[error("SSL_CERT_FILE: {}: expected certificates in PEM, {message}", path.display())]
    Certificates { path: PathBuf, message: String },
    #[error("{endpoint} has no model `{id}`{}", if *known { "" } else {
        ", or it is private: check the name; if it is right, set HF_TOKEN to the token of an account that may read it"
    })]
    NotFound { endpoint: String, id: String, known: bool },
    #[error("`{id}` has no revision `{revision}`: expected a branch, a tag or a commit of it")]
    Revision { id: String, revision: String },
    #[error("`{id}` has no file `{file}` any more: try again")]
    File { id: String, file: String },
    #[error(
        "{endpoint} refuses the token of HF_TOKEN, or of a login: expected one that is valid and may read `{id}`"
    )]
    Refused { endpoint: String, id: String },
    #[error(
        "`{id}` is gated: ask for access at {endpoint}/{id}, then set HF_TOKEN to a token of the account that got it{}",
        if *token { " (the one that is set does not have it yet)" } else { "" }
    )]
    Gated { endpoint: String, id: String, token: bool },
    #[error("{url}: answered {status}{}{message}", if message.is_empty() { "" } else { ": " })]
    Status { url: String, status: u16, message: String },
    #[error("{url}: cannot be reached: {message}")]
    Unreachable { url: String, message: String },
    #[error("{url}: {message}")]
    Answer { url: String, message: String },
    #[error("HF_HUB_OFFLINE is set")]
    Offline,
    #[error(transparent)]
    NotCached(Box<NotCached>),
    #[error("the hub names a file {name:?}, which would not stay in the cache's folder")]
    Name { name: String },
    #[error(
        "`{file}`: the connection was lost {tries} times, after {found} of {expected} bytes: {message}; what came is kept, try again"
    )]
    Cut { file: String, tries: u32, found: u64, expected: u64, message: String },
    #[error("`{file}`: expected {expected} bytes, as the hub told, and it sends more")]
    Longer { file: String, expected: u64 },
    #[error(
        "`{file}`: expected the SHA-256 {expected}, found {found}: what came is not what the hub has; try again"
    )]
    Checksum { file: String, expected: String, found: String },
    #[error("{}: {needed} MiB are needed and {free} MiB are free; make room, or set HF_HOME to a folder on another disk", folder.display())]
    NoSpace { folder: PathBuf, needed: u64, free: u64 },
    #[error("{}: the disk is full; what came is kept: make room and try again", folder.display())]
    Full { folder: PathBuf },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// Another download has failed.
    #[error("stopped")]
    Stopped,
}

/// What is needed is not in the cache, and cannot be downloaded.
#[derive(Debug, thiserror::Error)]
#[error("{}, and {} does not hold {}; {}", self.why, self.cache.display(), self.lack(), self.advice())]
pub struct NotCached {
    /// What is needed.
    pub repository: Repository,
    /// The cache's folder.
    pub cache: PathBuf,
    /// Names of files; all of the repository, where there are none.
    pub missing: Vec<String>,
    /// Why nothing can be downloaded.
    pub why: Arc<HubError>,
}

impl NotCached {
    fn lack(&self) -> String {
        const LISTED: usize = 8;
        let (id, revision) = (self.repository.id(), self.repository.revision());
        if self.missing.is_empty() {
            return format!("`{id}` at revision `{revision}`");
        }
        let more = self.missing.len().saturating_sub(LISTED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let listed = self.missing[..self.missing.len().min(LISTED)].join(", ");
        format!("these files of `{id}`: {listed}{more}")
    }

    fn advice(&self) -> &'static str {
        match *self.why {
            HubError::Offline => "download it once without HF_HUB_OFFLINE",
            _ => "try again later, or fill the cache elsewhere",
        }
    }
}

impl HubError {
    /// Whether it may be gone when one tries again.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            HubError::Unreachable { .. } => true,
            HubError::Status { status, .. } => *status >= 500 || matches!(status, 408 | 429),
            _ => false,
        }
    }
}

/// What a hub sent, as it may stand in a message: short, and on one line.
pub(crate) fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}
