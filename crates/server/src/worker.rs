//! A model's engine on a thread of its own.
//!
//! The thread does nothing but step: commands are taken between steps, and a step's events leave
//! it in one batch. Text and JSON are made by the tasks of the requests.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use infernum_runtime::{
    AdapterId, AdapterWeights, Engine, EngineError, Event, Executor, FinishReason, Request,
    RequestId, Stats,
};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use super::limits::payer;
use super::metrics::Counted;
use super::outbox::{Batch, Outbox, Output, Sink, StepTime, Unread};

/// Steps that may fail one after the other before the model counts as sick.
const SICK: u32 = 3;

/// Odd, so that each epoch turns salts into others.
const EPOCH: u64 = 0x9e37_79b9_7f4a_7c15;

/// What the engine's thread is told.
pub(super) enum Command {
    Submit(Box<Submission>),
    Cancel(u64, End),
    /// Puts an adapter into a free slot of the engine's; whoever waits for it may have gone.
    LoadAdapter(Box<AdapterWeights>, oneshot::Sender<Result<AdapterId, EngineError>>),
    /// Takes no more requests of it.
    UnloadAdapter(AdapterId),
    /// Requests that follow share no prefix with those before.
    ForgetPrefixes,
    /// Nothing else follows.
    Stop,
}

/// Why a request is no longer wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Its text reached a stop string.
    Stopped,
    /// Nobody listens.
    Aborted,
    /// Whoever listens does not read.
    Unread,
}

pub(super) struct Submission {
    key: u64,
    request: Request,
    sink: Sink,
}

/// How a model's engine stands, for everybody to see.
pub(crate) struct Status {
    alive: AtomicBool,
    /// Steps that failed since the last that did not.
    failures: AtomicU32,
    stats: Mutex<Stats>,
    /// Requests handed over that have not ended.
    inflight: Arc<AtomicUsize>,
    /// Those that have not started.
    waiting: Arc<AtomicUsize>,
    /// Recent time from start to end of a request, in milliseconds.
    service_ms: AtomicU32,
}

impl Status {
    pub(super) fn new() -> Status {
        Status {
            alive: AtomicBool::new(true),
            failures: AtomicU32::new(0),
            stats: Mutex::default(),
            inflight: Arc::default(),
            waiting: Arc::default(),
            service_ms: AtomicU32::new(1000),
        }
    }

    /// Whether requests are under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.inflight.load(Ordering::Acquire) > 0
    }

    /// Whether steps succeed.
    pub(crate) fn healthy(&self) -> bool {
        self.alive.load(Ordering::Acquire) && self.failures.load(Ordering::Acquire) < SICK
    }

    /// How the engine stood after its last step.
    pub(crate) fn stats(&self) -> Stats {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests handed over that the engine has not counted yet.
    pub(crate) fn queued(&self) -> usize {
        let stats = self.stats();
        self.inflight.load(Ordering::Acquire).saturating_sub(stats.running + stats.waiting)
    }

    /// Seconds until those that wait now have started, if all goes on as it did.
    pub(crate) fn retry_after(&self) -> u64 {
        let running = self.stats().running.max(1) as u64;
        let waiting = self.waiting.load(Ordering::Acquire) as u64 + 1;
        let service = u64::from(self.service_ms.load(Ordering::Relaxed));
        (service * waiting / running).div_ceil(1000).clamp(1, 120)
    }

    /// Keeps a moving mean of what a request took from its start to its end.
    pub(super) fn note_service(&self, time: Duration) {
        let (old, new) = (self.service_ms.load(Ordering::Relaxed), time.as_millis());
        let new = u32::try_from(new).unwrap_or(u32::MAX);
        self.service_ms.store(old - old / 8 + new / 8, Ordering::Relaxed);
    }

    /// Takes room for `n` requests where no more than `running + queue` are under way and the
    /// engine has no `queue` of its own.
    fn admit(&self, n: usize, running: usize, queue: usize) -> Result<Vec<Counted>, Busy> {
        let (waiting, all) = (self.waiting.load(Ordering::Acquire), running + queue);
        if waiting > 0 && waiting >= queue && self.stats().waiting >= queue.max(1) {
            return Err(Busy);
        }
        let add = |count: usize| count.checked_add(n).filter(|count| *count <= all);
        self.inflight.fetch_update(Ordering::AcqRel, Ordering::Acquire, add).map_err(|_| Busy)?;
        Ok((0..n).map(|_| Counted::holding(&self.inflight)).collect())
    }
}

