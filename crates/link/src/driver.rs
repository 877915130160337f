//! An engine on a thread of its own.
//!
//! The thread does nothing but step: commands are taken between steps, and a step's events leave it in one report to each
//! front end that they are of.

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use infernum_runtime::{Engine, Event, Executor, FinishReason, Request, RequestId, Stats};

use crate::adapters::{AdapterFiles, AdapterRefused, Adapters, Read, Then, Whose};
use crate::message::{
    AdapterPath, Cause, Command, Depth, End, Refusal, Report, Sleep, StepTime, Submission,
};
use crate::source::Source;
use crate::{Gone, Link};

/// Odd, so that each epoch turns salts into others.
const EPOCH: u64 = 0x9e37_79b9_7f4a_7c15;

/// What is told to those who ask an engine that sleeps.
const ASLEEP: &str = "the model sleeps: it takes requests again when it is woken";

/// Where a front end's reports go.
pub trait Port: Send {
    /// Takes a report, without waiting. `false` where the front end is gone, or has not taken so much of what it was told that
    /// it is given up.
    fn send(&mut self, report: Report) -> bool;
}

/// The engine has a bug, and is in a state that nobody knows.
#[derive(Debug)]
pub struct Panicked;

/// What the engine's thread is told.
enum Told {
    Join {
        peer: u64,
        port: Box<dyn Port>,
        most: usize,
        inbox: Sender<Told>,
        /// The adapters that it was told of.
        known: Vec<String>,
    },
    Leave(u64),
    Command(u64, Command),
    Refuse {
        peer: u64,
        key: u64,
        refusal: Refusal,
    },
    /// What came of reading the adapter whose turn it was.
    AdapterRead(Box<Read>),
    /// Nothing else follows.
    Stop,
}

/// How the engine stands, for those who may not wait for its thread.
#[derive(Default)]
struct Standing {
    stats: Mutex<Stats>,
    adapters: Mutex<Vec<String>>,
    malformed: AtomicU64,
    draining: AtomicBool,
    asleep: AtomicBool,
}

impl Standing {
    /// Adds to a report how the engine stands.
    fn told(&self, report: Report) -> Report {
        Report {
            stats: *self.stats.lock().unwrap_or_else(PoisonError::into_inner),
            malformed: self.malformed.load(Ordering::Relaxed),
            draining: self.draining.load(Ordering::Acquire),
            asleep: self.asleep.load(Ordering::Acquire),
            ..report
        }
    }

    fn note(&self, stats: Stats) {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = stats;
    }

    fn note_adapters(&self, names: Vec<String>) {
        *self.adapters.lock().unwrap_or_else(PoisonError::into_inner) = names;
    }
}

/// Speaks to an engine's thread.
#[derive(Clone)]
pub struct Handle {
    inbox: Sender<Told>,
    next: Arc<AtomicU64>,
    standing: Arc<Standing>,
}

impl Handle {
    /// A front end comes, which may have so many requests under way at once. It leaves, and its requests are cancelled, when
    /// the result is dropped. How the engine stands, and which adapters it has, it is told at once: a step may take long, and
    /// waking longer.
    pub fn join(&self, mut port: Box<dyn Port>, most: usize) -> Peer {
        let peer = self.next.fetch_add(1, Ordering::Relaxed);
        let inbox = self.inbox.clone();
        let known = self.standing.adapters.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let first = Report { adapters: Some(known.clone()), ..Report::default() };
        let _ = port.send(self.standing.told(first)); // it may be gone already
        let _ = self.inbox.send(Told::Join { peer, port, most, inbox, known }); // where it is gone, the port is dropped
        Peer { handle: self.clone(), peer }
    }

    /// How the engine stands, as a report of nothing else.
    pub fn standing(&self) -> Report {
        self.standing.told(Report::default())
    }

    /// Counts a message that could not be read.
    pub fn malformed(&self) {
        self.standing.malformed.fetch_add(1, Ordering::Relaxed);
    }

    /// Has requests refused from now on.
    pub fn drain(&self) {
        self.standing.draining.store(true, Ordering::Release);
    }

    /// Ends the engine's thread after the step under way; what still runs gets no more.
    pub fn stop(&self) {
        let _ = self.inbox.send(Told::Stop); // it may be gone already
    }
}

/// A front end, as its engine's thread is told of it.
pub struct Peer {
    handle: Handle,
    peer: u64,
}

impl Peer {
    /// Refuses a request in the engine's place.
    pub(crate) fn refuse(&self, key: u64, refusal: Refusal) {
        let _ = self.handle.inbox.send(Told::Refuse { peer: self.peer, key, refusal }); // it may be gone
    }
}

impl Link for Peer {
    fn send(&self, command: Command) -> Result<(), Gone> {
        self.handle.inbox.send(Told::Command(self.peer, command)).map_err(|_| Gone)
    }

