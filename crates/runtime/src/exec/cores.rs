//! Work of loading, shared among the host's cores.

use std::sync::{Mutex, PoisonError};
use std::thread;

/// Calls `f` for every item, on all cores: each takes the next one as soon as it is done with the one before.
pub(crate) fn on_all_cores<T: Send>(items: Vec<T>, f: impl Fn(T) + Sync) {
    let workers = thread::available_parallelism().map_or(1, usize::from).min(items.len());
    if workers <= 1 {
        return items.into_iter().for_each(f);
    }
    let work = Mutex::new(items.into_iter());
    let next = || work.lock().unwrap_or_else(PoisonError::into_inner).next();
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(item) = next() {
                    f(item);
                }
            });
        }
    });
}
