//! Where texts stand in a grammar, and the threads that work out what may come next.

use std::fmt::{self, Debug};
use std::panic::{AssertUnwindSafe, catch_unwind};
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
}

impl Compiled {
    pub(crate) fn new(first: Matcher, grammar: Grammar, workers: Arc<ThreadPool>) -> Compiled {
        Compiled { first: Arc::new(Mutex::new(first)), grammar, workers }
    }
}

impl Debug for Compiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiled").finish_non_exhaustive()
    }
}

impl Constraint for Compiled {
    fn begin(&self, jumps: bool) -> Box<dyn Cursor> {
        let workers = self.workers.clone();
        let mut text = Text { workers, jumps, desk: Arc::default(), asked: Instant::now() };
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
        let (desk, jumps) = (self.desk.clone(), self.jumps);
        self.workers.spawn(move || {
            let start = Instant::now();
            let as_told = |(forced, then)| Next { forced, then, took: start.elapsed() };
            // Whoever waits must hear of it, whatever happens.
            let worked = catch_unwind(AssertUnwindSafe(|| {
                let mut matcher = matcher(&desk)?;
                let next = as_told(next(&mut matcher, token, jumps));
                Some((matcher, next))
            }));
            let mut state = locked(&desk.state);
            *state = if let Some((matcher, next)) = worked.ok().flatten() {
                DeskState { matcher: Some(matcher), next: Some(next) }
            } else {
                let unknown = as_told((Vec::new(), Allowed::Unknown));
                DeskState { matcher: None, next: Some(unknown) }
            };
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

/// What may come after a token: what is certain, and what may follow it.
fn next(matcher: &mut Matcher, token: Option<u32>, jumps: bool) -> (Vec<u32>, Allowed) {
    if token.is_some_and(|token| matcher.consume_token(token).is_err()) {
        return (Vec::new(), Allowed::Unknown);
    }
    let forced = if jumps { matcher.consume_ff_tokens() } else { Vec::new() };
    if matcher.is_stopped() {
        let complete = matcher.stop_reason().is_ok();
        return (forced, if complete { Allowed::Nothing } else { Allowed::Unknown });
    }
    match matcher.compute_mask() {
        Ok(mask) => {
            let words = mask.len().div_ceil(32).min(mask.as_slice().len());
            (forced, Allowed::Tokens(mask.as_slice()[..words].to_vec()))
        }
        // It may be known by now that nothing can come.
        Err(_) if matcher.stop_reason().is_ok() && matcher.is_stopped() => {
            (forced, Allowed::Nothing)
        }
        Err(_) => (forced, Allowed::Unknown),
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