/// The queue is full.
pub(crate) struct Busy;

/// The engine's thread ended.
pub(crate) struct Gone;

/// The engine has a bug, and is in a state that nobody knows.
#[derive(Debug)]
pub(crate) struct Panicked;

/// Speaks to a model's engine.
pub(crate) struct Worker {
    commands: Sender<Command>,
    next_key: std::sync::atomic::AtomicU64,
    pub(crate) status: Arc<Status>,
    /// Requests that run together, and that may wait.
    room: (usize, usize),
    /// Bytes of a request's output that may wait.
    unread: usize,
}

impl Worker {
    /// The most requests that can be under way.
    pub(crate) fn room(&self) -> usize {
        self.room.0 + self.room.1
    }

    /// Whether [`Worker::admit`] would take `n` requests now: to be asked before work is put into them.
    pub(crate) fn has_room(&self, n: usize) -> bool {
        self.admit(n).is_ok()
    }

    /// Has requests from now on find nothing in the prefix cache of what was computed before.
    pub(crate) fn forget_prefixes(&self) {
        let _ = self.commands.send(Command::ForgetPrefixes); // it may be gone already
    }

    /// Has the engine take an adapter, between two steps.
    pub(crate) async fn load_adapter(
        &self,
        weights: AdapterWeights,
    ) -> Result<Result<AdapterId, EngineError>, Gone> {
        let (sender, loaded) = oneshot::channel();
        let command = Command::LoadAdapter(Box::new(weights), sender);
        self.commands.send(command).map_err(|_| Gone)?;
        loaded.await.map_err(|_| Gone)
    }

    /// Has the engine take no more requests of an adapter; those that it has run to their ends.
    pub(crate) fn unload_adapter(&self, adapter: AdapterId) {
        let _ = self.commands.send(Command::UnloadAdapter(adapter)); // it may be gone already
    }

    /// Ends the engine's thread after the step under way; what still runs gets no more.
    pub(crate) fn stop(&self) {
        let _ = self.commands.send(Command::Stop); // it may be gone already
    }

    /// Takes room for `n` requests.
    pub(crate) fn admit(&self, n: usize) -> Result<Vec<Counted>, Busy> {
        self.status.admit(n, self.room.0, self.room.1)
    }

    /// Hands requests over, one for each room that was taken. Dropping the result cancels what has
    /// not ended.
    pub(crate) fn submit(
        self: &Arc<Worker>,
        requests: Vec<Request>,
        rooms: Vec<Counted>,
    ) -> Result<Running, Gone> {
        let (sender, outputs) = unbounded_channel();
        let first = self.next_key.fetch_add(requests.len() as u64, Ordering::Relaxed);
        let live = vec![true; requests.len()];
        let unread = Unread::new(self.unread);
        let mut running =
            Running { worker: self.clone(), first, live, outputs, unread: unread.clone() };
        let payer = payer();
        let mut prompt: Vec<u32> = Vec::new();
        for ((choice, request), room) in (0u32..).zip(requests).zip(rooms) {
            let key = first + u64::from(choice);
            // Choices of one prompt stand together, and read it once.
            if let Some(payer) = payer.as_ref().filter(|_| prompt != request.tokens) {
                payer.spend(request.tokens.len());
                prompt.clone_from(&request.tokens);
            }
            let sink = Sink {
                choice,
                outputs: sender.clone(),
                unread: unread.clone(),
                arrival: Instant::now(),
                waiting: Some(Counted::one(&self.status.waiting)),
                _inflight: room,
                payer: payer.clone(),
                key,
                commands: self.commands.clone(),
                full: AtomicBool::new(false),
            };
            let submission = Box::new(Submission { key, request, sink });
            if self.commands.send(Command::Submit(submission)).is_err() {
                running.live.clear();
                return Err(Gone);
            }
        }
        Ok(running)
    }
}

