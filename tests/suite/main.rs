//! End-to-end tests: fixtures, filetests, mutations.

mod adapters;
mod batch;
mod encodings;
mod engine;
mod fused_numbers;
mod fusion;
mod gguf;
mod grammars;
mod ir_files;
mod ir_fixtures;
mod kv_dtype;
mod layouts;
mod memory;
mod mutations;
mod optimal;
mod parity;
mod plan_files;
mod rule_files;
mod sampling;
mod support;
mod vectors;
