//! Weights' pages are read from the disk while others are loaded already, so that neither disk nor host waits for the other.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use infernum_frontend_hf::{Bytes, Checkpoint};

use crate::progress::{Progress, Stage};

/// Most threads that read. A disk is busy with these, and page faults of more would queue behind one another.
const THREADS: usize = 4;
/// What a thread takes at a time, in bytes: files are read from their beginnings on.
const PIECE: usize = 16 << 20;
const PAGE: usize = 4096;

/// Reads a checkpoint's files in their order, `most` bytes of them at most, while `load` runs, whose result is this one's. Where
/// that is an error nothing more is read; else everything is when this returns, so that no step waits for the disk. Pages
/// that the system has already take no time.
pub(crate) fn while_loading<T, E>(
    checkpoint: &Checkpoint,
    most: u64,
    progress: &(dyn Fn(Progress<'_>) + Sync),
    load: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let files: Vec<Bytes> =
        (0..checkpoint.file_count()).filter_map(|i| checkpoint.file_bytes(i)).collect();
    let files: Vec<&[u8]> = files.iter().map(|file| &**file).collect();
    read_while(&files, most, progress, load)
}

fn read_while<T, E>(
    files: &[&[u8]],
    most: u64,
    progress: &(dyn Fn(Progress<'_>) + Sync),
    load: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let mut left = usize::try_from(most).unwrap_or(usize::MAX);
    let pieces = files.iter().flat_map(|file| file.chunks(PIECE));
    let pieces: Vec<&[u8]> = pieces
        .map_while(|piece| {
            left = left.checked_sub(piece.len())?;
            Some(piece)
        })
        .collect();
    let total = pieces.iter().map(|piece| piece.len() as u64).sum();
    progress(Progress::Begin { stage: Stage::Weights, total });
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let read = || {
        while !stop.load(Ordering::Relaxed)
            && let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed))
        {
            let sum = piece.iter().step_by(PAGE).fold(0u8, |sum, byte| sum.wrapping_add(*byte));
            std::hint::black_box(sum);
            progress(Progress::Advance(piece.len() as u64));
        }
    };
    // A thread that panics has the scope panic when it ends.
    let loaded = thread::scope(|scope| {
        for _ in 0..THREADS.min(pieces.len()) {
            let thread = thread::Builder::new().name("read-ahead".to_owned());
            if let Err(error) = thread.spawn_scoped(scope, read) {
                let text = format!("weights are read without a thread of their own: {error}");
                progress(Progress::Notice(&text));
                break;
            }
        }
        // Also where it panics, or threads would go on reading for nobody.
        let stopping = Stopping(&stop);
        let loaded = load();
        if loaded.is_ok() {
            std::mem::forget(stopping);
        }
        loaded
    });
    progress(Progress::End);
    loaded
}

/// Has readers stop when it is dropped.
struct Stopping<'a>(&'a AtomicBool);

impl Drop for Stopping<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicU64;

    use super::*;

    /// What was told: the stage's bytes, those that were read, and how often it began and ended.
    #[derive(Default)]
    struct Told {
        total: AtomicU64,
        read: AtomicU64,
        ends: Mutex<Vec<&'static str>>,
    }

    impl Told {
        fn hear(&self, progress: Progress<'_>) {
            match progress {
                Progress::Begin { total, .. } => {
                    self.total.store(total, Ordering::Relaxed);
                    self.ends.lock().unwrap().push("begin");
                }
                Progress::Advance(by) => drop(self.read.fetch_add(by, Ordering::Relaxed)),
                Progress::End => self.ends.lock().unwrap().push("end"),
                Progress::Warning(_) | Progress::Notice(_) => {}
            }
        }

        fn bytes(&self) -> (u64, u64) {
            (self.total.load(Ordering::Relaxed), self.read.load(Ordering::Relaxed))
        }
    }

    #[test]
    fn all_is_read_once_loading_is_over() {
        let files = [vec![1; 3 * PIECE + 5], Vec::new(), vec![2; 7]];
        let files: Vec<&[u8]> = files.iter().map(|f| &f[..]).collect();
        let told = Told::default();
        let loaded = read_while(&files, u64::MAX, &|p| told.hear(p), || Ok::<_, ()>(5));
        let all = 3 * PIECE as u64 + 12;
        assert_eq!((loaded, told.bytes()), (Ok(5), (all, all)));
        assert_eq!(*told.ends.lock().unwrap(), ["begin", "end"]);
    }

    #[test]
    fn no_more_is_read_than_there_is_memory_for() {
        let file = vec![1; 4 * PIECE];
        let told = Told::default();
        let most = 2 * PIECE as u64 + 9;
        read_while(&[&file], most, &|p| told.hear(p), || Ok::<_, ()>(())).unwrap();
        assert_eq!(told.bytes(), (2 * PIECE as u64, 2 * PIECE as u64));
    }

    #[test]
    fn an_error_of_loading_comes_back_and_ends_reading() {
        let files = vec![1; 2 * PIECE];
        // So many pieces that they take a while, of the same memory.
        let files = vec![&files[..]; 500];
        let told = Told::default();
        let failed = read_while(&files, u64::MAX, &|p| told.hear(p), || Err::<(), _>("broken"));
        let (total, read) = told.bytes();
        assert_eq!(failed, Err("broken"));
        assert!(read < total, "{read} of {total}");
        assert_eq!(*told.ends.lock().unwrap(), ["begin", "end"]);
    }

    #[test]
    fn a_reader_that_panics_is_not_passed_over() {
        let file = vec![1; 10];
        let told = |p: Progress<'_>| assert!(!matches!(p, Progress::Advance(_)), "told");
        let run = || read_while(&[&file], u64::MAX, &told, || Ok::<_, ()>(()));
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).expect_err("a panic");
    }
}
