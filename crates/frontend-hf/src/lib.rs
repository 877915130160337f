//! Reads specs and Hugging Face checkpoints.
