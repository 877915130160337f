//! The engines of a model, and what they are asked.

use std::cmp::Reverse;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Instant;

use infernum_link::{Command, End, Facts, Handle, Link, Port, Report, Submission};
use infernum_runtime::{Request, Stats, StepInputs};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::limits::payer;
use super::metrics::{Counted, ModelMetrics};
use super::outbox::{Outbox, Output, Shared, Sink, Unread, locked};
use super::status::{Busy, Status};

/// Tokens of a prompt by which it goes to the engine that knows them: some blocks, and at least one.
const KNOWN_BY: usize = 4 * StepInputs::BLOCK_SIZE;

/// The engine has gone.
#[derive(Debug)]
pub(crate) struct Gone;

/// Why no engine takes a request.
#[derive(Debug)]
pub(crate) enum Untaken {
    /// All have as many as they take.
    Busy,
    /// They sleep.
    Asleep,
    /// None is there.
    Gone,
}

impl From<Busy> for Untaken {
    fn from(Busy: Busy) -> Untaken {
        Untaken::Busy
    }
}

/// One engine, here or elsewhere.
pub(crate) struct Line {
    /// Which one it is, the same for every front end.
    pub(super) name: String,
    pub(super) link: Arc<dyn Link>,
    pub(super) status: Arc<Status>,
    pub(super) outbox: Shared,
}

impl Line {
    /// The engine in another process that `link` leads to.
    pub(crate) fn remote(
        name: String,
        link: Arc<dyn Link>,
        status: Arc<Status>,
        outbox: Shared,
    ) -> Line {
        Line { name, link, status, outbox }
    }

    /// An engine on a thread of this process, and a task that hands out what it tells. `queue` requests may wait.
    pub(crate) fn local(
        engine: &Handle,
        facts: &Facts,
        queue: usize,
        metrics: Arc<ModelMetrics>,
    ) -> (Line, impl Future<Output = ()> + Send + use<>) {
        let status = Arc::new(Status::new(facts.sequences, queue));
        let outbox = Arc::new(Mutex::new(Outbox::new(status.clone(), metrics)));
        let (sender, mut reports) = unbounded_channel();
        status.arrived(0, facts);
        // It admits what it hands over itself.
        let link = Arc::new(engine.join(Box::new(Channel(sender)), usize::MAX));
        // Which adapters it has is told on joining, and makes it one that is there.
        while let Ok(report) = reports.try_recv() {
            locked(&outbox).report(report);
        }
        let line =
            Line { name: String::new(), link, status: status.clone(), outbox: outbox.clone() };
        let deliver = async move {
            while let Some(report) = reports.recv().await {
                locked(&outbox).report(report);
            }
            status.lost();
            locked(&outbox).lost();
        };
        (line, deliver)
    }
}

/// Reports for this process.
struct Channel(UnboundedSender<Report>);

impl Port for Channel {
    fn send(&mut self, report: Report) -> bool {
        self.0.send(report).is_ok()
    }
}

/// Speaks to a model's engines.
pub(crate) struct Worker {
    lines: RwLock<Arc<[Arc<Line>]>>,
    next_key: AtomicU64,
    /// Bytes of a request's output that may wait.
    unread: usize,
}

/// Room that was taken for requests, at one engine.
pub(crate) struct Rooms {
    line: Arc<Line>,
    rooms: Vec<Counted>,
}

impl Worker {
    /// Of these engines. `unread` is in bytes of one request's output.
    pub(crate) fn new(lines: Vec<Line>, unread: usize) -> Worker {
        let lines = RwLock::new(lines.into_iter().map(Arc::new).collect());
        Worker { lines, next_key: 0.into(), unread }
    }

    /// Has one more engine asked.
    pub(crate) fn add(&self, line: Line) {
        let mut lines = self.lines.write().unwrap_or_else(PoisonError::into_inner);
        *lines = lines.iter().cloned().chain([Arc::new(line)]).collect();
    }

    pub(super) fn lines(&self) -> Arc<[Arc<Line>]> {
        self.lines.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn statuses(&self) -> impl Iterator<Item = Arc<Status>> {
        let lines = self.lines();
        (0..lines.len()).map(move |i| lines[i].status.clone())
    }

    /// The most requests that can be under way at one engine.
    pub(crate) fn room(&self) -> usize {
        self.statuses().map(|s| s.room()).max().unwrap_or(0)
    }

    /// Whether requests are under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.statuses().any(|s| s.is_busy())
    }

    /// Engines that are there.
    pub(crate) fn engines(&self) -> usize {
        self.statuses().filter(|status| status.alive()).count()
    }

    /// Whether an engine is well.
    pub(crate) fn healthy(&self) -> bool {
        self.statuses().any(|s| s.healthy())
    }

