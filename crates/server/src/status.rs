//! How an engine stands, as one front end sees it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use infernum_link::{Facts, Report};
use infernum_runtime::Stats;

use super::metrics::Counted;

/// Steps that may fail one after the other before the model counts as sick.
const SICK: u32 = 3;

/// How an engine stands, for everybody to see.
pub(crate) struct Status {
    /// Whether it is there.
    alive: AtomicBool,
    /// Whether it takes no more requests.
    draining: AtomicBool,
    /// Whether it takes none until it is woken.
    asleep: AtomicBool,
    /// Steps that failed since the last that did not.
    failures: AtomicU32,
    stats: Mutex<Known>,
    /// Messages that it could not read.
    malformed: AtomicU64,
    /// Requests handed over that have not ended.
    inflight: Arc<AtomicUsize>,
    /// Those that have not started.
    pub(super) waiting: Arc<AtomicUsize>,
    /// Recent time from start to end of a request, in milliseconds.
    service_ms: AtomicU32,
    /// Requests that run together, and that may wait.
    running: AtomicUsize,
    queue: AtomicUsize,
    /// What may wait as far as this front end is concerned.
    most_waiting: usize,
    /// Its adapters, by name, in the order of their loading; while it is gone, those that it had.
    adapters: RwLock<Vec<String>>,
}

/// What is known of an engine's counters: they begin anew with each start of it.
#[derive(Default)]
struct Known {
    instance: u64,
    now: Stats,
    /// Of those that were there before.
    before: Stats,
}

/// The queue is full.
#[derive(Debug)]
pub(crate) struct Busy;

impl Status {
    /// Of an engine that runs so many requests together, beside which so many may wait.
    pub(super) fn new(running: usize, queue: usize) -> Status {
        Status {
            alive: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            failures: AtomicU32::new(0),
            stats: Mutex::default(),
            malformed: AtomicU64::new(0),
            inflight: Arc::default(),
            waiting: Arc::default(),
            service_ms: AtomicU32::new(1000),
            running: AtomicUsize::new(running),
            queue: AtomicUsize::new(queue),
            most_waiting: queue,
            adapters: RwLock::default(),
        }
    }

    /// The engine comes, for the first time or again; `instance` tells one start of it from another. It is there when it has
    /// said [which adapters](Status::has) it has: a name may mean none, or other files, than before.
    pub(super) fn arrived(&self, instance: u64, facts: &Facts) {
        let mut known = self.known();
        if known.instance != instance {
            let Known { now, before, .. } = *known;
            *known = Known { instance, now: Stats::default(), before: now.after(&before) };
        }
        drop(known);
        self.running.store(facts.sequences, Ordering::Relaxed);
        self.queue.store(facts.queue.min(self.most_waiting), Ordering::Relaxed);
        self.failures.store(0, Ordering::Release);
        self.draining.store(false, Ordering::Release);
        self.asleep.store(false, Ordering::Release);
    }

    /// The engine is there, and has these adapters.
    pub(super) fn has(&self, adapters: Vec<String>) {
        *self.adapters.write().unwrap_or_else(PoisonError::into_inner) = adapters;
        self.alive.store(true, Ordering::Release);
    }

    /// The engine is gone.
    pub(super) fn lost(&self) {
        self.alive.store(false, Ordering::Release);
        let mut known = self.known();
        let (running, waiting, used_blocks, total_blocks) = (0, 0, 0, 0);
        known.now = Stats { running, waiting, used_blocks, total_blocks, ..known.now };
    }

