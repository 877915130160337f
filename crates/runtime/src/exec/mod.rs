//! What every executor and whoever drives one agree on: the inputs and the output of a step, the
//! traits, errors, and how a plan and its weights are read. It knows no target.

mod adapters;
pub(crate) mod cores;
mod damage;
pub(crate) mod elements;
mod error;
mod executor;
pub(crate) mod groups;
mod observe;
pub(crate) mod plan_check;
mod sequence;
mod sources;
mod step;
pub(crate) mod weights;

pub use adapters::{AdapterBanks, AdapterFault, AdapterWeights};
pub use error::{ExecError, GpuError, LoadError, TensorProblem};
pub use executor::{Executor, PlanExecutor, Ticket, TunedProduct};
pub use groups::{GroupKind, GroupRows};
pub use observe::{Observed, Observer, PickedRows};
pub use sequence::SequenceSteps;
pub use sources::{CheckpointWeights, RandomWeights};
pub use step::{LogitRows, StepInputs, StepOutput};
pub use weights::{Bytes, TensorBytes, WeightSource};
