//! Reads specs and Hugging Face checkpoints.

pub mod lower;
pub mod spec;