/// Requests under way, for whoever asked for them.
pub(crate) struct Running {
    worker: Arc<Worker>,
    first: u64,
    live: Vec<bool>,
    outputs: UnboundedReceiver<(u32, Output)>,
    unread: Arc<Unread>,
}

impl Running {
    /// The next output; `None` when the engine's thread has ended.
    pub(crate) async fn next(&mut self) -> Option<(u32, Output)> {
        let next = self.outputs.recv().await?;
        self.unread.took(&next.1);
        Some(next)
    }

    /// The next output, if there is one already.
    pub(crate) fn ready(&mut self) -> Option<(u32, Output)> {
        let next = self.outputs.try_recv().ok()?;
        self.unread.took(&next.1);
        Some(next)
    }

    /// Notes that a request ended by itself.
    pub(crate) fn ended(&mut self, choice: u32) {
        if let Some(live) = self.live.get_mut(choice as usize) {
            *live = false;
        }
    }

    /// Ends one request.
    pub(crate) fn cancel(&mut self, choice: u32, end: End) {
        if self.live.get(choice as usize) == Some(&true) {
            self.ended(choice);
            // A thread that is gone runs nothing.
            let _ = self.worker.commands.send(Command::Cancel(self.first + u64::from(choice), end));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        (0..self.live.len() as u32).for_each(|choice| self.cancel(choice, End::Aborted));
    }
}

/// The engine's side: what [`connect`] gives to the thread.
pub(crate) struct Inbox {
    commands: Receiver<Command>,
    batches: UnboundedSender<Batch>,
    status: Arc<Status>,
}

/// A worker, the inbox to [`Inbox::serve`] on the engine's thread, and the rest to
/// [`Outbox::deliver`] as a task. `unread` is in bytes of one request's output.
pub(crate) fn connect(running: usize, queue: usize, unread: usize) -> (Worker, Inbox, Outbox) {
    let (commands, inbox) = channel();
    let (batches, outbox) = unbounded_channel();
    let status = Arc::new(Status::new());
    let worker = Worker {
        commands,
        next_key: 0.into(),
        status: status.clone(),
        room: (running, queue),
        unread,
    };
    let inbox = Inbox { commands: inbox, batches, status: status.clone() };
    (worker, inbox, Outbox::new(outbox, status))
}

/// The engine with the names that requests have outside.
struct Stepper<E: Executor> {
    engine: Engine<E>,
    ids: HashMap<u64, RequestId>,
    keys: HashMap<RequestId, u64>,
    batch: Batch,
    stopped: bool,
    /// Goes with the salts of requests: what had another one is not found.
    epoch: u64,
}

impl Inbox {
    /// Runs the engine until it is stopped, or panics.
    pub(crate) fn serve<E: Executor>(self, engine: Engine<E>) -> Result<(), Panicked> {
        let (ids, keys) = (HashMap::new(), HashMap::new());
        let batch = Batch::default();
        let mut stepper = Stepper { engine, ids, keys, batch, stopped: false, epoch: 0 };
        let ended = catch_unwind(AssertUnwindSafe(|| self.run(&mut stepper)));
        self.status.alive.store(false, Ordering::Release);
        ended.map_err(|_| Panicked)
    }

    fn run<E: Executor>(&self, stepper: &mut Stepper<E>) {
        loop {
            if stepper.engine.is_idle() {
                self.publish(stepper);
                match self.commands.recv() {
                    Ok(command) => stepper.apply(command),
                    Err(_) => return,
                }
            }
            let began = Instant::now();
            while let Ok(command) = self.commands.try_recv() {
                stepper.apply(command);
            }
            if stepper.stopped {
                return;
            }
            if !stepper.engine.is_idle() {
                let before = stepper.engine.executor().computed();
                stepper.step(&self.status.failures);
                let computed = stepper.engine.executor().computed().saturating_sub(before);
                self.publish(stepper);
                let all = began.elapsed();
                let step = StepTime { all, host: all.saturating_sub(computed) };
                stepper.batch.steps.push(step);
            }
        }
    }

