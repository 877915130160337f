//! Turns requests into steps: continuous batching over a paged KV cache (Orca, Yu et al. 2022; vLLM,
//! Kwon et al. 2023) with chunked prefill (Sarathi-Serve, Agrawal et al. 2024).
//!
//! The engine has no clock, no threads and no I/O: what comes of a queue and a seed is always the
//! same. A step is: see that all have the memory they need ([`schedule`]), admit who waits, fill the
//! inputs, submit, and settle what came of the step *before*, while the executor computes this one.

mod adapters;
mod constraint;
mod drive;
mod held;
mod kv;
mod memory;
mod options;
mod prefixes;
mod request;
mod schedule;
mod sequence;
mod settle;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

pub use constraint::{Allowed, Constraint, Cursor, Next};
use infernum_ir::Task;
pub use kv::BlockPool;
pub use options::{Batching, EngineLimits, EngineOptions, KvMode, OptionsError, Policy, Stats};
pub use request::{AdapterId, EngineError, Event, FinishReason, Request, RequestId, State};
use slab::Slab;

use self::adapters::Slots;
use self::memory::Groups;
use self::schedule::longest_whole;
use self::sequence::{Rank, Sequence};
use crate::exec::{Executor, GroupKind, StepInputs, Ticket};
use crate::sampling::MOST_TOLD;

/// Runs requests on an executor.
pub struct Engine<E: Executor> {
    executor: E,
    limits: EngineLimits,
    options: EngineOptions,
    pool: BlockPool,
    groups: Groups,
    adapters: Slots,
    sequences: Slab<Sequence>,
    /// Those with memory, and those without.
    running: Vec<usize>,
    waiting: BTreeMap<Rank, usize>,
    inputs: StepInputs,
    /// The step being filled, and the one under way.
    next: Flight,
    flight: Option<Flight>,
    /// Kept for its memory.
    spare: Vec<Planned>,
    order: Vec<usize>,
    row: Vec<f32>,
    /// Whether rows are computed before it is known what may come after them.
    defers_picks: bool,
    next_id: u64,
    stats: Stats,
    /// Of the last step.
    mask_times: Vec<Duration>,
}

/// A step.
#[derive(Debug, Default)]
struct Flight {
    step: u64,
    ticket: Option<Ticket>,
    /// One for each row.
    planned: Vec<Planned>,
}

/// A part that a sequence has in a step.
#[derive(Clone, Copy, Debug)]
struct Planned {
    slot: usize,
    id: RequestId,
    /// Rows in the cache before, and then.
    past: usize,
    context: usize,
    /// [`Sequence::truncations`] then.
    truncations: u32,
    /// Whether its row was generated. Those rows come first in a step: executors may compute them another way.
    generated: bool,
    /// The slot of its adapter. Rows of one stand together: kernels then read it once.
    adapter: Option<usize>,
    /// How many of its last rows yield a row of output, and the first of these.
    rows: usize,
    output: usize,
    /// Whether the last row yields the next token.
    yields: bool,
    /// Whether it is said how that is picked once the step is submitted.
    deferred: bool,
}

impl Planned {
    /// The row of output of its last row, if that yields.
    fn last_output(&self) -> usize {
        (self.output + self.rows).saturating_sub(1)
    }
}

