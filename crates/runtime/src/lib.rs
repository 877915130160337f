//! Executes plans.
//!
//! From the bottom up: what picks a token (`sampling`), what all executors agree on (`exec`), the
//! executors ([`cpu`], [`cuda`]) and the [engine](Engine) that drives one, neither of which knows the
//! other, and the [checks](check) of kernels, which know the executors.

pub mod check;
pub mod cpu;
pub mod cuda;
mod engine;
mod exec;
mod sampling;

pub use check::KernelVerdict;
pub use engine::{
    AdapterId, Allowed, Batching, BlockPool, Constraint, Cursor, Engine, EngineError, EngineLimits,
    EngineOptions, Event, FinishReason, KvMode, Next, OptionsError, Policy, Request, RequestId,
    State, Stats,
};
pub use exec::groups::{longest_sequence, most_blocks, tables};
pub use exec::{
    AdapterBanks, AdapterFault, AdapterWeights, Bytes, CheckpointWeights, ExecError, Executor,
    GroupKind, GroupRows, LoadError, LogitRows, Observed, Observer, PickedRows, PlanExecutor,
    RandomWeights, SequenceSteps, StepInputs, StepOutput, TensorBytes, TensorProblem, Ticket,
    TunedProduct, WeightSource,
};
pub use infernum_ir::picking::Edits;
pub use sampling::{
    Logprobs, MOST_TOLD, Number, Range, Sampler, SamplingError, SamplingOption, SamplingParams,
    SeenToken, Tell, TokenPick, argmax,
};