    /// Shows how the engine stands, and sends what happened.
    fn publish<E: Executor>(&self, stepper: &mut Stepper<E>) {
        *self.status.stats.lock().unwrap_or_else(PoisonError::into_inner) = stepper.engine.stats();
        if !stepper.batch.is_empty() {
            let events = Vec::with_capacity(stepper.batch.events.len());
            let batch = std::mem::replace(&mut stepper.batch, Batch { events, ..Batch::default() });
            // Nobody listens any more when the server is on its way out.
            let _ = self.batches.send(batch);
        }
    }
}

impl<E: Executor> Stepper<E> {
    fn apply(&mut self, command: Command) {
        match command {
            Command::Stop => self.stopped = true,
            Command::LoadAdapter(weights, loaded) => {
                if let Err(Ok(unclaimed)) = loaded.send(self.engine.load_adapter(&weights)) {
                    self.engine.unload_adapter(unclaimed); // nobody knows its name
                }
            }
            Command::UnloadAdapter(adapter) => self.engine.unload_adapter(adapter),
            Command::ForgetPrefixes => self.epoch += 1,
            Command::Submit(submission) => {
                let Submission { key, mut request, sink } = *submission;
                request.salt ^= self.epoch.wrapping_mul(EPOCH);
                let prompt = request.tokens.len();
                match self.engine.submit(request) {
                    Ok(id) => {
                        self.ids.insert(key, id);
                        self.keys.insert(id, key);
                        self.batch.accepted.push((id, sink, prompt));
                    }
                    Err(error) => self.batch.rejected.push((sink, error)),
                }
            }
            Command::Cancel(key, end) => {
                if let Some(id) = self.ids.remove(&key) {
                    self.keys.remove(&id);
                    self.engine.cancel(id);
                    self.batch.cancelled.push((id, end));
                }
            }
        }
    }