    /// Whether all engines that are there fail, which a new start of them would mend.
    pub(crate) fn failing(&self) -> bool {
        self.engines() > 0 && !self.healthy()
    }

    /// How all engines stand together.
    pub(crate) fn stats(&self) -> Stats {
        self.statuses().fold(Stats::default(), |all, status| all.beside(&status.stats()))
    }

    /// Requests handed over that the engines have not counted yet.
    pub(crate) fn queued(&self) -> usize {
        self.statuses().map(|s| s.queued()).sum()
    }

    /// Messages between this server and its engines that could not be read.
    pub(crate) fn malformed(&self) -> u64 {
        self.statuses().map(|s| s.malformed()).sum()
    }

    /// Seconds until a request that comes now has started, if all goes on as it did.
    pub(crate) fn retry_after(&self) -> u64 {
        self.statuses().filter(|status| status.takes()).map(|s| s.retry_after()).min().unwrap_or(1)
    }

    /// Whether [`Worker::admit`] would take `n` requests now: to be asked before work is put into them.
    pub(crate) fn check(&self, n: usize, adapter: Option<&str>) -> Result<(), Untaken> {
        let lines = self.serving(adapter);
        first_with_room(&lines, lines.iter().filter(|line| line.status.takes()), n).map(drop)
    }

    /// The adapters that engines have, or had before they went, in the order of their loading.
    pub(crate) fn adapters(&self) -> Vec<String> {
        let mut all: Vec<String> = Vec::new();
        for status in self.statuses() {
            let new = status.adapters().into_iter().filter(|name| !all.contains(name));
            all.append(&mut new.collect());
        }
        all
    }

    /// Whether an engine has an adapter, or had it before it went.
    pub(crate) fn has_adapter(&self, name: &str) -> bool {
        self.statuses().any(|status| status.serves(Some(name)))
    }

    /// The engines that have an adapter, where one is named.
    fn serving(&self, adapter: Option<&str>) -> Vec<Arc<Line>> {
        self.lines().iter().filter(|line| line.status.serves(adapter)).cloned().collect()
    }

    /// Has requests from now on find nothing in the prefix cache of what was computed before.
    pub(crate) fn forget_prefixes(&self) {
        for line in self.lines().iter() {
            let _ = line.link.send(Command::ForgetPrefixes); // it may be gone
        }
    }

    /// Whether an engine sleeps, and none takes requests.
    pub(crate) fn asleep(&self) -> bool {
        asleep(&self.lines())
    }

    /// A name for what is asked next.
    pub(super) fn key(&self) -> u64 {
        self.next_key.fetch_add(1, Ordering::Relaxed)
    }

    /// Ends the engine's thread after the step under way, where it is here; what still runs gets no more.
    pub(crate) fn stop(&self) {
        self.lines().iter().for_each(|line| line.link.stop());
    }

    /// Takes room for requests, which go to one engine: they most often begin alike. It has the adapter, where one is named.
    pub(crate) fn admit(
        &self,
        requests: &[Request],
        adapter: Option<&str>,
    ) -> Result<Rooms, Untaken> {
        let lines = self.serving(adapter);
        first_with_room(&lines, by_preference(&lines, requests).into_iter(), requests.len())
    }

    /// Hands requests over, one for each room that was taken, to be computed with the adapter, where one is named. Dropping the
    /// result cancels what has not ended.
    pub(crate) fn submit(
        &self,
        requests: Vec<Request>,
        adapter: Option<&str>,
        rooms: Rooms,
    ) -> Result<Running, Gone> {
        let Rooms { line, rooms } = rooms;
        let (sender, outputs) = unbounded_channel();
        let first = self.next_key.fetch_add(requests.len() as u64, Ordering::Relaxed);
        let live = vec![true; requests.len()];
        let unread = Unread::new(self.unread);
        let mut running =
            Running { line: line.clone(), first, live, outputs, unread: unread.clone() };
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
                waiting: Some(Counted::one(&line.status.waiting)),
                _inflight: room,
                payer: payer.clone(),
                key,
                link: line.link.clone(),
                full: AtomicBool::new(false),
            };
            locked(&line.outbox).expect(sink, request.tokens.len());
            let adapter = adapter.map(str::to_owned);
            let submission = Submission { key, request, grammar: None, adapter };
            if line.link.send(Command::Submit(Box::new(submission))).is_err() {
                locked(&line.outbox).unsent(key, None);
                running.live.clear();
                return Err(Gone);
            }
        }
        Ok(running)
    }
}

/// Whether one of these engines sleeps, and none takes requests.
fn asleep(lines: &[Arc<Line>]) -> bool {
    lines.iter().any(|line| line.status.alive() && line.status.asleep())
        && !lines.iter().any(|line| line.status.takes())
}

