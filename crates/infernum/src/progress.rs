//! Work that takes a while tells how far it is.

use std::fmt;

use infernum_ir::SourceWarning;

/// What takes a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Downloading a model; its units are bytes.
    Download,
    /// Compiling; its units are passes.
    Compile,
    /// Reading weights; its units are bytes.
    Weights,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stage::Download => "downloading",
            Stage::Compile => "compiling",
            Stage::Weights => "reading weights",
        })
    }
}

/// How far a stage is. Stages follow one another; each begins and ends, if it fails as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress<'a> {
    /// A stage begins.
    Begin {
        /// Which.
        stage: Stage,
        /// Its units; about so many where it is not known yet.
        total: u64,
    },
    /// So many units more are done.
    Advance(u64),
    /// The stage is over.
    End,
    /// Something in the model's spec is likely a mistake.
    Warning(&'a SourceWarning),
    /// Something that one should know although it goes on.
    Notice(&'a str),
}