    fn stop(&self) {
        self.handle.stop();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.handle.inbox.send(Told::Leave(self.peer)); // it may be gone already
    }
}

/// The engine's side: what its thread runs.
pub struct Driver {
    inbox: Receiver<Told>,
    standing: Arc<Standing>,
    adapters: Adapters,
}

/// A way to an engine's thread, and what is to [run](Driver::run) there.
pub fn engine() -> (Handle, Driver) {
    let (sender, inbox) = channel();
    let standing = Arc::new(Standing::default());
    let handle = Handle { inbox: sender, next: Arc::default(), standing: standing.clone() };
    (handle, Driver { inbox, standing, adapters: Adapters::default() })
}

/// A front end.
struct Member {
    port: Box<dyn Port>,
    most: usize,
    /// Where what is done for it beside the engine's thread is told.
    inbox: Sender<Told>,
    /// What it is told next.
    report: Report,
    /// Its requests by its names for them.
    requests: HashMap<u64, RequestId>,
    /// What it was told last of how the engine stands, and whether it sleeps.
    told: (Stats, bool),
}

/// The engine, and whose its requests are.
struct Stepper<E: Executor, S> {
    /// None while it sleeps.
    engine: Option<Engine<E>>,
    source: S,
    adapters: Adapters,
    /// How those stood that were before it.
    before: Stats,
    /// It is to sleep as soon as it is idle.
    tired: Option<Tired>,
    members: BTreeMap<u64, Member>,
    owners: HashMap<RequestId, (u64, u64)>,
    /// Kept for its memory.
    events: Vec<Event>,
    standing: Arc<Standing>,
    stopped: bool,
    /// Goes with the salts of requests: what had another one is not found.
    epoch: u64,
}

/// How an engine is to sleep that is still busy, and who waits for it by which name.
struct Tired {
    depth: Depth,
    waiting: Vec<(u64, u64)>,
}

impl Driver {
    /// Says where adapters come from, before any is loaded.
    #[must_use]
    pub fn with_adapters(self, files: AdapterFiles) -> Driver {
        Driver { adapters: Adapters::of(files), ..self }
    }

    /// Has an engine take the adapter in a folder, anywhere, before it is run.
    pub fn load_adapter<E: Executor>(
        &mut self,
        engine: &mut Engine<E>,
        name: &str,
        folder: &Path,
    ) -> Result<(), AdapterRefused> {
        self.adapters.load(engine, name, folder)?;
        self.standing.note_adapters(self.adapters.names());
        Ok(())
    }

    /// Runs an engine until it is stopped, or panics; where it is woken, one that `source` makes in its place. Ports are
    /// dropped then.
    pub fn run<E: Executor, S: Source<E>>(
        self,
        engine: Engine<E>,
        source: S,
    ) -> Result<(), Panicked> {
        let Driver { inbox, standing, adapters } = self;
        standing.note(engine.stats());
        let mut stepper = Stepper {
            engine: Some(engine),
            source,
            adapters,
            before: Stats::default(),
            tired: None,
            members: BTreeMap::new(),
            owners: HashMap::new(),
            events: Vec::new(),
            standing,
            stopped: false,
            epoch: 0,
        };
        // Nothing is told to an inbox that nobody empties: it goes before the ports do.
        let ended = catch_unwind(AssertUnwindSafe(|| {
            stepper.run(&inbox);
            drop(inbox);
        }));
        ended.map_err(|_| Panicked)
    }
}

