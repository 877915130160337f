//! What a model's rows of output are.

use serde::{Deserialize, Serialize};

/// What a model's rows of output are, and with them what it is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// Logits of the next token.
    #[default]
    Generate,
    /// A vector that stands for the sequence so far.
    Embed,
    /// Scores of the sequence so far, one for each label.
    Score,
}

impl Task {
    /// Whether the rows pick tokens.
    pub fn generates(self) -> bool {
        self == Task::Generate
    }
}
