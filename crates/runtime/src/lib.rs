//! Executes plans.

pub mod cpu;
mod engine;
mod error;
mod kv;
mod sampler;
mod sources;
mod step;
mod target;
mod weights;

pub use engine::{Engine, EngineError, EngineLimits, Event, FinishReason, Request, RequestId};
pub use error::{ExecError, LoadError, TensorProblem};
pub use kv::BlockPool;
pub use sampler::{Sampler, SamplingError, SamplingParams, argmax};
pub use sources::{CheckpointWeights, RandomWeights};
pub use step::{StepInputs, StepOutput};
pub use target::{Buffer, Cpu, Cuda, Executor, HostMemory, Target, Ticket};
pub use weights::{Bytes, TensorBytes, WeightSource};
