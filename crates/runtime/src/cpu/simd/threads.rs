//! Sharing blocks of work among rayon's threads.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs `f` once for every block in `0..blocks`, in no particular order, on the threads of the
/// current rayon pool.
///
/// Threads take blocks one at a time, in ascending order: a worker that wakes late or runs on a
/// busy core just takes fewer. Allocates nothing. Call it on a thread of the pool
/// (`ThreadPool::install` around the whole step), or each call pays a hand-over between threads.
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
    fork(rayon::current_num_threads().min(blocks), &drain);
}

fn fork(workers: usize, work: &(dyn Fn() + Sync)) {
    if workers <= 1 {
        work();
    } else {
        let half = workers / 2;
        rayon::join(|| fork(workers - half, work), || fork(half, work));
    }
}