impl<E: Executor> Engine<E> {
    /// An engine over an executor whose plan gives a row of logits, or a token, for each sequence.
    pub fn new(
        executor: E,
        mut limits: EngineLimits,
        mut options: EngineOptions,
    ) -> Result<Engine<E>, OptionsError> {
        options.check()?;
        if executor.takes_whole() {
            // Nothing of a sequence can be cut off, neither by a chunk nor as a prefix.
            limits.chunk = limits.step.t as usize;
            limits.max_length = limits.max_length.min(longest_whole(&limits.step));
            options.prefix_cache = false;
        }
        let run = match options.kv {
            KvMode::Contiguous => limits.max_length.div_ceil(limits.block_size),
            KvMode::Paged | KvMode::Off => 1,
        };
        let mut kinds = executor.groups();
        let inputs = StepInputs::asking(limits.block_size).with_groups(&kinds);
        if options.kv == KvMode::Contiguous {
            // What was taken up front is not given back.
            kinds.iter_mut().filter(|k| matches!(k, GroupKind::Ring { .. })).for_each(|kind| {
                *kind = GroupKind::Paged;
            });
        }
        let widths: Vec<usize> = kinds.iter().map(|k| k.width()).collect();
        let pool = BlockPool::for_groups(limits.blocks, limits.block_size, run, &widths);
        let chunk = limits.chunk.min(limits.step.t as usize);
        let mut groups = Groups::new(kinds, limits.block_size, chunk);
        if !options.prefix_cache {
            groups.snapshot_every = 0;
        }
        let executor_slots = executor.adapter_slots();
        // A state of fixed size has no row that could be taken out of a step again.
        let defers_picks = options.ahead
            && executor.feeds()
            && executor.samples()
            && executor.defers_picks()
            && !groups.has_slots();
        Ok(Engine {
            defers_picks,
            executor,
            inputs,
            adapters: Slots::new(executor_slots),
            groups,
            sequences: Slab::new(),
            running: Vec::new(),
            waiting: BTreeMap::new(),
            next: Flight::default(),
            flight: None,
            spare: Vec::new(),
            order: Vec::new(),
            row: Vec::new(),
            next_id: 0,
            mask_times: Vec::new(),
            stats: Stats { total_blocks: pool.total(), ..Stats::default() },
            pool,
            limits,
            options,
        })
    }

