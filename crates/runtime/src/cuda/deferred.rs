//! Steps of which it is said only later how tokens are picked: what comes before is launched at once, so that the GPU
//! computes while the host works out what may come.

use std::cmp::Ordering;
use std::ops::Range;

use infernum_codegen::{Arg, Launch, Plan};
use infernum_ir::StepInput;

use super::exec::{Core, CudaExecutor};
use super::parts::PartDims;
use crate::exec::{ExecError, StepInputs, Ticket};

/// Which launches of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Launches {
    All,
    /// Those before the first that reads how tokens are picked.
    BeforePicks,
    /// That one and those that follow.
    FromPicks,
}

/// A step whose first launches are under way.
#[derive(Debug)]
pub(super) struct Unpicked {
    schedule: usize,
    dims: PartDims,
}

impl Unpicked {
    pub(super) fn new(schedule: usize, dims: PartDims) -> Unpicked {
        Unpicked { schedule, dims }
    }
}

impl Launches {
    /// Those that are launched when a step is submitted.
    pub(super) fn submitted(inputs: &StepInputs) -> Launches {
        if inputs.defers_picks() { Launches::BeforePicks } else { Launches::All }
    }

    /// Of a call's launches, which are `all`: `picks` is where the first that reads picks is, [as found](first_pick).
    pub(super) fn of_call(self, picks: (usize, usize), index: usize, all: usize) -> Range<usize> {
        let before = match index.cmp(&picks.0) {
            Ordering::Less => all,
            Ordering::Equal => picks.1,
            Ordering::Greater => 0,
        };
        match self {
            Launches::All => 0..all,
            Launches::BeforePicks => 0..before,
            Launches::FromPicks => before..all,
        }
    }
}

/// The first launch of a schedule that reads how tokens are picked: its call, and its place there. Behind all if none does.
fn first_pick(plan: &Plan, schedule: usize) -> (usize, usize) {
    let calls = &plan.schedules[schedule].calls;
    let found = calls.iter().enumerate().find_map(|(index, call)| {
        let launches = &plan.programs[call.program as usize].launches;
        launches.iter().position(reads_picks).map(|at| (index, at))
    });
    found.unwrap_or((calls.len(), 0))
}

fn reads_picks(launch: &Launch) -> bool {
    launch.operands.iter().flatten().any(|v| v.arg == Arg::Step(StepInput::Picks))
}

impl Core {
    /// Launches those of all calls of a schedule.
    pub(super) fn calls(
        &mut self,
        schedule: usize,
        dims: &PartDims,
        launches: Launches,
    ) -> Result<(), ExecError> {
        // Every step comes here that is not recorded: what is looked for, is once.
        let picks = match launches {
            Launches::All => (0, 0),
            _ => first_pick(&self.plan, schedule),
        };
        let mut first = true;
        for index in 0..self.plan.schedules[schedule].calls.len() {
            let range = launches.of_call(picks, index, self.launches_of(schedule, index));
            self.call(schedule, index, dims, range.clone(), first)?;
            first &= range.is_empty();
        }
        Ok(())
    }

    /// Refuses sets of tokens that do not hold all there are.
    pub(super) fn check_picks(&self, inputs: &StepInputs) -> Result<(), ExecError> {
        let columns = self.plan.outputs().first().and_then(|o| o.ty.last_const()).unwrap_or(0);
        if inputs.step().picks.sets_hold(columns as usize) {
            return Ok(());
        }
        let message = format!("a set of allowed tokens has fewer than {columns} bits");
        Err(ExecError::Inputs(message))
    }

    /// How many launches a call of a schedule has.
    pub(super) fn launches_of(&self, schedule: usize, index: usize) -> usize {
        let call = &self.plan.schedules[schedule].calls[index];
        self.plan.programs[call.program as usize].launches.len()
    }
}

impl CudaExecutor {
    /// Forgets a step that never came to its picks: the one before it failed. Its inputs may be on their way yet.
    pub(super) fn forget_unpicked(&mut self) -> Result<(), ExecError> {
        if self.unpicked.take().is_some() {
            self.core.stream.synchronize()?;
        }
        Ok(())
    }

    /// Brings how tokens are picked to the GPU, and launches what is left of the step.
    pub(super) fn pick_now(
        &mut self,
        ticket: Ticket,
        inputs: &StepInputs,
    ) -> Result<(), ExecError> {
        if ticket.0 != self.ticket {
            return Err(ExecError::Ticket);
        }
        let Unpicked { schedule, dims } = self.unpicked.take().ok_or(ExecError::Ticket)?;
        let core = &mut self.core;
        core.gpu.bind()?;
        core.check_picks(inputs)?;
        let turn = &mut core.turns[ticket.0 as usize % 2];
        let lists = turn.lists.stage(inputs, &core.gpu, &core.stream)?;
        let staged = turn.staged.bytes();
        let copies = core.layout.write_picks(inputs, lists, staged, turn.picks.bytes_mut());
        for (at, bytes) in copies {
            core.stream.to_device(at, &turn.picks.bytes()[bytes])?;
        }
        core.calls(schedule, &dims, Launches::FromPicks)?;
        self.finish(schedule, &dims.all, inputs)
    }
}
