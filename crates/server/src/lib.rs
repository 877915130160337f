//! An OpenAI-compatible server over [`infernum`].

mod serve;

pub use serve::{Args, layered, run};

/// What serving ends with.
pub type Outcome = Result<(), Box<dyn std::error::Error>>;
