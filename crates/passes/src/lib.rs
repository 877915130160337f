//! Rewrites on the IR, and the pipelines that order them.
//!
//! A pass maps a well-formed module to a well-formed module. Which passes run, and in what order,
//! is data: `kernels/pipelines/*.ron`. What `fuse` does is data too: fused ops
//! (`kernels/fused/*.ron`) and the rules that put them in place (`kernels/rules/*.ron`).

mod adapters;
mod bucket;
mod canonicalise;
pub mod check;
pub mod data;
pub mod fuse;
mod kv_dtype;
mod names;
mod pack;
mod pick;
mod pipeline;
pub mod reference;
mod rings;

use infernum_ir::Module;

pub use adapters::{Adapters, EXPERT, adapters, bank_a, bank_b, experts_of, is_target};
pub use bucket::Bucket;
pub use kv_dtype::{KvDtype, store_rows};
pub use pick::{greedy_steps, pick};
pub use pipeline::{Pipeline, PipelineError};

/// What a pass may look at, and what it tells.
pub struct Context<'a> {
    /// The ops and rules there are.
    pub kernels: &'a data::Kernels,
    /// How to fuse, and for which steps and target.
    pub fuse: fuse::FuseOptions,
    /// What fusion did, if it ran.
    pub report: fuse::Report,
}

/// A rewrite of a whole module.
pub struct Pass {
    /// Its name in pipelines and for `--dump-after`.
    pub name: &'static str,
    /// What it does.
    pub doc: &'static str,
    /// Runs it; an error says what it could not handle.
    pub run: fn(&Module, &mut Context<'_>) -> Result<Module, String>,
}

/// Every pass there is.
pub static PASSES: &[Pass] =
    &[rings::PASS, canonicalise::PASS, pack::PASS, fuse::PASS, pick::GREEDY];
