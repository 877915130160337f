//! What can go wrong between a folder and a token.

use infernum_codegen::VERSION;
use infernum_codegen::compile::CompileError;
use infernum_codegen::cuda::{CacheError, CudaError, TunedVariantsError};
use infernum_frontend_hf::ModelError;
use infernum_frontend_hf::chat::ChatError;
use infernum_frontend_hf::config::ConfigError;
use infernum_frontend_hf::dialect::DialectError;
use infernum_frontend_hf::source::SourceError;
use infernum_frontend_hf::tokenizer::TokenizerError;
use infernum_grammar::GrammarError;
use infernum_passes::PipelineError;
use infernum_passes::data::DataError;
use infernum_runtime::cuda::GpuError;
use infernum_runtime::{EngineError, ExecError, LoadError, OptionsError, SamplingError};

use crate::defaults::DefaultsError;

/// A model could not be opened, compiled, loaded or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "named after what failed; the fields are named in the messages")]
pub enum Error {
    #[error(transparent)]
    Source(#[from] SourceError),
    #[cfg(feature = "hub")]
    #[error("`{name}` is neither a folder nor a file; as a model of the hub: {error}")]
    Hub { name: String, error: infernum_hub::HubError },
    #[cfg(feature = "hub")]
    #[error(transparent)]
    NoFile(Box<crate::hub::NoFile>),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    #[error(transparent)]
    Chat(#[from] ChatError),
    #[error(transparent)]
    Defaults(#[from] DefaultsError),
    #[error("{message}")]
    NoTemplate { message: String },
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(
        "{verdict}\n(--allow-unchecked uses it all the same; `infernum check-rules` checks all)"
    )]
    Rule { verdict: String },
    #[error("there are no costs for {arch}: expected at least sm_75")]
    NoCosts { arch: String },
    #[error(transparent)]
    Compile(#[from] CompileError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Kernels(#[from] CacheError),
    #[error(transparent)]
    TunedVariants(#[from] TunedVariantsError),
    #[error("{path}: {source}; --data names a folder with models/, kernels/ or both")]
    DataFolder { path: String, source: std::io::Error },
    #[error(
        "{path}: holds neither models/ nor kernels/{hint}; --data names a folder with either or both"
    )]
    NoData { path: String, hint: String },
    #[error(
        "--encoding {encoding}: a checkpoint's weights are as they are stored; expected --random-weights or --config beside it"
    )]
    Encoding {
        /// What was asked for.
        encoding: String,
    },
    /// No weights.
    #[error("{0}; --random-weights does without")]
    NoWeights(Box<ModelError>),
    #[error("the GPU fails: {0}; --device cpu does without it")]
    FirstGpu(GpuError),
    #[error(transparent)]
    PlanFile(#[from] PlanFileError),
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error(
        "the KV cache of one sequence of {max_length} tokens takes {needed} MiB, and {left} of the GPU's \
         {total} MiB are left for it at --gpu-memory-utilization {part}: {used} MiB are taken by others, \
         {weights} MiB are weights, {activations} MiB activations; choose a shorter --max-length"
    )]
    NoRoom {
        max_length: u64,
        needed: u64,
        left: u64,
        total: u64,
        part: f64,
        used: u64,
        weights: u64,
        activations: u64,
    },
    #[error("{option}: expected 1 to {limit}, found {found}")]
    Adapters { option: &'static str, found: u64, limit: u64 },
    #[error("{what}: expected 1 to {most}, found {found}")]
    Capacity { what: &'static str, found: u64, most: u64 },
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Exec(#[from] ExecError),
    #[error(transparent)]
    EngineOptions(#[from] OptionsError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(
        "the model's logits are not numbers: a weight or a sum is NaN, or too large for --dtype"
    )]
    NoDistribution,
    #[error("the vector is not of numbers: a weight or a sum is NaN, or too large for --dtype")]
    NoNumbers,
    #[error(
        "{place}: generates text and gives no vectors; expected a checkpoint with a pooling (modules.json), or of an \
         architecture without a head"
    )]
    Generates { place: String },
    #[error(
        "the text could not be held to its grammar any further: what may come next is too complex"
    )]
    Unfollowed,
    #[error(transparent)]
    Dialect(#[from] DialectError),
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    #[error("there is no GPU to tune for; kernels of the CPU have no variants")]
    NothingToTune,
    #[error("the plan has no step of {tokens} sequence(s)")]
    NoStep { tokens: u64 },
    #[error("there is no folder to keep the tuned kernels' names in: set --kernel-cache, or HOME")]
    NoFolder,
    #[error("{path}: {source}")]
    Io { path: String, source: std::io::Error },
}

/// A plan that was written to a folder cannot be run.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum PlanFileError {
    #[error("{path}: {source}")]
    Io { path: String, source: std::io::Error },
    #[error("{path}: expected a plan of version {VERSION}: {message}; compile it again")]
    Json { path: String, message: String },
    #[error(
        "{path}: the plan calls `{op}`, which is neither ours nor in --data; expected the --data that it \
         was compiled with"
    )]
    UnknownOp { path: String, op: String },
    #[error("{path}: the plan is for {expected}, this machine has {found}; compile it for that")]
    Device { path: String, expected: String, found: String },
    #[error("{path}: the plan holds {expected}, wanted are {found}; compile it for those")]
    Size { path: String, expected: String, found: String },
    #[error(
        "{path}: the plan was compiled without --reproducible; compile it again with it, or leave it out here"
    )]
    NotReproducible { path: String },
}