/// Takes `n` rooms at the first that has them of those of `lines` that are `asked`.
fn first_with_room<'a>(
    lines: &[Arc<Line>],
    mut asked: impl Iterator<Item = &'a Arc<Line>>,
    n: usize,
) -> Result<Rooms, Untaken> {
    let mut why = if asleep(lines) { Untaken::Asleep } else { Untaken::Gone };
    asked
        .find_map(|line| match line.status.admit(n) {
            Ok(rooms) => Some(Rooms { line: line.clone(), rooms }),
            Err(busy) => {
                why = busy.into();
                None
            }
        })
        .ok_or(why)
}

/// The engines that take requests, the best for these first: of those that have no more than their share of the load and a
/// quarter (Mirrokni et al. 2016) the one that the prompt's beginning is known at, by rendezvous hashing, then the least
/// loaded.
fn by_preference<'a>(lines: &'a [Arc<Line>], requests: &[Request]) -> Vec<&'a Arc<Line>> {
    let mut lines: Vec<(&Arc<Line>, usize)> = lines
        .iter()
        .filter(|line| line.status.takes())
        .map(|line| (line, line.status.load()))
        .collect();
    lines.sort_by_key(|(_, load)| *load);
    let begins =
        requests.first().and_then(|request| Some((request.salt, known_by(&request.tokens)?)));
    if let Some(begins) = begins.filter(|_| lines.len() > 1) {
        let all: usize = lines.iter().map(|(_, load)| load).sum();
        let most = (5 * (all + requests.len())).div_ceil(4 * lines.len());
        let score = |line: &Line| {
            let mut hasher = DefaultHasher::new();
            (&line.name, begins).hash(&mut hasher);
            hasher.finish()
        };
        lines.sort_by_key(|(line, load)| {
            let within = load + requests.len() <= most;
            if within { (0, Reverse(score(line)), 0) } else { (1, Reverse(0), *load) }
        });
    }
    lines.into_iter().map(|(line, _)| line).collect()
}

/// The beginning that requests may share; `None` of one that is too short to be found again.
fn known_by(tokens: &[u32]) -> Option<&[u32]> {
    (tokens.len() > StepInputs::BLOCK_SIZE).then(|| &tokens[..tokens.len().min(KNOWN_BY)])
}

/// Requests under way, for whoever asked for them.
pub(crate) struct Running {
    line: Arc<Line>,
    first: u64,
    live: Vec<bool>,
    outputs: UnboundedReceiver<(u32, Output)>,
    unread: Arc<Unread>,
}