    /// Notes how the engine stands after a step.
    pub(super) fn note(&self, report: &Report) {
        self.known().now = report.stats;
        self.malformed.store(report.malformed, Ordering::Relaxed);
        self.draining.store(report.draining, Ordering::Release);
        self.asleep.store(report.asleep, Ordering::Release);
        if let Some(adapters) = &report.adapters {
            self.has(adapters.clone());
        }
        if report.error.is_some() {
            self.failures.fetch_add(1, Ordering::AcqRel);
        } else if !report.events.is_empty() {
            self.failures.store(0, Ordering::Release);
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether requests are under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.inflight.load(Ordering::Acquire) > 0
    }

    /// Whether it is there and takes requests.
    pub(crate) fn takes(&self) -> bool {
        self.alive() && !self.draining.load(Ordering::Acquire) && !self.asleep()
    }

    /// Whether it sleeps, or is about to.
    pub(crate) fn asleep(&self) -> bool {
        self.asleep.load(Ordering::Acquire)
    }

    /// Whether it is there.
    pub(crate) fn alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// Whether it is there, and steps succeed.
    pub(crate) fn healthy(&self) -> bool {
        self.alive() && self.failures.load(Ordering::Acquire) < SICK
    }

    /// Its adapters, by name.
    pub(crate) fn adapters(&self) -> Vec<String> {
        self.adapters.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether it has the adapter, where one is named.
    pub(crate) fn serves(&self, adapter: Option<&str>) -> bool {
        let known = self.adapters.read().unwrap_or_else(PoisonError::into_inner);
        adapter.is_none_or(|name| known.iter().any(|known| known == name))
    }

    /// Messages that the engine could not read.
    pub(crate) fn malformed(&self) -> u64 {
        self.malformed.load(Ordering::Relaxed)
    }

    /// How the engine stood after its last step; counters count on where it was started anew.
    pub(crate) fn stats(&self) -> Stats {
        let known = self.known();
        known.now.after(&known.before)
    }

    /// Requests handed over that the engine has not counted yet.
    pub(crate) fn queued(&self) -> usize {
        let stats = self.stats();
        self.inflight.load(Ordering::Acquire).saturating_sub(stats.running + stats.waiting)
    }

    /// Requests that it has, of this front end and of others.
    pub(crate) fn load(&self) -> usize {
        let stats = self.stats();
        self.inflight.load(Ordering::Acquire).max(stats.running + stats.waiting)
    }

    /// The most requests that can be under way.
    pub(crate) fn room(&self) -> usize {
        self.running.load(Ordering::Relaxed) + self.queue.load(Ordering::Relaxed)
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

    /// Takes room for `n` requests where no more than may run and wait are under way and the engine has no
    /// queue of its own.
    pub(super) fn admit(&self, n: usize) -> Result<Vec<Counted>, Busy> {
        let (queue, all) = (self.queue.load(Ordering::Relaxed), self.room());
        let waiting = self.waiting.load(Ordering::Acquire);
        if waiting > 0 && waiting >= queue && self.stats().waiting >= queue.max(1) {
            return Err(Busy);
        }
        let add = |count: usize| count.checked_add(n).filter(|count| *count <= all);
        self.inflight.fetch_update(Ordering::AcqRel, Ordering::Acquire, add).map_err(|_| Busy)?;
        Ok((0..n).map(|_| Counted::holding(&self.inflight)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_taken_and_given_back() {
        let status = Status::new(2, 1);
        let rooms = status.admit(3).expect("there is room");
        assert!(status.admit(1).is_err());
        drop(rooms);
        assert!(status.admit(4).is_err(), "never all at once");
        assert!(status.admit(3).is_ok());
        assert!(!status.is_busy());
    }

    #[test]
    fn a_queue_of_the_engines_own_counts() {
        let full = |queue| {
            let status = Status::new(100, queue);
            let _waiting: Vec<Counted> = (0..2).map(|_| Counted::one(&status.waiting)).collect();
            assert!(status.admit(1).is_ok(), "the engine may take them yet");
            let stats = Stats { waiting: 2, ..Stats::default() };
            status.note(&Report { stats, ..Report::default() });
            status.admit(1).is_err()
        };
        assert!(full(2) && !full(3));
    }

    #[test]
    fn counters_count_on_over_a_start_of_the_engine_and_adapters_are_its_own() {
        let status = Status::new(1, 1);
        let report = |steps, running| Report {
            stats: Stats { steps, running, ..Stats::default() },
            ..Report::default()
        };
        let facts = Facts {
            max_length: 1,
            vocab: 1,
            width: 1,
            blocks: 1,
            sequences: 1,
            queue: 1,
            family: String::new(),
            format: String::new(),
            bytes: 0,
            on: String::new(),
        };
        let told = |adapters: &[&str]| Report {
            adapters: Some(adapters.iter().map(|&name| name.to_owned()).collect()),
            ..Report::default()
        };
        status.arrived(7, &facts);
        assert!(!status.alive(), "it has not said which adapters it has");
        status.note(&told(&["a"]));
        assert!(status.takes() && status.serves(Some("a")) && !status.serves(Some("b")));
        status.note(&report(10, 3));
        status.lost();
        assert_eq!((status.stats().steps, status.stats().running), (10, 0));
        // The same one, over another connection.
        status.arrived(7, &facts);
        status.note(&report(12, 1));
        assert_eq!(status.stats().steps, 12);
        status.lost();
        status.arrived(8, &facts);
        status.note(&report(2, 1));
        assert!(!status.takes() && status.serves(Some("a")), "it may have others now");
        status.note(&told(&["b"]));
        status.note(&report(2, 1));
        assert!(status.takes() && !status.serves(Some("a")) && status.serves(Some("b")));
        assert_eq!((status.stats().steps, status.stats().running), (14, 1));
    }
}
