//! What goes into a step: memory for those that run, room for those that wait, and whose turn it is.

use infernum_ir::Dims;

use super::{Batching, Engine, EngineError, Event, KvMode, Planned, Policy};
use crate::exec::Executor;

/// A sequence that gave its memory up so often gives it up no more before others.
const PREEMPTIONS: u32 = 2;

impl<E: Executor> Engine<E> {
    /// Those that were passed over for too long go first from now on.
    pub(super) fn promote(&mut self) {
        let (now, patience) = (self.stats.steps, self.options.patience);
        let late = |slot: &usize| {
            let s = &self.sequences[*slot];
            !s.urgent && now.saturating_sub(s.served) > patience
        };
        let late: Vec<usize> = self.waiting.values().copied().filter(late).collect();
        for slot in late {
            self.waiting.remove(&self.rank(&self.sequences[slot]));
            self.sequences[slot].urgent = true;
            self.waiting.insert(self.rank(&self.sequences[slot]), slot);
        }
    }

    /// Gives all that run the blocks for their next rows; false, giving none, if there are too few.
    pub(super) fn reserve(&mut self) -> bool {
        let missing = |slot: &usize| self.groups.missing(&self.pool, &self.sequences[*slot]);
        if self.running.iter().map(missing).sum::<usize>() > self.pool.free() {
            return false;
        }
        for slot in &self.running {
            let grown = self.groups.grow(&mut self.pool, &mut self.sequences[*slot]);
            assert!(grown, "the sum fitted");
        }
        true
    }

    /// As [`Engine::reserve`]; those that come last give their memory to those before them. Nothing
    /// may be under way.
    pub(super) fn reserve_by_preempting(&mut self) {
        let mut order = std::mem::take(&mut self.order);
        order.clear();
        order.extend_from_slice(&self.running);
        order.sort_unstable_by_key(|slot| self.rank(&self.sequences[*slot]));
        let mut at = 0;
        while at < order.len() {
            if self.groups.grow(&mut self.pool, &mut self.sequences[order[at]]) {
                at += 1;
            } else if let Some(last) = order.pop() {
                self.preempt(last);
            }
        }
        self.order = order;
    }

    fn preempt(&mut self, slot: usize) {
        let s = &mut self.sequences[slot];
        s.release(&mut self.pool);
        s.running = false;
        s.preemptions += 1;
        s.urgent |= s.preemptions >= PREEMPTIONS;
        self.running.retain(|other| *other != slot);
        let rank = self.rank(&self.sequences[slot]);
        self.waiting.insert(rank, slot);
        self.stats.preemptions += 1;
    }

    /// Lets those in that wait, in order, as long as memory and the options allow. None goes past one
    /// that does not fit.
    pub(super) fn admit(&mut self, events: &mut Vec<Event>) {
        let most = match (self.options.batching, self.options.max_running) {
            (Batching::None, _) => 1,
            (_, 0) => self.limits.step.seqs as usize,
            (_, most) => most,
        };
        if self.options.batching == Batching::Static && !self.running.is_empty() {
            return;
        }
        while self.running.len() < most {
            let Some((&rank, &slot)) = self.waiting.first_key_value() else { return };
            let Some(found) = self.take_memory(slot) else { return };
            self.waiting.remove(&rank);
            self.running.push(slot);
            let s = &mut self.sequences[slot];
            s.running = true;
            if !std::mem::replace(&mut s.started, true) {
                events.push(Event::Started(s.id, found));
            }
            if self.options.prefix_cache {
                self.stats.prefix_queries += s.tokens.len() as u64;
                self.stats.prefix_hits += found as u64;
            }
        }
    }

    /// Gives a sequence the blocks of all its tokens, shared ones first: how many tokens those hold.
    /// `None`, changing nothing, unless each that runs could have one more block of each group, too.
    fn take_memory(&mut self, slot: usize) -> Option<usize> {
        self.share(slot);
        let grows = self.options.kv != KvMode::Contiguous;
        let room = if grows { self.room() } else { 0 };
        let s = &mut self.sequences[slot];
        let found = s.computed;
        if self.groups.missing(&self.pool, s) + room > self.pool.free() {
            s.release(&mut self.pool);
            return None;
        }
        self.groups.grow(&mut self.pool, s).then_some(found)
    }

