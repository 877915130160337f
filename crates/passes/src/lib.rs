//! Rewrites on the IR, and the pipelines that order them.
//!
//! A pass maps a well-formed module to a well-formed module. Which passes run, and in what order,
//! is data: `kernels/pipelines/*.ron`.

mod canonicalise;
pub mod check;
pub mod data;
pub mod fuse;
mod pipeline;

use infernum_ir::Module;

pub use pipeline::{Pipeline, PipelineError};

/// A rewrite of a whole module.
pub struct Pass {
    /// Its name in pipelines and for `--dump-after`.
    pub name: &'static str,
    /// What it does.
    pub doc: &'static str,
    /// Runs it; an error says what it could not handle.
    pub run: fn(&Module) -> Result<Module, String>,
}

/// Every pass there is.
pub static PASSES: &[Pass] = &[canonicalise::PASS];
