#![doc = include_str!("../README.md")]

mod cache_size;
mod capacity;
mod defaults;
mod embedder;
mod error;
mod frontend;
mod generator;
#[cfg(feature = "hub")]
mod hub;
mod load;
mod machine;
mod options;
mod plan_file;
mod prefill;
mod progress;
mod read_ahead;
#[cfg(feature = "cli")]
mod sampling;
pub mod tune;

pub use cache_size::CacheSize;
pub use capacity::Capacity;
pub use defaults::{DefaultsError, GenerationDefaults};
pub use embedder::Embedder;
pub use error::{Error, PlanFileError};
pub use frontend::Frontend;
pub use generator::{Completion, Generator, Piece, Stream};
pub use load::{Loader, block_bytes, engine_limits};
pub use machine::{CPU, Machine};
pub use options::{
    CacheOptions, CompileOptions, DeviceId, DeviceIdError, LoraOptions, ModelOptions, Needs,
    RunOptions, check_data, name_on_hub,
};
#[cfg(feature = "cli")]
pub use options::{PASS_OPTIONS, named};
pub use prefill::prefill;
pub use progress::{Progress, Stage};
#[cfg(feature = "cli")]
pub use sampling::SamplingFlags;

pub use infernum_codegen as codegen;
pub use infernum_frontend_hf as frontend_hf;
pub use infernum_frontend_hf::chat::{ChatTemplate, Message};
pub use infernum_frontend_hf::dialect::{Dialect, Parser, Part, Tools};
pub use infernum_frontend_hf::tokenizer::{TextStream, Tokenizer};
pub use infernum_frontend_hf::{Model, ModelFiles};
pub use infernum_grammar::{Grammar, GrammarError, Grammars, Wanted};
#[cfg(feature = "hub")]
pub use infernum_hub::HubError;
pub use infernum_ir as ir;
pub use infernum_passes as passes;
pub use infernum_runtime as runtime;
pub use infernum_runtime::{
    Engine, EngineOptions, Event, FinishReason, Logprobs, PlanExecutor, Request, RequestId,
    SamplingParams,
};