    /// A block for each group of each that runs.
    fn room(&self) -> usize {
        self.running.len() * self.groups.kinds().len()
    }

    /// Takes what the cache has of a sequence's next rows.
    fn share(&mut self, slot: usize) {
        let s = &mut self.sequences[slot];
        if self.options.prefix_cache && !s.tells_prompt() {
            self.groups.share(&mut self.pool, s);
        }
    }

    /// Fills the inputs with what each has to compute, by turns, as far as the step goes; false if
    /// there is nothing to compute.
    pub(super) fn fill(&mut self) -> Result<bool, EngineError> {
        self.inputs.clear();
        self.next.planned = std::mem::take(&mut self.spare);
        self.next.planned.clear();
        self.next.step = self.stats.steps + 1;
        let mut order = std::mem::take(&mut self.order);
        order.clear();
        order.extend_from_slice(&self.running);
        order.sort_unstable_by_key(|slot| self.turn(*slot));
        let mut left = self.limits.step;
        let decodes = order.iter().filter(|slot| self.sequences[**slot].decodes()).count();
        let kept_free = if self.options.policy == Policy::PrefillFirst { 0 } else { decodes };
        let mut prompts = self.limits.chunk.min((left.t as usize).saturating_sub(kept_free));
        for (at, &slot) in order.iter().enumerate() {
            if left.t == 0 || left.seqs == 0 {
                break;
            }
            self.share(slot);
            let s = &self.sequences[slot];
            let most = match (s.decodes(), self.is_late(slot)) {
                (true, _) => 1,
                // It waited too long for others' tokens to be kept free.
                (false, true) => self.limits.chunk,
                (false, false) => prompts,
            };
            // One row of output is for each of those that come after.
            let others = (order.len() - at - 1).min(left.seqs as usize - 1);
            let outputs = (left.b as usize).saturating_sub(others).max(1);
            let new = self.plan(slot, (most, outputs), &mut left);
            if !self.sequences[slot].decodes() {
                prompts = prompts.saturating_sub(new);
            }
        }
        self.order = order;
        let place = |planned: &Planned| (!planned.generated, planned.adapter);
        if !self.next.planned.is_sorted_by_key(place) {
            self.next.planned.sort_by_key(place);
        }
        for at in 0..self.next.planned.len() {
            self.push(at)?;
        }
        Ok(!self.next.planned.is_empty())
    }

    /// Plans up to `most` of a sequence's rows, with so many rows of output at most: how many.
    fn plan(&mut self, slot: usize, (most, outputs): (usize, usize), left: &mut Dims) -> usize {
        let s = &mut self.sequences[slot];
        let (id, wanted) = (s.id, s.wanted(&self.limits, self.defers_picks).min(most));
        let wanted = wanted.min(self.groups.room(s)).min(self.groups.uncut(s, s.submitted));
        if wanted > 0 {
            s.sampler.reach(s.length() as u64);
        }
        let (past, outputs) = (s.submitted, outputs.min(left.b as usize));
        // Of a prompt of which all is told, each row yields whose next token has not been told.
        let silent = if s.tells_prompt() { (s.told - 1).saturating_sub(past) } else { wanted };
        let mut new = fitting_chunk(wanted.min(silent + outputs), past, left);
        if self.executor.takes_whole() && past + new < s.length() {
            new = 0; // another step has room for all of it
        }
        if new > 0 && outputs == 0 && past + new == s.length() {
            new -= 1; // the last row yields the next token
        }
        let deferred = s.defers() && past + new == s.length();
        if new > 0 && past + new == s.length() && s.awaits() && !deferred {
            new -= 1; // nobody knows yet what that may be
            self.stats.awaited += 1;
        }
        if new == 0 {
            return 0;
        }
        let context = past + new;
        let yields = context == s.length();
        let rows = new.saturating_sub(silent).max(usize::from(yields));
        let (generated, truncations, output) = (s.decodes(), s.truncations, 0);
        let adapter = s.request.adapter.and_then(|id| self.adapters.find(id));
        let planned = Planned {
            slot,
            id,
            past,
            context,
            truncations,
            generated,
            adapter,
            rows,
            output,
            yields,
            deferred,
        };
        self.next.planned.push(planned);
        left.t -= new as u64;
        left.seqs -= 1;
        left.b -= rows as u64;
        left.s -= context as u64;
        left.pairs -= (new * context) as u64;
        new
    }

