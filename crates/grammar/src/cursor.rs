//! Where texts stand in a grammar, and the threads that work out what may come next.

use std::fmt::{self, Debug};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use infernum_runtime::{Allowed, Constraint, Cursor, Next};
use llguidance::Matcher;
use rayon::ThreadPool;

use crate::Grammar;

/// How long a step waits for what was asked at its beginning, all rows together: most answers take some 50 µs, and a row
/// that is left out of a step loses all of it.
const PATIENCE: Duration = Duration::from_millis(1);

/// A grammar that is ready.
pub(crate) struct Compiled {
    /// Of a text without tokens. Each text has a copy of its own: they share no lock and no cache that grows.
    first: Arc<Mutex<Matcher>>,
    grammar: Grammar,
    workers: Arc<ThreadPool>,
    meter: Arc<Meter>,
}

impl Compiled {
    pub(crate) fn new(
        first: Matcher,
        grammar: Grammar,
        workers: Arc<ThreadPool>,
        meter: Arc<Meter>,
    ) -> Compiled {
        Compiled { first: Arc::new(Mutex::new(first)), grammar, workers, meter }
    }
}

impl Debug for Compiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiled").finish_non_exhaustive()
    }
}

impl Constraint for Compiled {
    fn begin(&self, jumps: bool) -> Box<dyn Cursor> {
        let (workers, meter) = (self.workers.clone(), self.meter.clone());
        let mut text = Text { workers, meter, jumps, desk: Arc::default(), asked: Instant::now() };
        let first = self.first.clone();
        text.ask(move |_| Some(locked(&first).deep_clone()), None);
        Box::new(text)
    }

    fn written(&self) -> Option<String> {
        serde_json::to_string(&self.grammar).ok()
    }
}

/// A text.
struct Text {
    workers: Arc<ThreadPool>,
    meter: Arc<Meter>,
    /// Whether forced tokens are told.
    jumps: bool,
    desk: Arc<Desk>,
    /// When it was asked what may come.
    asked: Instant,
}

/// What passes between a text and those who work for it.
#[derive(Default)]
struct Desk {
    state: Mutex<DeskState>,
    ready: Condvar,
}

#[derive(Default)]
struct DeskState {
    /// With whoever works, while somebody does.
    matcher: Option<Matcher>,
    next: Option<Next>,
}

impl Text {
    /// Has somebody work out what may come after a token.
    fn ask(
        &mut self,
        matcher: impl FnOnce(&Desk) -> Option<Matcher> + Send + 'static,
        token: Option<u32>,
    ) {
        self.asked = Instant::now();
        let (desk, meter, jumps) = (self.desk.clone(), self.meter.clone(), self.jumps);
        self.workers.spawn(move || {
            let unknown = Next { forced: Vec::new(), then: Allowed::Unknown };
            // Whoever waits must hear of it, whatever happens.
            let worked = catch_unwind(AssertUnwindSafe(|| {
                let start = Instant::now();
                let mut matcher = matcher(&desk)?;
                let next = next(&mut matcher, token, jumps);
                meter.note(start.elapsed());
                Some((matcher, next))
            }));
            let mut state = locked(&desk.state);
            match worked.ok().flatten() {
                Some((matcher, next)) => {
                    *state = DeskState { matcher: Some(matcher), next: Some(next) }
                }
                None => *state = DeskState { matcher: None, next: Some(unknown) },
            }
            desk.ready.notify_all();
        });
    }
}

impl Cursor for Text {
    fn next(&mut self, wait: bool) -> Option<Next> {
        let mut state = locked(&self.desk.state);
        while state.next.is_none() {
            let left = PATIENCE.saturating_sub(self.asked.elapsed());
            if wait {
                state = self.desk.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
            } else if left.is_zero() {
                break;
            } else {
                let waited = self.desk.ready.wait_timeout(state, left);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        state.next.take()
    }

    fn advance(&mut self, token: u32) {
        self.ask(|desk| locked(&desk.state).matcher.take(), Some(token));
    }
}

/// What may come after a token.
fn next(matcher: &mut Matcher, token: Option<u32>, jumps: bool) -> Next {
    let unknown = |forced| Next { forced, then: Allowed::Unknown };
    if token.is_some_and(|token| matcher.consume_token(token).is_err()) {
        return unknown(Vec::new());
    }
    let forced = if jumps { matcher.consume_ff_tokens() } else { Vec::new() };
    if matcher.is_stopped() {
        let then = if matcher.stop_reason().is_ok() { Allowed::Nothing } else { Allowed::Unknown };
        return Next { forced, then };
    }
    match matcher.compute_mask() {
        Ok(mask) => {
            let words = mask.len().div_ceil(32).min(mask.as_slice().len());
            Next { forced, then: Allowed::Tokens(mask.as_slice()[..words].to_vec()) }
        }
        // It may be known by now that nothing can come.
        Err(_) if matcher.stop_reason().is_ok() && matcher.is_stopped() => {
            Next { forced, then: Allowed::Nothing }
        }
        Err(_) => unknown(forced),
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Times, counted by their size: four sizes to each power of two of nanoseconds.
pub(crate) struct Meter([AtomicU64; 256]);

impl Default for Meter {
    fn default() -> Meter {
        Meter(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Meter {
    fn note(&self, time: Duration) {
        let nanos = time.as_nanos().max(1) as f64;
        let size = (nanos.log2() * 4.0) as usize;
        self.0[size.min(255)].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn timings(&self) -> Timings {
        let counts: Vec<u64> = self.0.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let count: u64 = counts.iter().sum();
        let within = |part: f64| {
            let mut left = (count as f64 * part) as u64;
            let size = counts.iter().position(|of| {
                let found = *of > left;
                left = left.saturating_sub(*of);
                found
            });
            let nanos = size.map_or(0.0, |size| ((size as f64 + 1.0) / 4.0).exp2());
            Duration::from_nanos(nanos as u64)
        };
        Timings { count, p50: within(0.5), p99: within(0.99) }
    }
}

/// What it took to work out what may come next, rounded up by a fifth at most.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timings {
    /// How often it was worked out.
    pub count: u64,
    /// Half of them took no longer.
    pub p50: Duration,
    /// 99 of 100 took no longer.
    pub p99: Duration,
}