    /// Takes a request; it waits until a step begins it.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, EngineError> {
        self.check(&request)?;
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let mut sequence = Sequence::new(id, request, self.groups.none(), self.stats.steps);
        sequence.replays = self.executor.is_reproducible();
        let rank = self.rank(&sequence);
        let slot = self.sequences.insert(sequence);
        self.waiting.insert(rank, slot);
        Ok(id)
    }

    /// Whether a request would be taken.
    pub fn check(&self, request: &Request) -> Result<(), EngineError> {
        let (tokens, limit) = (request.tokens.len(), self.limits.max_length);
        if tokens == 0 {
            return Err(EngineError::EmptyPrompt);
        }
        if tokens > limit {
            return Err(EngineError::TooLong { tokens, limit });
        }
        let vocab = self.limits.vocab;
        if let Some(&token) = request.tokens.iter().find(|t| **t as usize >= vocab) {
            return Err(EngineError::Token { token, vocab });
        }
        let generates = request.max_tokens > 0 || request.prompt_logprobs.is_some();
        let output = match self.executor.task() {
            Task::Generate => None,
            Task::Embed => Some("a vector"),
            Task::Score => Some("scores"),
        };
        if let Some(output) = output.filter(|_| generates) {
            return Err(EngineError::NoTokens { output });
        }
        if request.adapter.is_some_and(|id| !self.adapters.takes(id)) {
            return Err(EngineError::NoAdapter);
        }
        request.sampling.check()?;
        let told = request.logprobs.max(request.prompt_logprobs);
        if let Some(found) = told.filter(|n| *n > MOST_TOLD) {
            return Err(EngineError::Logprobs { found });
        }
        let bans = request.sampling.min_tokens > 0 && !request.stop.is_empty();
        let edited = bans || !request.bias.is_empty() || request.constraint.is_some();
        let sampled = !request.sampling.is_greedy() || edited || told.is_some();
        if self.executor.yields_tokens() && sampled {
            return Err(EngineError::GreedyOnly);
        }
        let tokens = tokens.saturating_add(request.max_tokens).min(limit);
        let (blocks, block_size) = (self.pool.total(), self.pool.block_size());
        if self.groups.most(&self.pool, tokens) > blocks {
            return Err(EngineError::CacheTooSmall { tokens, blocks, block_size });
        }
        Ok(())
    }

    /// Ends a request without an event, freeing its memory at once; unknown ones are ignored.
    pub fn cancel(&mut self, id: RequestId) {
        let found = self.sequences.iter().find(|(_, s)| s.id == id);
        if let Some(slot) = found.map(|(slot, _)| slot) {
            self.remove(slot);
        }
    }

    /// Takes the cache's rows after the first `rows` back from a request; those that it needs are computed again.
    /// What steps under way yield still counts. Requests that are unknown or have no more rows stay as they are.
    pub fn truncate(&mut self, id: RequestId, rows: usize) {
        let found = self.sequences.iter_mut().find(|(_, s)| s.id == id && s.running);
        if let Some((_, s)) = found {
            self.groups.truncate(&mut self.pool, s, rows);
        }
    }

    /// Where a request stands; `None` if it has ended.
    pub fn state(&self, id: RequestId) -> Option<State> {
        self.sequences.iter().find(|(_, s)| s.id == id).map(|(_, s)| s.state())
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty() && self.flight.is_none()
    }

    /// Free and all blocks of the cache. Free are those that hold what nobody uses, too.
    pub fn blocks(&self) -> (usize, usize) {
        (self.pool.free(), self.pool.total())
    }

    /// How it stands.
    pub fn stats(&self) -> Stats {
        Stats {
            waiting: self.waiting.len(),
            running: self.running.len(),
            used_blocks: self.pool.total() - self.pool.free(),
            ..self.stats
        }
    }

    /// What it took to work out what may come next, of each text whose step this was: of the last step.
    pub fn mask_times(&self) -> &[Duration] {
        &self.mask_times
    }

    /// How it schedules.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// How much it may hold.
    pub fn limits(&self) -> &EngineLimits {
        &self.limits
    }

    /// The executor.
    pub fn executor(&self) -> &E {
        &self.executor
    }

    /// The executor, without the requests.
    pub fn into_executor(self) -> E {
        self.executor
    }

    /// Submits one step and says what came of it, or, where steps are scheduled ahead, of the one
    /// before. On an error the requests that had a part in the steps under way end as failed; all
    /// others are as they were.
    pub fn step(&mut self, events: &mut Vec<Event>) -> Result<(), EngineError> {
        self.mask_times.clear();
        self.promote();
        if self.must_know() {
            self.settle(events)?;
        }
        if !self.reserve() {
            // What is under way may end some; else some give their memory to others.
            self.settle(events)?;
            self.reserve_by_preempting();
        }
        self.admit(events);
        self.attend(false, events);
        if !self.fill()? {
            if self.flight.is_none() {
                self.attend(true, events);
            }
            return self.settle(events);
        }
        let before = self.submit_step(events)?;
        if let Some(before) = before {
            self.settle_step(before, events)?;
        }
        self.pick_deferred(events)?;
        if !self.options.ahead || !self.executor.feeds() {
            self.settle(events)?;
        }
        Ok(())
    }

    /// Submits what was filled; the step before, if it is under way.
    fn submit_step(&mut self, events: &mut Vec<Event>) -> Result<Option<Flight>, EngineError> {
        let flight = std::mem::take(&mut self.next);
        match self.executor.submit(&self.inputs) {
            Ok(ticket) => {
                self.stats.steps += 1;
                self.depart(&flight);
                Ok(self.flight.replace(Flight { ticket: Some(ticket), ..flight }))
            }
            Err(error) => {
                // What is under way is not to blame.
                self.fail(&flight, events);
                Err(error.into())
            }
        }
    }

    /// Notes what is under way.
    fn depart(&mut self, flight: &Flight) {
        for planned in &flight.planned {
            let sequence = &mut self.sequences[planned.slot];
            sequence.submitted = planned.context;
            sequence.served = flight.step;
            self.groups.depart(&mut self.pool, sequence);
            if planned.yields {
                sequence.coming = Some((flight.step, planned.last_output()));
            }
        }
    }

    fn rank(&self, sequence: &Sequence) -> Rank {
        let by_priority = self.options.policy == Policy::Priority && !sequence.urgent;
        (!sequence.urgent, if by_priority { sequence.request.priority } else { 0 }, sequence.id)
    }

    /// Takes a sequence out, wherever it is.
    fn remove(&mut self, slot: usize) {
        let rank = self.rank(&self.sequences[slot]);
        let mut sequence = self.sequences.remove(slot);
        sequence.release(&mut self.pool);
        if sequence.running {
            self.running.retain(|s| *s != slot);
        } else {
            self.waiting.remove(&rank);
        }
    }
}