    /// Puts what was planned into the step's inputs.
    fn push(&mut self, at: usize) -> Result<(), EngineError> {
        let (samples, spare) = (self.executor.samples(), self.room());
        let generates = self.executor.task().generates();
        let (planned, inputs) = (&mut self.next.planned[at], &mut self.inputs);
        let Planned { slot, past, context, generated, adapter, rows, deferred, .. } = *planned;
        let s = &mut self.sequences[slot];
        self.groups.leave_snapshots(&mut self.pool, s, past, spare);
        let held = self.groups.rows(s, past);
        if !generated {
            inputs.begin_prompts();
        }
        let fed = s.coming.filter(|_| past == s.tokens.len());
        if let Some((_, row)) = fed {
            inputs.push_fed(row, context, held)?;
        } else {
            inputs.push_rows(&s.tokens[past..context], context, held)?;
        }
        s.request.second.into_iter().for_each(|row| inputs.set_second(row));
        adapter.into_iter().for_each(|slot| inputs.set_adapter(slot));
        inputs.yield_rows(rows)?;
        planned.output = inputs.last_outputs().start;
        if planned.yields && !generates {
            inputs.ask_logits();
        }
        if deferred {
            inputs.defer_picks();
            return Ok(());
        }
        for (i, output) in inputs.last_outputs().enumerate().filter(|_| samples) {
            let row_context = context - rows + i + 1;
            inputs.set_row_pick(output, &s.pick(row_context, fed.is_some()));
        }
        Ok(())
    }

    /// The smaller, the earlier its turn.
    fn turn(&self, slot: usize) -> (bool, u64, super::Rank) {
        let s = &self.sequences[slot];
        let by_phase = match (self.options.policy, s.decodes()) {
            (Policy::Fcfs | Policy::Priority, _) | (Policy::PrefillFirst, false) => 0,
            (Policy::PrefillFirst, true) => 1,
            (Policy::DecodeRoundRobin, true) => s.served,
            (Policy::DecodeRoundRobin, false) => u64::MAX,
        };
        (!self.is_late(slot), by_phase, self.rank(s))
    }

    /// Whether a sequence that runs was passed over for too long.
    fn is_late(&self, slot: usize) -> bool {
        self.stats.steps.saturating_sub(self.sequences[slot].served) > self.options.patience
    }
}

/// Tokens of the longest sequence that a step computes whole.
pub(super) fn longest_whole(step: &Dims) -> usize {
    fitting_chunk(usize::MAX, 0, step)
}

/// The most of `wanted` tokens, after `past` cached ones, that fit what is left of a step.
pub(super) fn fitting_chunk(wanted: usize, past: usize, left: &Dims) -> usize {
    if left.seqs == 0 {
        return 0;
    }
    let (t, s, pairs) = (left.t as usize, left.s as usize, left.pairs as usize);
    let mut new = wanted.min(t).min(s.saturating_sub(past));
    // new * (past + new) <= pairs: start from the real root and correct for rounding.
    if new * (past + new) > pairs {
        let root =
            ((past as f64).mul_add(past as f64, 4.0 * pairs as f64).sqrt() - past as f64) / 2.0;
        new = new.min(root as usize + 1);
        while new > 0 && new * (past + new) > pairs {
            new -= 1;
        }
    }
    new
}