    fn step(&mut self, failures: &AtomicU32) {
        let events = &mut self.batch.events;
        let began = Instant::now();
        let result = self.engine.step(events);
        self.batch.times = Some((began, Instant::now()));
        match result {
            Ok(()) => failures.store(0, Ordering::Release),
            Err(error) => {
                tracing::error!(%error, "a step failed");
                failures.fetch_add(1, Ordering::AcqRel);
                self.batch.error = Some(error.to_string().into());
                // Where the engine does not say whose step it was, it was everybody's.
                if !events.iter().any(|e| matches!(e, Event::Finished(_, FinishReason::Failed))) {
                    for id in self.keys.keys() {
                        self.engine.cancel(*id);
                        events.push(Event::Finished(*id, FinishReason::Failed));
                    }
                }
            }
        }
        for event in events.iter() {
            if let Event::Finished(id, _) = event
                && let Some(key) = self.keys.remove(id)
            {
                self.ids.remove(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use infernum_ir::Dims;
    use infernum_runtime::{
        EngineLimits, EngineOptions, ExecError, StepInputs, StepOutput, Ticket,
    };

    use super::*;
    use crate::metrics::Metrics;

    /// Fails, or worse.
    struct Broken {
        panics: bool,
    }

    impl Executor for Broken {
        fn submit(&mut self, _: &StepInputs) -> Result<Ticket, ExecError> {
            assert!(!self.panics, "a bug");
            Err(ExecError::Inputs("nonsense".to_owned()))
        }

        fn wait(&mut self, _: Ticket) -> Result<&StepOutput, ExecError> {
            Err(ExecError::Ticket)
        }
    }

    fn broken(panics: bool) -> Engine<Broken> {
        let step = Dims { t: 8, b: 4, s: 64, pairs: 512, seqs: 4 };
        let (max_length, chunk, blocks, block_size, vocab) = (16, 8, 16, 4, 50);
        let limits = EngineLimits { step, max_length, chunk, blocks, block_size, vocab };
        let engine = Engine::new(Broken { panics }, limits, EngineOptions::default());
        engine.expect("options that agree")
    }

    /// What a request hears from an engine that is broken, and its worker.
    async fn heard(panics: bool, requests: usize) -> (Vec<String>, Arc<Worker>) {
        let engine = broken(panics);
        let (worker, inbox, outbox) = connect(4, 4, 1 << 20);
        let worker = Arc::new(worker);
        let thread = std::thread::spawn(move || inbox.serve(engine));
        let metrics = Metrics::new("infernum").expect("buckets").model("m", 4, 16);
        tokio::spawn(outbox.deliver(Arc::new(metrics)));
        let mut heard = Vec::new();
        for _ in 0..requests {
            let rooms = worker.admit(1).ok().expect("room");
            let Ok(mut running) = worker.submit(vec![Request::new(vec![1, 2], 4)], rooms) else {
                heard.push("gone".to_owned());
                continue;
            };
            loop {
                match running.next().await {
                    Some((_, Output::Failed(message))) => break heard.push(message.to_string()),
                    Some((_, Output::Accepted | Output::Started(..))) => {}
                    Some(other) => panic!("{other:?}"),
                    None => break heard.push("gone".to_owned()),
                }
            }
        }
        if panics {
            assert!(thread.join().expect("its panic was caught").is_err(), "it is told");
        }
        (heard, worker)
    }

    #[tokio::test]
    async fn failing_steps_fail_their_requests_and_are_noticed() {
        let (said, worker) = heard(false, 2).await;
        assert!(said.len() == 2 && said.iter().all(|m| m.contains("nonsense")), "{said:?}");
        assert!(worker.status.healthy(), "it may pass");
        assert_eq!(worker.status.inflight.load(Ordering::Acquire), 0, "all rooms are free again");
        assert_eq!(worker.status.waiting.load(Ordering::Acquire), 0);
        let (_, worker) = heard(false, SICK as usize).await;
        assert!(!worker.status.healthy());
    }

    #[tokio::test]
    async fn a_thread_that_panics_leaves_nobody_waiting() {
        let (said, worker) = heard(true, 2).await;
        assert_eq!(said, ["gone", "gone"]);
        assert!(!worker.status.healthy());
    }

    /// What a request waits for in the queue is other requests, not its own first step.
    #[tokio::test]
    async fn the_time_in_the_queue_ends_where_the_first_step_begins() {
        let (worker, inbox, outbox) = connect(4, 4, 1 << 20);
        let worker = Arc::new(worker);
        let rooms = worker.admit(1).ok().expect("room");
        let request = Request::new(vec![1, 2], 4);
        let mut running = worker.submit(vec![request.clone()], rooms).ok().expect("it is there");
        let Ok(Command::Submit(submission)) = inbox.commands.recv() else { panic!("a submission") };
        let id = broken(false).submit(request).expect("it is well formed");
        let began = submission.sink.arrival + Duration::from_millis(30);
        let batch = Batch {
            accepted: vec![(id, submission.sink, 2)],
            events: vec![Event::Started(id, 0), Event::Token(id, 1, None)],
            times: Some((began, began + Duration::from_secs(5))),
            ..Batch::default()
        };
        assert!(inbox.batches.send(batch).is_ok());
        drop(inbox);
        let metrics = Metrics::new("infernum").expect("buckets").model("m", 4, 16);
        outbox.deliver(Arc::new(metrics)).await;
        let outputs: Vec<Output> = std::iter::from_fn(|| running.ready()).map(|o| o.1).collect();
        let [Output::Accepted, Output::Started(0, waited), Output::Token(1, None)] = outputs[..]
        else {
            panic!("{outputs:?}");
        };
        assert_eq!(waited, Duration::from_millis(30));
    }

    #[test]
    fn room_is_taken_and_given_back() {
        let status = Status::new();
        let rooms = status.admit(3, 2, 1).ok().expect("there is room");
        assert!(status.admit(1, 2, 1).is_err());
        drop(rooms);
        assert!(status.admit(4, 2, 1).is_err(), "never all at once");
        assert!(status.admit(3, 2, 1).is_ok());
        assert_eq!(status.inflight.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_queue_of_the_engines_own_counts() {
        let status = Status::new();
        let _waiting: Vec<Counted> = (0..2).map(|_| Counted::one(&status.waiting)).collect();
        assert!(status.admit(1, 100, 2).is_ok(), "the engine may take them yet");
        *status.stats.lock().unwrap() = Stats { waiting: 2, ..Stats::default() };
        assert!(status.admit(1, 100, 2).is_err());
        assert!(status.admit(1, 100, 3).is_ok());
    }
}
