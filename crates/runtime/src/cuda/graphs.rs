//! Which steps are recorded as CUDA graphs, and the recordings.

use std::collections::HashMap;

use infernum_ir::Dims;

use super::driver::Graph;

/// Decode steps of at most this many sequences are recorded; larger steps take so long that
/// launching them one by one costs nothing.
const MOST: u64 = 512;

/// What a recording is of: a schedule, and how many sequences it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) schedule: usize,
    pub(super) sequences: u64,
}

/// Recordings made so far.
#[derive(Debug, Default)]
pub(super) struct Graphs(pub(super) HashMap<Key, Graph>);

/// The number of sequences that a recording is made for, so that a few recordings serve every step;
/// `None` for steps that are not recorded. `most` is what the schedule and the plan hold.
pub(super) fn rounded(sequences: u64, most: u64) -> Option<u64> {
    let step = match sequences {
        0..=2 => 1,
        3..=4 => 2,
        5..=8 => 4,
        9..=64 => 8,
        65..=256 => 16,
        257..=MOST => 32,
        _ => return None,
    };
    Some(sequences.next_multiple_of(step).min(most))
}

/// The sizes that launches of a recording have. Contexts change from step to step: what depends on
/// them is taken at its largest.
pub(super) fn dims(sequences: u64, limits: &Dims) -> Dims {
    Dims { t: sequences, b: sequences, s: limits.s, pairs: limits.pairs, seqs: sequences }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_holds_its_steps_and_there_are_few() {
        let mut sizes = Vec::new();
        for n in 1..=MOST {
            let held = rounded(n, MOST).expect("a recorded step");
            assert!(held >= n && held < 2 * n + 1, "{n} in {held}");
            sizes.push(held);
        }
        sizes.dedup();
        assert!(sizes.len() < 40, "{sizes:?}");
        assert_eq!(rounded(60, 60), Some(60));
        assert_eq!(rounded(MOST + 1, 1000), None);
    }
}