impl<E: Executor, S: Source<E>> Stepper<E, S> {
    fn run(&mut self, inbox: &Receiver<Told>) {
        while !self.stopped {
            if self.is_idle() {
                self.fall_asleep();
                self.publish(true);
                match inbox.recv() {
                    Ok(told) => self.apply(told),
                    Err(_) => return,
                }
            }
            let began = Instant::now();
            while let Ok(told) = inbox.try_recv() {
                self.apply(told);
            }
            if !self.stopped && !self.is_idle() {
                let before = self.computed();
                self.step();
                let computed = self.computed().saturating_sub(before);
                self.publish(false);
                let all = began.elapsed();
                self.note(StepTime { all, host: all.saturating_sub(computed) });
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.engine.as_ref().is_none_or(Engine::is_idle)
    }

    /// How long it has computed.
    fn computed(&self) -> Duration {
        self.engine.as_ref().map_or(Duration::ZERO, |engine| engine.executor().computed())
    }

    fn apply(&mut self, told: Told) {
        match told {
            Told::Stop => self.stopped = true,
            Told::Join { peer, port, most, inbox, known } => {
                let adapters = Some(self.adapters.names()).filter(|names| *names != known);
                let report = Report { adapters, ..Report::default() };
                let (requests, told) = (HashMap::new(), (Stats::default(), false));
                self.members.insert(peer, Member { port, most, inbox, report, requests, told });
            }
            Told::Leave(peer) => self.leave(peer),
            Told::AdapterRead(read) => self.take_adapter(*read),
            Told::Refuse { peer, key, refusal } => {
                if let Some(member) = self.members.get_mut(&peer) {
                    member.report.rejected.push((key, refusal));
                }
            }
            Told::Command(_, Command::ForgetPrefixes) => self.epoch += 1,
            Told::Command(peer, Command::Submit(submission)) => self.submit(peer, *submission),
            Told::Command(peer, Command::Cancel(key, end)) => self.cancel(peer, key, end),
            Told::Command(peer, Command::Sleep(key, how)) => self.tire(peer, key, how),
            Told::Command(peer, Command::Wake(key)) => {
                let woken = self.wake().map_err(|error| Refusal::new(Cause::Internal, error));
                self.done(peer, key, woken);
            }
            Told::Command(peer, Command::LoadAdapter(key, adapter)) => {
                self.want_adapter(Whose { peer, key }, adapter);
            }
            Told::Command(peer, Command::UnloadAdapter(key, name)) => {
                let unloaded = self.unload_adapter(name);
                self.done(peer, key, unloaded.map_err(|error| Refusal::from(&error)));
            }
        }
    }

    /// Has an adapter read, off this thread.
    fn want_adapter(&mut self, whose: Whose, adapter: AdapterPath) {
        let Some(member) = self.members.get(&whose.peer) else { return };
        let inbox = member.inbox.clone();
        let then: Then = Box::new(move |read| {
            let _ = inbox.send(Told::AdapterRead(Box::new(read))); // the engine may be gone
        });
        let asleep = self.standing.asleep.load(Ordering::Acquire);
        if let Err(error) = self.adapters.want(whose, adapter, then, asleep) {
            self.done(whose.peer, whose.key, Err(Refusal::from(&error)));
        }
    }

    /// Loads an adapter that was read, between two steps.
    fn take_adapter(&mut self, read: Read) {
        let Some((whose, loaded)) = self.adapters.was_read(self.engine.as_mut(), read) else {
            return;
        };
        if loaded.is_ok() {
            self.tell_adapters();
        }
        self.done(whose.peer, whose.key, loaded.map_err(|error| Refusal::from(&error)));
    }

    fn unload_adapter(&mut self, name: String) -> Result<(), AdapterRefused> {
        let id = self.adapters.remove(name)?;
        self.engine.iter_mut().for_each(|engine| engine.unload_adapter(id));
        self.tell_adapters();
        Ok(())
    }

    /// Tells all front ends which adapters there are now.
    fn tell_adapters(&mut self) {
        let names = self.adapters.names();
        for member in self.members.values_mut() {
            member.report.adapters = Some(names.clone());
        }
        self.standing.note_adapters(names);
    }

    /// Takes no more requests, to sleep when those that it has are done.
    fn tire(&mut self, peer: u64, key: u64, Sleep { depth, abort }: Sleep) {
        self.standing.asleep.store(true, Ordering::Release);
        let tired = self.tired.get_or_insert_with(|| Tired { depth, waiting: Vec::new() });
        tired.depth = tired.depth.max(depth);
        tired.waiting.push((peer, key));
        if abort {
            let all: Vec<(u64, u64)> = self.owners.values().copied().collect();
            all.into_iter().for_each(|(peer, key)| self.cancel(peer, key, End::Slept));
        }
    }

    fn fall_asleep(&mut self) {
        let Some(Tired { depth, waiting }) = self.tired.take() else { return };
        let stats = self.stats();
        self.before = Stats { used_blocks: 0, total_blocks: 0, ..stats };
        let engine = self.engine.take();
        self.source.put_away(engine, depth);
        waiting.into_iter().for_each(|(peer, key)| self.done(peer, key, Ok(())));
    }

    fn wake(&mut self) -> Result<(), String> {
        for (peer, key) in self.tired.take().into_iter().flat_map(|tired| tired.waiting) {
            let refusal = Refusal::new(Cause::Internal, "it was woken before it slept");
            self.done(peer, key, Err(refusal));
        }
        if self.engine.is_none() {
            let mut engine = self.source.make()?;
            if let Err(error) = self.adapters.restore(&mut engine) {
                self.source.put_away(Some(engine), Depth::Light);
                return Err(error);
            }
            self.engine = Some(engine);
        }
        self.standing.asleep.store(false, Ordering::Release);
        Ok(())
    }

    /// Tells a front end that something was done, or why it was not.
    fn done(&mut self, peer: u64, key: u64, result: Result<(), Refusal>) {
        if let Some(member) = self.members.get_mut(&peer) {
            member.report.done.push((key, result));
        }
    }

    /// How it stands, counted over all that it was.
    fn stats(&self) -> Stats {
        self.engine.as_ref().map_or(self.before, |engine| engine.stats().after(&self.before))
    }

    fn submit(&mut self, peer: u64, submission: Submission) {
        let Submission { key, mut request, adapter, .. } = submission;
        let Some(member) = self.members.get_mut(&peer) else { return };
        if member.requests.contains_key(&key) {
            // Two answers to one name could not be told apart.
            self.standing.malformed.fetch_add(1, Ordering::Relaxed);
            return;
        }
        request.salt ^= self.epoch.wrapping_mul(EPOCH);
        let asleep = self.standing.asleep.load(Ordering::Acquire);
        let full = member.requests.len() >= member.most;
        let refusal = match &mut self.engine {
            _ if self.standing.draining.load(Ordering::Acquire) => {
                Refusal::new(Cause::Draining, "the engine is shutting down")
            }
            Some(engine) if !asleep && !full => {
                let submit = |adapter| Ok(engine.submit(Request { adapter, ..request })?);
                let found = adapter.map(|name| self.adapters.find(name)).transpose();
                match found.and_then(submit) {
                    Ok(id) => {
                        member.requests.insert(key, id);
                        member.report.accepted.push((key, id));
                        self.owners.insert(id, (peer, key));
                        return;
                    }
                    Err(error) => Refusal::from(&error),
                }
            }
            Some(_) if !asleep => {
                Refusal::new(Cause::Busy, "the engine has as many requests as it takes")
            }
            _ => Refusal::new(Cause::Asleep, ASLEEP),
        };
        member.report.rejected.push((key, refusal));
    }

    fn cancel(&mut self, peer: u64, key: u64, end: End) {
        let Some(member) = self.members.get_mut(&peer) else { return };
        if let Some(id) = member.requests.remove(&key) {
            member.report.cancelled.push((id, end));
            self.drop_request(id);
        }
    }

    fn leave(&mut self, peer: u64) {
        let Some(member) = self.members.remove(&peer) else { return };
        self.adapters.leave(peer);
        member.requests.into_values().for_each(|id| self.drop_request(id));
    }

    fn drop_request(&mut self, id: RequestId) {
        self.owners.remove(&id);
        if let Some(engine) = &mut self.engine {
            engine.cancel(id);
        }
    }

    fn step(&mut self) {
        let Some(engine) = &mut self.engine else { return };
        let mut events = std::mem::take(&mut self.events);
        let began = Instant::now();
        let result = engine.step(&mut events);
        let (ended, mut message) = (Instant::now(), None);
        if let Err(error) = result {
            tracing::error!(%error, "a step failed");
            message = Some(error.to_string());
            // Where the engine does not say whose step it was, it was everybody's.
            if !events.iter().any(|e| matches!(e, Event::Finished(_, FinishReason::Failed))) {
                for id in self.owners.keys() {
                    engine.cancel(*id);
                    events.push(Event::Finished(*id, FinishReason::Failed));
                }
            }
        }
        for member in self.members.values_mut() {
            (member.report.took, member.report.ended) = (ended - began, ended);
            member.report.error.clone_from(&message);
            if !member.requests.is_empty() {
                member.report.masks.extend_from_slice(engine.mask_times());
            }
        }
        for event in events.drain(..) {
            let id = event.request();
            let Some(&(peer, key)) = self.owners.get(&id) else { continue };
            let ends = matches!(event, Event::Finished(..));
            if let Some(member) = self.members.get_mut(&peer) {
                member.report.events.push(event);
                if ends {
                    member.requests.remove(&key);
                }
            }
            if ends {
                self.owners.remove(&id);
            }
        }
        self.events = events;
    }

    /// Adds a step to what those are told who have requests.
    fn note(&mut self, step: StepTime) {
        for member in self.members.values_mut() {
            if !member.requests.is_empty() || member.report.says_something() {
                member.report.steps.push(step);
            }
        }
    }

    /// Shows how the engine stands, and sends what happened; where it is `idle`, also to those to whom nothing happened.
    fn publish(&mut self, idle: bool) {
        let stats = self.stats();
        self.standing.note(stats);
        let asleep = self.standing.asleep.load(Ordering::Acquire);
        let mut gone = Vec::new();
        for (peer, member) in &mut self.members {
            let is_new = member.told != (stats, asleep);
            if !(member.report.says_something() || idle && is_new) {
                continue;
            }
            member.told = (stats, asleep);
            let report = std::mem::take(&mut member.report);
            member.report.events.reserve(report.events.len());
            let report = self.standing.told(report);
            if !member.port.send(report) {
                gone.push(*peer);
            }
        }
        for peer in gone {
            self.leave(peer);
        }
    }
}
