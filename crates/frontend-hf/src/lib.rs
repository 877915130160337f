//! Reads specs and checkpoints: Hugging Face's folders, and GGUF files.

mod binding;
pub mod chat;
pub mod checkpoint;
pub mod config;
pub mod dialect;
pub mod gguf;
pub mod lower;
mod mmap;
mod model;
mod modules;
mod names;
mod near;
pub mod peft;
mod pyjson;
mod pyrepr;
pub mod safetensors;
mod save;
pub mod source;
pub mod spec;
pub mod tokenizer;

pub use checkpoint::{Checkpoint, CheckpointError, TensorLocation, TensorView};
pub use config::Config;
pub use model::{LowerOptions, Model, ModelError, OWN_METHOD, matches};
pub use names::OtherNames;
pub use near::{Near, Reading, nearest_families};
pub use source::{Bytes, ModelFiles};
pub use spec::demo;
