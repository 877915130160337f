//! A server that is held against others.

use std::path::Path;

use serde::{Deserialize, Serialize};

/// A server and its switches.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Configuration {
    pub(super) name: String,
    /// Flags of its `infernum serve`.
    #[serde(default)]
    pub(super) serve: Vec<String>,
    /// Another program, with `{port}` where its port is to stand.
    #[serde(default)]
    pub(super) command: Vec<String>,
}

/// A configuration that could not be driven, or did not end well.
#[derive(Debug, Serialize)]
pub(super) struct Failure {
    pub(super) configuration: String,
    pub(super) reason: String,
}

impl Configuration {
    /// What sets it apart.
    pub(super) fn flags(&self) -> String {
        [&self.command[..], &self.serve].concat().join(" ")
    }

    /// The command that starts it, with flags that all have in common.
    pub(super) fn command(&self, program: &Path, common: &[&[String]]) -> Vec<String> {
        if !self.command.is_empty() {
            return self.command.clone();
        }
        let first =
            [program.display().to_string(), "serve".into(), "--port".into(), "{port}".into()];
        [&first[..], &common.concat(), &self.serve].concat()
    }
}
