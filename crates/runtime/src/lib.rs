//! Executes plans.

pub mod cpu;
mod error;
mod step;
mod target;
mod weights;

pub use error::{ExecError, LoadError, TensorProblem};
pub use step::{StepInputs, StepOutput};
pub use target::{Buffer, Cpu, Cuda, Executor, HostMemory, Target, Ticket};
pub use weights::{Bytes, TensorBytes, WeightSource};
