//! Sharing blocks of work among rayon's threads.
//!
//! A sleeping worker takes 20 µs to wake and more on a busy machine, and a decode step forks a
//! hundred times with short serial work in between. So [`with_team`] keeps the pool's threads
//! watching for work during a step; they then join within a microsecond.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Runs `f` once for every block in `0..blocks`, in no particular order, on the threads of the
/// current team or, where there is none, of the current rayon pool.
///
/// Threads take blocks one at a time, in ascending order: a worker that comes late or shares its
/// core with another program just takes fewer. Allocates nothing.
pub fn for_each_block<F: Fn(usize) + Sync>(blocks: usize, f: F) {
    let next = AtomicUsize::new(0);
    let drain = || {
        loop {
            let block = next.fetch_add(1, Ordering::Relaxed);
            if block >= blocks {
                return;
            }
            f(block);
        }
    };
    let workers = rayon::current_num_threads().min(blocks);
    if workers <= 1 {
        return drain();
    }
    match TEAM.take() {
        // SAFETY: `with_team` clears the pointer before the team ends.
        Some(team) => unsafe { (*team).run(&drain) },
        None => fork(workers, &drain),
    }
}

/// Calls `f(i, chunk)` for every run of `len` elements of `out`, the last one perhaps shorter, on
/// the threads of [`for_each_block`]. `len` is at least 1.
pub fn for_each_chunk<T: Send, F>(out: &mut [T], len: usize, f: F)
where
    F: Fn(usize, &mut [T]) + Sync,
{
    let (total, len) = (out.len(), len.max(1));
    let start = AtomicPtr::new(out.as_mut_ptr());
    for_each_block(total.div_ceil(len), |i| {
        let at = i * len;
        // SAFETY: blocks are visited once each and cover disjoint ranges within `out`, which is
        // borrowed until all of them are done.
        let chunk = unsafe {
            std::slice::from_raw_parts_mut(
                start.load(Ordering::Relaxed).add(at),
                len.min(total - at),
            )
        };
        f(i, chunk);
    });
}

fn fork(workers: usize, work: &(dyn Fn() + Sync)) {
    if workers <= 1 {
        work();
    } else {
        let half = workers / 2;
        rayon::join(|| fork(workers - half, work), || fork(half, work));
    }
}

/// Runs a step while the current rayon pool's other threads wait, busily, to share its calls of
/// [`for_each_block`]. Allocates nothing.
///
/// Meant for steps of milliseconds, from a thread of the pool (`ThreadPool::install`). The step
/// gets no other help from the pool: rayon's own operations in it run on this thread alone.
pub fn with_team<R: Send>(step: impl FnOnce() -> R + Send) -> R {
    if rayon::current_num_threads() <= 1 || TEAM.get().is_some() {
        return step();
    }
    let team = Team::default();
    let lead = || {
        let _end = OnDrop(|| {
            TEAM.set(None);
            team.closed.store(true, Ordering::Release);
        });
        TEAM.set(Some(&raw const team));
        step()
    };
    rayon::join(lead, || fork(rayon::current_num_threads() - 1, &|| team.serve())).0
}

thread_local! {
    /// The team that this thread leads, if it is not already at work for it.
    static TEAM: Cell<Option<*const Team>> = const { Cell::new(None) };
}

type Work = dyn Fn() + Sync;

#[derive(Default)]
struct Team {
    /// What to help with. Helpers enter and the leader withdraws it under the lock.
    work: Mutex<Option<&'static Work>>,
    /// Counts the works offered, so that waiting helpers need not take the lock.
    offers: AtomicUsize,
    /// Helpers inside `work`.
    helpers: AtomicUsize,
    closed: AtomicBool,
}

impl Team {
    /// Runs `work` here and on every helper that comes before it returns here.
    fn run(&self, work: &(dyn Fn() + Sync)) {
        // SAFETY: only the lifetime changes. `_end` withdraws the reference and waits for those
        // that hold it, also in a panic, before `work` can end.
        let work: &'static Work =
            unsafe { std::mem::transmute::<&(dyn Fn() + Sync), &'static Work>(work) };
        let _end = OnDrop(|| {
            *self.work.lock().unwrap_or_else(PoisonError::into_inner) = None;
            wait(|| self.helpers.load(Ordering::Acquire) == 0);
            TEAM.set(Some(self));
        });
        *self.work.lock().unwrap_or_else(PoisonError::into_inner) = Some(work);
        self.offers.fetch_add(1, Ordering::Release);
        work();
    }

    /// Helps until the team is closed.
    fn serve(&self) {
        let mut seen = 0;
        loop {
            let mut offers = seen;
            wait(|| {
                offers = self.offers.load(Ordering::Acquire);
                offers != seen || self.closed.load(Ordering::Acquire)
            });
            if self.closed.load(Ordering::Acquire) {
                return;
            }
            seen = offers;
            let slot = self.work.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(work) = *slot else { continue };
            self.helpers.fetch_add(1, Ordering::Relaxed);
            let _end = OnDrop(|| _ = self.helpers.fetch_sub(1, Ordering::Release));
            drop(slot);
            work();
        }
    }
}

/// Waits busily, but lets other programs have the core if it takes long.
fn wait(mut done: impl FnMut() -> bool) {
    const SPINS: u32 = 10_000; // about 100 µs
    let mut spins = 0;
    while !done() {
        if spins < SPINS {
            spins += 1;
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}

struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
