//! Reads specs and Hugging Face checkpoints.

pub mod checkpoint;
mod mmap;
pub mod safetensors;
pub mod source;
