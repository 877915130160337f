//! What steps did, on its way to the requests; measured here, off the engine's thread.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use infernum_link::{Cause, Command, End, Link, Refusal, Report};
use infernum_runtime::{Event, FinishReason, Logprobs, RequestId};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use super::limits::Account;
use super::metrics::{Counted, ModelMetrics, record};
use super::status::Status;

/// Why a text ended that has a grammar.
const UNFOLLOWED: &str = "the text could not be held to its grammar any further: it is too complex";

/// Where a request's outputs go.
pub(super) struct Sink {
    pub(super) choice: u32,
    pub(super) outputs: UnboundedSender<(u32, Output)>,
    pub(super) unread: Arc<Unread>,
    pub(super) arrival: Instant,
    pub(super) waiting: Option<Counted>,
    pub(super) _inflight: Counted,
    /// Who is charged for it, where that is counted.
    pub(super) payer: Option<Arc<Account>>,
    /// The request's name to the engine's thread.
    pub(super) key: u64,
    pub(super) link: Arc<dyn Link>,
    /// Whether its output ran over.
    pub(super) full: AtomicBool,
}

/// Bytes of output that all choices of a request have waiting.
pub(super) struct Unread {
    bytes: AtomicUsize,
    most: usize,
}

impl Unread {
    pub(super) fn new(most: usize) -> Arc<Unread> {
        Arc::new(Unread { bytes: AtomicUsize::new(0), most })
    }

    /// An output was taken.
    pub(super) fn took(&self, output: &Output) {
        self.bytes.fetch_sub(output.size(), Ordering::AcqRel);
    }
}

/// What becomes of a request; the first is `Accepted` or `Rejected`, the last `Finished`,
/// `Rejected`, `Failed` or `Unread`.
#[derive(Debug)]
pub(crate) enum Output {
    Accepted,
    Rejected(Refusal),
    /// Tokens of its prompt that were in the cache, and how long it waited for its first step.
    Started(usize, Duration),
    Prompt(Box<Logprobs>),
    Token(u32, Option<Box<Logprobs>>),
    Vector(Box<[f32]>),
    Finished(FinishReason),
    Failed(Arc<str>),
    /// So much was not read that no more is made.
    Unread,
}

impl Output {
    /// Bytes that it takes while it waits. Those of a prompt all come at once, however fast they
    /// are read, and are no more than the prompt is long: they do not count. Nor does a vector, the only one of its request.
    fn size(&self) -> usize {
        let logprobs = match self {
            Output::Prompt(_) | Output::Vector(_) => return 0,
            Output::Token(_, Some(logprobs)) => {
                size_of::<Logprobs>() + size_of_val(logprobs.top.as_slice())
            }
            _ => 0,
        };
        size_of::<(u32, Output)>() + logprobs
    }
}

/// A request that the engine has taken.
struct Slot {
    sink: Sink,
    prompt: usize,
    started: Option<Instant>,
    first: Option<Instant>,
    last: Instant,
}

/// The requests that one engine was asked, and where what it reports goes.
pub(crate) struct Outbox {
    status: Arc<Status>,
    metrics: Arc<ModelMetrics>,
    /// Those that were not taken yet, with the tokens of their prompts.
    asked: HashMap<u64, (Sink, usize)>,
    slots: HashMap<RequestId, Slot>,
    /// Who waits for the engine to have done something else.
    awaited: HashMap<u64, oneshot::Sender<Done>>,
}

/// What became of what was waited for.
type Done = Result<(), Refusal>;

/// An outbox with all who put something in or take it out.
pub(super) type Shared = Arc<Mutex<Outbox>>;

