//! A counting allocator, and the bound on what an input may make us allocate.

#![allow(dead_code, reason = "no target uses all of it")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call goes to the system allocator unchanged; counting touches atomics only.
// `realloc` is the default, which allocates anew and copies: both blocks are counted, as they may
// both be live.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(live, Relaxed);
        // SAFETY: the caller's promises are those that the system allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes that may be allocated at once: `factor` times the input, and `slack`.
#[derive(Clone, Copy)]
pub struct Bound {
    pub factor: usize,
    pub slack: usize,
}

/// What text may cost.
pub const TEXT: Bound = Bound { factor: 64, slack: 1 << 20 };

/// Runs `f` and panics if it had more allocated at once than `bound` allows for an input of `input`
/// bytes. Set `FUZZ_PEAK` to have every peak printed.
pub fn bounded<T>(what: &str, input: usize, bound: Bound, f: impl FnOnce() -> T) -> T {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let value = f();
    let peak = PEAK.load(Relaxed) - before;
    let limit = bound.factor * input + bound.slack;
    if std::env::var_os("FUZZ_PEAK").is_some() {
        let factor = peak as f64 / input.max(1) as f64;
        eprintln!("{what}: {input} bytes of input, peak {peak}, {factor:.1} times");
    }
    assert!(peak <= limit, "{what}: {peak} bytes for {input} of input, at most {limit} allowed");
    value
}
