//! One file a command.

pub(crate) mod ablate;
pub(crate) mod bench;
pub(crate) mod bench_engine;
mod bench_serve;
pub(crate) mod check_kernels;
pub(crate) mod check_rules;
pub(crate) mod check_templates;
pub(crate) mod compile;
pub(crate) mod doctor;
pub(crate) mod families;
pub(crate) mod generate;
pub(crate) mod health;
pub(crate) mod logits;
pub(crate) mod tune;