/// The outbox, for a moment.
pub(super) fn locked(outbox: &Mutex<Outbox>) -> MutexGuard<'_, Outbox> {
    outbox.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Outbox {
    pub(super) fn new(status: Arc<Status>, metrics: Arc<ModelMetrics>) -> Outbox {
        let (asked, slots, awaited) = (HashMap::new(), HashMap::new(), HashMap::new());
        Outbox { status, metrics, asked, slots, awaited }
    }

    /// Something is about to be asked of the engine by this name: gives what tells that it is done, or why not; dropped where
    /// the engine is gone.
    pub(super) fn await_done(&mut self, key: u64) -> oneshot::Receiver<Done> {
        let (sender, done) = oneshot::channel();
        self.awaited.insert(key, sender);
        done
    }

    /// A request is about to be handed over.
    pub(super) fn expect(&mut self, sink: Sink, prompt: usize) {
        self.asked.insert(sink.key, (sink, prompt));
    }

    /// Something was not handed over: whoever waits hears why, or that there is no engine.
    pub(super) fn unsent(&mut self, key: u64, refusal: Option<Refusal>) {
        let Some(refusal) = refusal else {
            self.awaited.remove(&key);
            self.asked.remove(&key);
            return;
        };
        if let Some(waiting) = self.awaited.remove(&key) {
            let _ = waiting.send(Err(refusal)); // it may be waited for no more
        } else if let Some((sink, _)) = self.asked.remove(&key) {
            sink.send(Output::Rejected(refusal));
        }
    }

    /// The engine is gone. Whoever waits hears it, as nothing will follow.
    pub(super) fn lost(&mut self) {
        self.metrics.lost(self.slots.len());
        self.asked.clear();
        self.slots.clear();
        self.awaited.clear();
    }

    /// Hands what happened to the requests, and measures.
    pub(super) fn report(&mut self, report: Report) {
        self.status.note(&report);
        let (ended, metrics) = (report.ended, self.metrics.clone());
        let began = ended.checked_sub(report.took).unwrap_or(ended);
        for step in report.steps {
            record(&metrics.step, step.all);
            record(&metrics.host, step.host);
        }
        report.masks.iter().for_each(|time| record(&metrics.mask, *time));
        for (key, id) in report.accepted {
            let Some((sink, prompt)) = self.asked.remove(&key) else { continue };
            sink.send(Output::Accepted);
            metrics.prompt_tokens.increment(prompt as u64);
            self.slots.insert(id, Slot { sink, prompt, started: None, first: None, last: ended });
        }
        for (key, refusal) in report.rejected {
            self.unsent(key, Some(refusal));
        }
        // A request's events come before its cancellation, which ends the list of them.
        let error: Option<Arc<str>> = report.error.map(Into::into);
        for event in report.events {
            self.event(event, error.as_ref(), &metrics, (began, ended));
        }
        for (key, done) in report.done {
            if let Some(waiting) = self.awaited.remove(&key) {
                let _ = waiting.send(done); // it may be waited for no more
            }
        }
        for (id, end) in report.cancelled {
            if let Some(slot) = self.slots.remove(&id) {
                match end {
                    End::Slept => {
                        metrics.abort.increment(1);
                        let message = "the model was put to sleep".to_owned();
                        let refusal = Refusal { cause: Cause::Asleep, message };
                        slot.sink.send(Output::Rejected(refusal));
                    }
                    End::Stopped => metrics.stopped(),
                    End::Unread => {
                        metrics.abort.increment(1);
                        metrics.unread.increment(1);
                    }
                    End::Aborted => metrics.abort.increment(1),
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
        let id = event.request();
        let Some(slot) = self.slots.get_mut(&id) else { return };
        let waited = slot.start(metrics, began.max(slot.sink.arrival));
        match event {
            Event::Started(_, cached) => {
                slot.sink.send(Output::Started(cached.min(slot.prompt), waited));
            }
            Event::Prompt(_, logprobs) => slot.sink.send(Output::Prompt(logprobs)),
            Event::Token(_, token, logprobs) => {
                slot.token(metrics, now);
                slot.sink.send(Output::Token(token, logprobs));
            }
            Event::Vector(_, vector) => slot.sink.send(Output::Vector(vector)),
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
                    FinishReason::Unfollowed => Output::Failed(UNFOLLOWED.into()),
                    reason => Output::Finished(reason),
                });
            }
        }
    }
}

impl Slot {
    /// Notes when its first step began; gives how long it waited for that.
    fn start(&mut self, metrics: &ModelMetrics, now: Instant) -> Duration {
        let waited = |started: Instant| started.saturating_duration_since(self.sink.arrival);
        if let Some(started) = self.started {
            return waited(started);
        }
        record(&metrics.queue, waited(now));
        self.started = Some(now);
        self.sink.waiting = None;
        now.saturating_duration_since(self.sink.arrival)
    }

    fn token(&mut self, metrics: &ModelMetrics, now: Instant) {
        metrics.generation_tokens.increment(1);
        if let Some(payer) = &self.sink.payer {
            payer.spend(1);
        }
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
        if self.full.load(Ordering::Acquire) {
            return;
        }
        let size = output.size();
        let before = self.unread.bytes.fetch_add(size, Ordering::AcqRel);
        // The last output may go beyond the limit: nothing follows it.
        let last = matches!(output, Output::Finished(_) | Output::Failed(_) | Output::Rejected(_));
        let output = if before.saturating_add(size) <= self.unread.most || last {
            output
        } else {
            self.full.store(true, Ordering::Release);
            self.unread.bytes.fetch_add(Output::Unread.size(), Ordering::AcqRel);
            self.unread.bytes.fetch_sub(size, Ordering::AcqRel);
            let _ = self.link.send(Command::Cancel(self.key, End::Unread)); // it may have ended
            Output::Unread
        };
        // Whoever went away has cancelled, or is about to.
        let _ = self.outputs.send((self.choice, output));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use infernum_link::Gone;
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::*;

    struct Noted(Mutex<Sender<Command>>);

    impl Link for Noted {
        fn send(&self, command: Command) -> Result<(), Gone> {
            self.0.lock().expect("no panic").send(command).map_err(|_| Gone)
        }
    }

    /// A sink of a request that may have `most` bytes waiting.
    fn sink(most: usize) -> (Sink, UnboundedReceiver<(u32, Output)>, Receiver<Command>) {
        let (outputs, received) = unbounded_channel();
        let (commands, told) = channel();
        let sink = Sink {
            choice: 0,
            outputs,
            unread: Unread::new(most),
            arrival: Instant::now(),
            waiting: None,
            _inflight: Counted::one(&Arc::default()),
            payer: None,
            key: 7,
            link: Arc::new(Noted(Mutex::new(commands))),
            full: AtomicBool::new(false),
        };
        (sink, received, told)
    }

    #[test]
    fn output_that_nobody_reads_ends_the_request() {
        let token = || Output::Token(1, None);
        let (sink, mut received, told) = sink(10 * token().size());
        let unread = sink.unread.clone();
        for _ in 0..1000 {
            sink.send(token());
            unread.took(&received.try_recv().expect("it is there").1);
        }
        assert!(told.try_recv().is_err(), "what is read can go on for ever");
        (0..1000).for_each(|_| sink.send(token()));
        assert!(matches!(told.try_recv(), Ok(Command::Cancel(7, End::Unread))));
        assert!(told.try_recv().is_err(), "told once");
        let waiting: Vec<Output> =
            std::iter::from_fn(|| received.try_recv().ok()).map(|o| o.1).collect();
        assert_eq!(waiting.len(), 11);
        assert!(matches!(waiting[10], Output::Unread));
        waiting.iter().for_each(|output| unread.took(output));
        assert_eq!(unread.bytes.load(Ordering::Acquire), 0);
    }
}
