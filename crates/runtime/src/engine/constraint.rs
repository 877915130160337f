//! Texts that may not be just any: what a request's tokens are held to, one after the other.
//!
//! The engine knows nothing of grammars. It asks what may come next, hands that to whoever picks, and tells which token
//! came. Working out what may come next is others' business, and depends on all tokens before. Where the executor lets
//! picks be [deferred](Executor::defers_picks), the next step computes a row meanwhile, and only its pick waits for
//! what may come: a row for which that is not known when all others are picked is taken out of the step, alone, and
//! computed once more. Elsewhere such a step is filled once the one before is settled, without the rows that wait.

use std::fmt::Debug;
use std::time::Duration;

use super::sequence::Sequence;
use super::{Engine, EngineError, Event, FinishReason, Planned};
use crate::exec::Executor;

/// What the tokens of a text are held to. Requests share it; each text has a [`Cursor`] of its own.
pub trait Constraint: Debug + Send + Sync {
    /// A cursor before the first token, which begins to work out what may come. Tokens that are certain are told as
    /// [forced](Next::forced) where `jumps`; else they are picked, as the only ones that may come. It must not block.
    fn begin(&self, jumps: bool) -> Box<dyn Cursor>;

    /// What it was written as, of which another process makes it again; `None` where nothing says so.
    fn written(&self) -> Option<String> {
        None
    }
}

/// Where a text stands in its constraint.
pub trait Cursor: Send {
    /// What may come next: told once after [`Constraint::begin`] and each [`Cursor::advance`]. `None` while that is being
    /// worked out, unless one is to `wait` for it; a moment may be waited in either case.
    fn next(&mut self, wait: bool) -> Option<Next>;

    /// Takes the token that was picked, and begins to work out what may come after it. It must not block.
    fn advance(&mut self, token: u32);
}

/// What may come next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Next {
    /// Tokens that come whatever the model says.
    pub forced: Vec<u32>,
    /// What may come after them.
    pub then: Allowed,
    /// How long it took to work that out, by whoever did.
    pub took: Duration,
}

/// What may come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Allowed {
    /// These tokens: a bit for each of a vocabulary, from the lowest of the first word on; none beyond the last word.
    Tokens(Vec<u32>),
    /// Nothing: the text is complete.
    Nothing,
    /// It cannot be worked out: the constraint is too complex here.
    Unknown,
}

impl<E: Executor> Engine<E> {
    /// Whether a step cannot be filled before the one under way is settled: what may come depends on its tokens.
    pub(super) fn must_know(&self) -> bool {
        let mut running = self.running.iter().map(|slot| &self.sequences[*slot]);
        !self.defers_picks && running.any(Sequence::defers)
    }

    /// Says of the step that was just submitted what its deferred picks are, now that the step before is settled.
    /// Rows whose next token is forced, or not known to be allowed yet, yield nothing.
    pub(super) fn pick_deferred(&mut self, events: &mut Vec<Event>) -> Result<(), EngineError> {
        let Some(mut flight) = self.flight.take() else { return Ok(()) };
        if !flight.planned.iter().any(|planned| planned.deferred) {
            self.flight = Some(flight);
            return Ok(());
        }
        for planned in flight.planned.iter_mut().filter(|planned| planned.deferred) {
            planned.yields = self.pick_later(planned, events);
        }
        let picked =
            flight.ticket.map_or(Ok(()), |ticket| self.executor.pick(ticket, &self.inputs));
        if let Err(error) = picked {
            self.fail(&flight, events);
            return Err(error.into());
        }
        self.flight = Some(flight);
        Ok(())
    }

    /// Puts a deferred pick into the step's inputs; false where the row yields nothing.
    fn pick_later(&mut self, planned: &Planned, events: &mut Vec<Event>) -> bool {
        let Some(s) = self.sequences.get_mut(planned.slot).filter(|s| s.id == planned.id) else {
            return false; // ended by the step before
        };
        let coming = s.coming.take();
        let Some(next) = s.cursor.as_mut().and_then(|cursor| cursor.next(false)) else {
            self.stats.awaited += 1;
            self.groups.truncate(&mut self.pool, s, planned.context - 1);
            return false;
        };
        let known = s.tokens.len();
        self.mask_times.push(next.took);
        if let Some(reason) = self.take_next(planned.slot, next, events) {
            events.push(Event::Finished(planned.id, reason));
            self.remove(planned.slot);
            return false;
        }
        let s = &mut self.sequences[planned.slot];
        if s.tokens.len() > known {
            return false; // what it yields is forced
        }
        self.inputs.set_row_pick(planned.last_output(), &s.pick(planned.context, false));
        s.coming = coming;
        true
    }

    /// Asks constraints what may come next, where all tokens before are known: forced tokens are appended, and texts
    /// that are complete end. One of those that are not ready is waited for where `wait` says so.
    pub(super) fn attend(&mut self, wait: bool, events: &mut Vec<Event>) {
        let mut order = std::mem::take(&mut self.order);
        order.clear();
        order.extend_from_slice(&self.running);
        let mut wait = wait;
        for slot in order.drain(..) {
            let s = &mut self.sequences[slot];
            // Log-probabilities of a prompt are told before the first token.
            if !s.awaits() || s.coming.is_some() || s.tells_prompt() {
                continue;
            }
            let Some(next) = s.cursor.as_mut().and_then(|cursor| cursor.next(wait)) else {
                continue;
            };
            wait = false;
            self.mask_times.push(next.took);
            if let Some(reason) = self.take_next(slot, next, events) {
                events.push(Event::Finished(self.sequences[slot].id, reason));
                self.remove(slot);
            }
        }
        self.order = order;
    }

    /// Takes what may come next; why the text ends, if it does.
    fn take_next(
        &mut self,
        slot: usize,
        next: Next,
        events: &mut Vec<Event>,
    ) -> Option<FinishReason> {
        let (vocab, max_length) = (self.limits.vocab, self.limits.max_length);
        let s = &mut self.sequences[slot];
        for token in next.forced {
            if token as usize >= vocab {
                return Some(FinishReason::Unfollowed);
            }
            let ends = s.request.stop.contains(&token);
            s.sampler.note(token);
            s.tokens.push(token);
            self.stats.forced += 1;
            if s.request.tell_stop || !ends {
                events.push(Event::Token(s.id, token, None));
            }
            if ends {
                return Some(FinishReason::Stop);
            }
            if s.is_full(max_length) {
                return Some(FinishReason::Length);
            }
        }
        match next.then {
            Allowed::Nothing => Some(FinishReason::Stop),
            Allowed::Unknown => Some(FinishReason::Unfollowed),
            Allowed::Tokens(mut words) => {
                words.resize(vocab.div_ceil(32), 0);
                if let Some(last) = words.last_mut().filter(|_| vocab % 32 > 0) {
                    *last &= (1 << (vocab % 32)) - 1;
                }
                if words.iter().all(|word| *word == 0) {
                    return Some(FinishReason::Unfollowed);
                }
                s.allowed = Some(words);
                None
            }
        }
    }
}
