//! What steps did, on its way to the requests; measured here, off the engine's thread.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use infernum_runtime::{EngineError, Event, FinishReason, Logprobs, RequestId};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use super::metrics::{Counted, ModelMetrics, record};
use super::worker::{End, Status};

/// Where a request's outputs go.
pub(super) struct Sink {
    pub(super) choice: u32,
    pub(super) outputs: UnboundedSender<(u32, Output)>,
    pub(super) arrival: Instant,
    pub(super) waiting: Option<Counted>,
    pub(super) _inflight: Counted,
}

/// What becomes of a request; the first is `Accepted` or `Rejected`, the last `Finished`,
/// `Rejected` or `Failed`.
#[derive(Debug)]
pub(crate) enum Output {
    Accepted,
    Rejected(EngineError),
    /// Tokens of its prompt that were in the cache.
    Started(usize),
    Prompt(Box<Logprobs>),
    Token(u32, Option<Box<Logprobs>>),
    Finished(FinishReason),
    Failed(Arc<str>),
}

/// What one step, and the commands before it, did.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) accepted: Vec<(RequestId, Sink, usize)>,
    pub(super) rejected: Vec<(Sink, EngineError)>,
    pub(super) events: Vec<Event>,
    pub(super) cancelled: Vec<(RequestId, End)>,
    pub(super) error: Option<Arc<str>>,
    /// When the step began and ended.
    pub(super) times: Option<(Instant, Instant)>,
    /// Steps that ended since the last batch, this one not yet among them.
    pub(super) steps: Vec<StepTime>,
}

/// What a step took, and what of it was neither computing nor waiting for it.
pub(super) struct StepTime {
    pub(super) all: Duration,
    pub(super) host: Duration,
}

impl Batch {
    pub(super) fn is_empty(&self) -> bool {
        self.accepted.is_empty()
            && self.rejected.is_empty()
            && self.events.is_empty()
            && self.cancelled.is_empty()
    }
}

/// A request as [`Outbox::deliver`] knows it.
struct Slot {
    sink: Sink,
    prompt: usize,
    started: Option<Instant>,
    first: Option<Instant>,
    last: Instant,
}

/// Batches on their way to requests.
pub(crate) struct Outbox {
    batches: UnboundedReceiver<Batch>,
    status: Arc<Status>,
    slots: HashMap<RequestId, Slot>,
}

impl Outbox {
    pub(super) fn new(batches: UnboundedReceiver<Batch>, status: Arc<Status>) -> Outbox {
        Outbox { batches, status, slots: HashMap::new() }
    }

    /// Hands events to their requests, and measures, until the engine's thread ends.
    pub(crate) async fn deliver(mut self, metrics: Arc<ModelMetrics>) {
        while let Some(batch) = self.batches.recv().await {
            let times = batch.times.unwrap_or_else(|| (Instant::now(), Instant::now()));
            for step in batch.steps {
                record(&metrics.step, step.all);
                record(&metrics.host, step.host);
            }
            for (id, sink, prompt) in batch.accepted {
                sink.send(Output::Accepted);
                metrics.prompt_tokens.increment(prompt as u64);
                let last = times.1;
                self.slots.insert(id, Slot { sink, prompt, started: None, first: None, last });
            }
            for (sink, error) in batch.rejected {
                sink.send(Output::Rejected(error));
            }
            // A request's events come before its cancellation, which ends the list of them.
            for event in batch.events {
                self.event(event, batch.error.as_ref(), &metrics, times);
            }
            for (id, end) in batch.cancelled {
                if self.slots.remove(&id).is_some() {
                    match end {
                        End::Stopped => metrics.stopped(),
                        End::Aborted => metrics.abort.increment(1),
                    }
                }
            }
        }
    }

    fn event(
        &mut self,
        event: Event,
        error: Option<&Arc<str>>,
        metrics: &ModelMetrics,
        (began, now): (Instant, Instant),
    ) {
        let (Event::Started(id, _)
        | Event::Prompt(id, _)
        | Event::Token(id, ..)
        | Event::Finished(id, _)) = event;
        let Some(slot) = self.slots.get_mut(&id) else { return };
        slot.start(metrics, began.max(slot.sink.arrival));
        match event {
            Event::Started(_, cached) => slot.sink.send(Output::Started(cached.min(slot.prompt))),
            Event::Prompt(_, logprobs) => slot.sink.send(Output::Prompt(logprobs)),
            Event::Token(_, token, logprobs) => {
                slot.token(metrics, now);
                slot.sink.send(Output::Token(token, logprobs));
            }
            Event::Finished(_, reason) => {
                let Some(slot) = self.slots.remove(&id) else { return };
                metrics.finished(reason);
                record(&metrics.e2e, now.saturating_duration_since(slot.sink.arrival));
                if let Some(first) = slot.first {
                    record(&metrics.decode, slot.last - first);
                }
                if let Some(started) = slot.started {
                    self.status.note_service(now.saturating_duration_since(started));
                }
                slot.sink.send(match reason {
                    FinishReason::Failed => Output::Failed(
                        error
                            .cloned()
                            .unwrap_or_else(|| "the logits of this request are not numbers".into()),
                    ),
                    reason => Output::Finished(reason),
                });
            }
        }
    }
}

impl Slot {
    fn start(&mut self, metrics: &ModelMetrics, now: Instant) {
        if self.started.is_none() {
            self.started = Some(now);
            self.sink.waiting = None;
            record(&metrics.queue, now.saturating_duration_since(self.sink.arrival));
        }
    }

    fn token(&mut self, metrics: &ModelMetrics, now: Instant) {
        metrics.generation_tokens.increment(1);
        if self.first.is_some() {
            record(&metrics.itl, now - self.last);
        } else {
            self.first = Some(now);
            record(&metrics.ttft, now.saturating_duration_since(self.sink.arrival));
            if let Some(started) = self.started {
                record(&metrics.prefill, now.saturating_duration_since(started));
            }
        }
        self.last = now;
    }
}

impl Sink {
    fn send(&self, output: Output) {
        // Whoever went away has cancelled, or is about to.
        let _ = self.outputs.send((self.choice, output));
    }
}
