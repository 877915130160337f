//! Reads specs and Hugging Face checkpoints.

pub mod chat;
pub mod checkpoint;
pub mod config;
mod mmap;
mod pyjson;
pub mod safetensors;
pub mod source;
pub mod tokenizer;

pub use checkpoint::{Checkpoint, TensorLocation, TensorView};
pub use config::Config;
pub use source::{Bytes, ModelFiles};
