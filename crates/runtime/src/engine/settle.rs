//! What came of a step: tokens, ends, and blocks that others may share.

use infernum_ir::NO_TOKEN;

use super::sequence::Sequence;
use super::{Engine, EngineError, Event, FinishReason, Flight, KvMode, Planned};
use crate::exec::{Executor, StepOutput};
use crate::sampling::{Logprobs, argmax};

impl<E: Executor> Engine<E> {
    /// Settles the step under way, if there is one.
    pub(super) fn settle(&mut self, events: &mut Vec<Event>) -> Result<(), EngineError> {
        self.flight.take().map_or(Ok(()), |flight| self.settle_step(flight, events))
    }

    /// Waits for a step and does what comes of it.
    pub(super) fn settle_step(
        &mut self,
        flight: Flight,
        events: &mut Vec<Event>,
    ) -> Result<(), EngineError> {
        let Some(ticket) = flight.ticket else { return Ok(()) };
        let generates = self.executor.task().generates();
        let output = match self.executor.wait(ticket) {
            Ok(output) => output,
            Err(error) => {
                self.fail(&flight, events);
                if let Some(after) = self.flight.take() {
                    self.fail(&after, events); // it was fed by this one
                }
                return Err(error.into());
            }
        };
        let mut broken: Vec<Planned> = Vec::new();
        for planned in &flight.planned {
            let Some(s) = self.sequences.get_mut(planned.slot).filter(|s| s.id == planned.id)
            else {
                continue; // cancelled, or ended by the step before
            };
            if planned.truncations == s.truncations {
                s.computed = planned.context;
            }
            if !tell_prompt(s, output, planned, events) {
                broken.push(*planned);
                continue;
            }
            if planned.yields {
                s.coming = s.coming.filter(|(step, _)| *step != flight.step);
                if !generates {
                    let vector = output.row(planned.last_output());
                    if vector.is_empty() || !vector.iter().all(|v| v.is_finite()) {
                        broken.push(*planned);
                        continue;
                    }
                    events.push(Event::Vector(s.id, vector.into()));
                }
                if s.request.max_tokens > 0 {
                    let picked = pick(s, output, planned, &mut self.row);
                    let Some((token, logprobs)) = picked else {
                        broken.push(*planned);
                        continue;
                    };
                    self.stats.constrained += u64::from(s.cursor.is_some());
                    s.take(token);
                    if s.request.tell_stop || !s.request.stop.contains(&token) {
                        events.push(Event::Token(s.id, token, logprobs));
                    }
                }
            }
        }
        // Before anything that they computed is kept for others.
        for planned in broken {
            self.stats.corrupted += 1;
            self.fail_one(planned, events);
        }
        for planned in &flight.planned {
            self.after_row(*planned, events);
        }
        self.spare = flight.planned;
        Ok(())
    }

    /// Keeps what is full for others, and ends what has ended.
    fn after_row(&mut self, planned: Planned, events: &mut Vec<Event>) {
        let Some(s) = self.sequences.get_mut(planned.slot).filter(|s| s.id == planned.id) else {
            return;
        };
        if self.options.prefix_cache {
            self.groups.keep(&mut self.pool, s);
        }
        self.groups.give_back(&mut self.pool, s);
        if !planned.yields {
            return;
        }
        if self.options.kv == KvMode::Off {
            s.release(&mut self.pool);
        }
        let last = s.tokens.last().filter(|_| s.generated() > 0);
        let reason = if last.is_some_and(|t| s.request.stop.contains(t)) {
            FinishReason::Stop
        } else if s.generated() >= s.request.max_tokens || s.tokens.len() >= self.limits.max_length
        {
            FinishReason::Length
        } else {
            return;
        };
        events.push(Event::Finished(s.id, reason));
        self.remove(planned.slot);
    }

    /// Ends all that had a part in a step.
    pub(super) fn fail(&mut self, flight: &Flight, events: &mut Vec<Event>) {
        flight.planned.iter().for_each(|planned| self.fail_one(*planned, events));
    }

    /// Ends a request as failed, unless it has ended already.
    fn fail_one(&mut self, planned: Planned, events: &mut Vec<Event>) {
        if self.sequences.get(planned.slot).is_some_and(|s| s.id == planned.id) {
            events.push(Event::Finished(planned.id, FinishReason::Failed));
            self.remove(planned.slot);
        }
    }
}

/// Tells how likely the prompt's tokens were that come after the rows of output; false if a row has no token.
fn tell_prompt(
    s: &mut Sequence,
    output: &StepOutput,
    planned: &Planned,
    events: &mut Vec<Event>,
) -> bool {
    if !s.tells_prompt() {
        return true;
    }
    let top = s.request.prompt_logprobs.unwrap_or(0);
    for i in 0..planned.rows {
        // The token after the row.
        let at = planned.context - planned.rows + i + 1;
        let Some(&next) = s.request.tokens.get(at).filter(|_| at >= s.told) else { continue };
        let row = planned.output + i;
        let told = if output.tokens.is_empty() {
            let logits = output.row(row);
            argmax(logits).map(|_| Logprobs::new(logits, next, top))
        } else {
            output.told(row).cloned()
        };
        let Some(told) = told else { return false };
        s.told = at + 1;
        events.push(Event::Prompt(s.id, Box::new(told)));
    }
    true
}

/// The token of a planned row and what is told of it: the executor's, if it picks, or else the host's. `None`
/// if the row has none.
fn pick(
    s: &mut Sequence,
    output: &StepOutput,
    planned: &Planned,
    scratch: &mut Vec<f32>,
) -> Option<(u32, Option<Box<Logprobs>>)> {
    let row = planned.last_output();
    if let Some(&token) = output.tokens.get(row) {
        if token == NO_TOKEN {
            return None;
        }
        s.sampler.note(token);
        return Some((token, output.told(row).cloned().map(Box::new)));
    }
    scratch.clear();
    scratch.extend_from_slice(output.row(row));
    let position = s.tokens.len() as u64;
    let token = s.sampler.sample_among(scratch, position, s.allowed.as_deref())?;
    let logprobs = s.request.logprobs.map(|top| Box::new(Logprobs::new(scratch, token, top)));
    Some((token, logprobs))
}
