//! Executes plans.

mod check;
pub mod cpu;
pub mod cuda;
mod engine;
mod error;
mod kv;
mod logprobs;
mod noise;
mod observe;
mod plan_check;
mod sampler;
mod sources;
mod step;
mod target;
mod weights;

pub use check::KernelVerdict;
pub use engine::{
    Batching, Engine, EngineError, EngineLimits, EngineOptions, Event, FinishReason, KvMode,
    OptionsError, Policy, Request, RequestId, State, Stats,
};
pub use error::{ExecError, LoadError, TensorProblem};
pub use kv::BlockPool;
pub use logprobs::Logprobs;
pub use observe::{Observed, Observer};
pub use sampler::{Choice, Sampler, SamplingError, SamplingParams, Seen, argmax};
pub use sources::{CheckpointWeights, RandomWeights};
pub use step::{StepInputs, StepOutput};
pub use target::{
    Buffer, Cpu, Cuda, Executor, HostMemory, OnTarget, PlanExecutor, Target, Ticket, TunedProduct,
};
pub use weights::{Bytes, TensorBytes, WeightSource};