impl Running {
    /// The next output; `None` when the engine is gone.
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
            // An engine that is gone runs nothing.
            let _ = self.line.link.send(Command::Cancel(self.first + u64::from(choice), end));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        (0..self.live.len() as u32).for_each(|choice| self.cancel(choice, End::Aborted));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use infernum_ir::Dims;
    use infernum_link::{Driver, Gone as LinkGone, engine};
    use infernum_runtime::{
        Engine, EngineLimits, EngineOptions, Event, ExecError, Executor, RequestId, StepOutput,
        Ticket,
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

    fn facts() -> Facts {
        Facts {
            max_length: 16,
            vocab: 50,
            width: 1,
            blocks: 16,
            sequences: 4,
            queue: 4,
            family: String::new(),
            format: String::new(),
            bytes: 0,
            on: String::new(),
        }
    }

    fn metrics() -> Arc<ModelMetrics> {
        Arc::new(Metrics::new("infernum").expect("buckets").model("m", 4, 16))
    }

    /// A worker of an engine of this process, and what is to run that.
    fn local() -> (Worker, Driver, impl Future<Output = ()> + Send + use<>) {
        let (handle, driver) = engine();
        let (line, deliver) = Line::local(&handle, &facts(), 4, metrics());
        (Worker::new(vec![line], 1 << 20), driver, deliver)
    }

    /// What a request hears from an engine that is broken, and its worker.
    async fn heard(panics: bool, requests: usize) -> (Vec<String>, Worker) {
        let (worker, driver, deliver) = local();
        let thread = std::thread::spawn(move || driver.run(broken(panics), None));
        let delivered = tokio::spawn(deliver);
        let mut heard = Vec::new();
        for _ in 0..requests {
            let request = vec![Request::new(vec![1, 2], 4)];
            let Ok(rooms) = worker.admit(&request, None) else {
                heard.push("gone".to_owned());
                continue;
            };
            let Ok(mut running) = worker.submit(request, None, rooms) else {
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
            delivered.await.expect("it ends");
        }
        (heard, worker)
    }

    #[tokio::test]
    async fn failing_steps_fail_their_requests_and_are_noticed() {
        let (said, worker) = heard(false, 2).await;
        assert!(said.len() == 2 && said.iter().all(|m| m.contains("nonsense")), "{said:?}");
        assert!(worker.healthy(), "it may pass");
        assert!(!worker.is_busy(), "all rooms are free again");
        assert_eq!(worker.lines()[0].status.waiting.load(Ordering::Acquire), 0);
        let (_, worker) = heard(false, 3).await;
        assert!(worker.failing());
    }

    #[tokio::test]
    async fn a_thread_that_panics_leaves_nobody_waiting() {
        let (said, worker) = heard(true, 2).await;
        assert_eq!(said, ["gone", "gone"]);
        assert!(!worker.healthy() && !worker.is_busy());
    }

    /// What a request waits for in the queue is other requests, not its own first step.
    #[tokio::test]
    async fn the_time_in_the_queue_ends_where_the_first_step_begins() {
        let (worker, _driver, _deliver) = local();
        let request = vec![Request::new(vec![1, 2], 4)];
        let rooms = worker.admit(&request, None).expect("room");
        let arrival = Instant::now();
        let mut running = worker.submit(request, None, rooms).expect("it is there");
        let id: RequestId = broken(false).submit(Request::new(vec![1], 1)).expect("well formed");
        let took = Duration::from_secs(5);
        let report = Report {
            accepted: vec![(0, id)],
            events: vec![Event::Started(id, 0), Event::Token(id, 1, None)],
            took,
            ended: arrival + Duration::from_millis(300) + took,
            ..Report::default()
        };
        locked(&worker.lines()[0].outbox).report(report);
        let outputs: Vec<Output> = std::iter::from_fn(|| running.ready()).map(|o| o.1).collect();
        let [Output::Accepted, Output::Started(0, waited), Output::Token(1, None)] = outputs[..]
        else {
            panic!("{outputs:?}");
        };
        assert!((200..=300).contains(&waited.as_millis()), "{waited:?}");
    }

    struct Nowhere;

    impl Link for Nowhere {
        fn send(&self, _: Command) -> Result<(), LinkGone> {
            Ok(())
        }
    }

    fn lines(n: usize) -> Worker {
        let line = |i| {
            let status = Arc::new(Status::new(4, 400));
            let facts = Facts { queue: 400, ..facts() };
            status.arrived(i, &facts);
            status.has(Vec::new());
            let outbox = Arc::new(Mutex::new(Outbox::new(status.clone(), metrics())));
            Line::remote(format!("tcp://e{i}:1"), Arc::new(Nowhere), status, outbox)
        };
        Worker::new((0..n as u64).map(line).collect(), 1 << 20)
    }

    fn taken_by(worker: &Worker, prompt: &[u32], kept: &mut Vec<Rooms>) -> String {
        let rooms = worker.admit(&[Request::new(prompt.to_vec(), 1)], None).expect("room");
        let name = rooms.line.name.clone();
        kept.push(rooms);
        name
    }

    #[test]
    fn prompts_go_where_they_are_known_as_long_as_none_has_more_than_its_share() {
        let worker = lines(4);
        let prompt = |kind: u32| (0..100).map(|i| i + kind).collect::<Vec<u32>>();
        let mut alone = std::collections::BTreeSet::new();
        for kind in 0..64 {
            let first = taken_by(&worker, &prompt(kind), &mut Vec::new());
            let again = taken_by(&worker, &prompt(kind), &mut Vec::new());
            assert_eq!(first, again, "the engine that knows it");
            alone.insert(first);
        }
        assert_eq!(alone.len(), 4, "kinds are spread");
        // All the same at once: nobody gets more than its share and a quarter.
        let mut kept = Vec::new();
        (0..100).for_each(|_| drop(taken_by(&worker, &prompt(7), &mut kept)));
        let loads: Vec<usize> = worker.statuses().map(|s| s.load()).collect();
        assert!(loads.iter().all(|load| (1..=32).contains(load)), "{loads:?}");
        // What is too short to be known goes to the least loaded.
        drop(kept);
        let mut kept = Vec::new();
        (0..40).for_each(|_| drop(taken_by(&worker, &[1, 2], &mut kept)));
        let loads: Vec<usize> = worker.statuses().map(|s| s.load()).collect();
        assert_eq!(loads, [10; 4]);
    }

    #[test]
    fn an_engine_that_is_gone_or_ends_is_asked_nothing() {
        let worker = lines(2);
        worker.lines()[0].status.lost();
        let name = |worker: &Worker| {
            worker.admit(&[Request::new(vec![1], 1)], None).map(|r| r.line.name.clone())
        };
        assert_eq!(name(&worker).expect("the other one"), "tcp://e1:1");
        worker.lines()[1].status.note(&Report { draining: true, ..Report::default() });
        assert!(matches!(name(&worker), Err(Untaken::Gone)));
        worker.lines()[0].status.arrived(0, &facts());
        worker.lines()[0].status.has(Vec::new());
        assert_eq!(name(&worker).expect("it is back"), "tcp://e0:1");
    }
}
