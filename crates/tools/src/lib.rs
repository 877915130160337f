//! What measures, tunes, checks and explains Infernum: clients of the library, as anybody's program would be.
//!
//! Each module is a command: `Args`, its command line, and `run`, which prints what it finds.

pub mod ablate;
pub mod bench;
pub mod bench_engine;
mod bench_serve;
pub mod check_encodings;
pub mod check_kernels;
pub mod check_reproducible;
pub mod check_rules;
pub mod check_templates;
pub mod compile;
pub mod diff;
pub mod encodings;
pub mod health;
mod http;
pub mod logits;
pub mod ops;
mod page;
pub mod perplexity;
mod process;
pub mod quantise;
pub mod report;
mod steps;
mod subject;
mod svg;
pub mod tokenize;
pub mod tune;
