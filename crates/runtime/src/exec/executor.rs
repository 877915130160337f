//! What an executor is.

use std::time::Duration;

use infernum_codegen::Plan;
use infernum_ir::Task;
use serde::Serialize;

use super::{AdapterWeights, ExecError, GroupKind, Observer, PickedRows, StepInputs, StepOutput};

/// Names a submitted step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(pub(crate) u64);

/// Runs steps.
pub trait Executor {
    /// Starts a step. The inputs are copied: they may be changed as soon as this returns. The step
    /// before must have been waited for, unless the executor [feeds](Executor::feeds) tokens; the one
    /// before that, in any case.
    fn submit(&mut self, inputs: &StepInputs) -> Result<Ticket, ExecError>;

    /// Whether steps yield tokens, the greedy choice, instead of logits.
    fn yields_tokens(&self) -> bool {
        false
    }

    /// What the rows of steps are: of all but logits, the values themselves are wanted.
    fn task(&self) -> Task {
        Task::Generate
    }

    /// Whether steps compute sequences whole, each from its first token to its last.
    fn takes_whole(&self) -> bool {
        false
    }

    /// Whether it picks tokens as [`StepInputs::set_pick`] says.
    fn samples(&self) -> bool {
        false
    }

    /// Whether a step may be submitted while the one before it runs, and take tokens from it
    /// ([`StepInputs::push_fed`]).
    fn feeds(&self) -> bool {
        false
    }

    /// Whether a step may be submitted before it is known how its tokens are picked ([`StepInputs::defer_picks`]), which
    /// [`Executor::pick`] then says.
    fn defers_picks(&self) -> bool {
        false
    }

    /// Has the tokens of a step picked that was submitted last and [defers](StepInputs::defer_picks) that: `inputs` are
    /// that step's, with all picks. Before it is waited for, and before another is submitted.
    fn pick(&mut self, _: Ticket, _inputs: &StepInputs) -> Result<(), ExecError> {
        Err(ExecError::Ticket)
    }

    /// Whether a row's numbers are the same whatever other rows a step has, as long as it is a generated row
    /// ([`StepInputs::generated`]) each time that it is computed, or one of a prompt each time.
    fn is_reproducible(&self) -> bool {
        false
    }

    /// How many adapters it holds: [`StepInputs::set_adapter`] names one.
    fn adapter_slots(&self) -> usize {
        0
    }

    /// Puts an adapter into a slot, in place of what was there. No step under way or to come may use what was there before.
    fn set_adapter(&mut self, _slot: usize, _weights: &AdapterWeights) -> Result<(), ExecError> {
        Err(ExecError::adapter("this executor holds none"))
    }

    /// How its groups of layers keep their state; steps have what it needs of each group, in order.
    fn groups(&self) -> Vec<GroupKind> {
        vec![GroupKind::Paged]
    }

    /// Time that steps have taken so far in which the host had nothing to do but compute them or wait for
    /// them: the rest of a step's time is scheduling.
    fn computed(&self) -> Duration {
        Duration::ZERO
    }

    /// Waits for a step: that of the last ticket, or the one before where two are under way.
    fn wait(&mut self, ticket: Ticket) -> Result<&StepOutput, ExecError>;

    /// A step from beginning to end.
    fn run(&mut self, inputs: &StepInputs) -> Result<&StepOutput, ExecError> {
        let ticket = self.submit(inputs)?;
        self.wait(ticket)
    }
}

/// Runs the steps of one plan, and lets one look inside.
pub trait PlanExecutor: Executor {
    /// What it runs.
    fn plan(&self) -> &Plan;

    /// As [`Executor::submit`], showing what each call carries on.
    fn submit_observed(
        &mut self,
        inputs: &StepInputs,
        observer: &mut Observer<'_>,
    ) -> Result<Ticket, ExecError>;

    /// Runs a step, launch by launch, and tells which rows of weights it read by number; `None`, and no step, where
    /// that cannot be told.
    fn picked_rows(&mut self, _: &StepInputs) -> Result<Option<Vec<PickedRows>>, ExecError> {
        Ok(None)
    }

    /// Time spent in each op since the start, if it is measured; the longest first.
    fn profile(&self) -> Vec<(String, Duration)>;

    /// Has a library's algorithms compete for every product that is left to it, and runs the fastest
    /// from now on, which may differ from one process to the next. Before the first step: it writes
    /// over activations. About a second for 8 billion parameters.
    fn tune_products(&mut self) -> Result<Vec<TunedProduct>, ExecError> {
        Ok(Vec::new())
    }

    /// Blocks of its KV cache.
    fn kv_blocks(&self) -> usize;

    /// What it runs on, for people.
    fn describe(&self) -> String;
}

/// A product for which a library's algorithms competed.
#[derive(Clone, Debug, Serialize)]
pub struct TunedProduct {
    /// Rows of `x`, rows of `w`, and columns of both.
    pub shape: [u64; 3],
    /// Microseconds of the library's own choice.
    pub first_us: f64,
    /// Microseconds of what is run from now on.
    pub best_us: f64,
}

impl<E: Executor + ?Sized> Executor for Box<E> {
    fn submit(&mut self, inputs: &StepInputs) -> Result<Ticket, ExecError> {
        (**self).submit(inputs)
    }

    fn yields_tokens(&self) -> bool {
        (**self).yields_tokens()
    }

    fn task(&self) -> Task {
        (**self).task()
    }

    fn takes_whole(&self) -> bool {
        (**self).takes_whole()
    }

    fn samples(&self) -> bool {
        (**self).samples()
    }

    fn feeds(&self) -> bool {
        (**self).feeds()
    }

    fn defers_picks(&self) -> bool {
        (**self).defers_picks()
    }

    fn pick(&mut self, ticket: Ticket, inputs: &StepInputs) -> Result<(), ExecError> {
        (**self).pick(ticket, inputs)
    }

    fn is_reproducible(&self) -> bool {
        (**self).is_reproducible()
    }

    fn adapter_slots(&self) -> usize {
        (**self).adapter_slots()
    }

    fn set_adapter(&mut self, slot: usize, weights: &AdapterWeights) -> Result<(), ExecError> {
        (**self).set_adapter(slot, weights)
    }

    fn groups(&self) -> Vec<GroupKind> {
        (**self).groups()
    }

    fn computed(&self) -> Duration {
        (**self).computed()
    }

    fn wait(&mut self, ticket: Ticket) -> Result<&StepOutput, ExecError> {
        (**self).wait(ticket)
    }
}
