//! Which steps are recorded as CUDA graphs, and the recordings.

use std::collections::HashMap;
use std::sync::Arc;

use infernum_codegen::Asks;
use infernum_ir::Dims;

use super::deferred::Launches;
use super::driver::{Graph, capture};
use super::exec::CudaExecutor;
use super::parts::PartDims;
use crate::exec::ExecError;

/// Decode steps of at most this many sequences are recorded; larger steps take so long that
/// launching them one by one costs nothing.
const MOST: u64 = 512;

/// What a recording is of: launches of a schedule, and how many sequences it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) schedule: usize,
    pub(super) launches: Launches,
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

impl CudaExecutor {
    /// The recording for a decode step; `None` if such steps are launched one by one.
    pub(super) fn key(&self, sequences: u64, asks: Asks, launches: Launches) -> Option<Key> {
        let plan = &self.core.plan;
        let schedule = plan.schedule_for(sequences, true, asks)?;
        let most = plan.schedules[schedule].bucket.max.min(plan.limits.t).min(plan.limits.seqs);
        let sequences = rounded(sequences, most)?;
        Some(Key { schedule, launches, sequences })
    }

    /// The smallest recording for more sequences that is not there yet.
    pub(super) fn missing(&self, key: Key, asks: Asks) -> Option<Key> {
        let larger = |key: &Key| {
            let next = key.sequences + 1;
            (next <= self.core.plan.limits.seqs)
                .then(|| self.key(next, asks, key.launches))
                .flatten()
        };
        let mut all = std::iter::successors(larger(&key), larger);
        all.find(|key| !self.graphs.0.contains_key(key))
    }

    /// Records a step, unless it is already.
    pub(super) fn record(&mut self, key: Key) -> Result<(), ExecError> {
        if self.graphs.0.contains_key(&key) {
            return Ok(());
        }
        let core = &mut self.core;
        let full = dims(key.sequences, &core.plan.limits);
        // Libraries choose algorithms when first asked, which cannot be recorded.
        core.prepare(key.schedule, &full)?;
        let (gpu, stream) = (Arc::clone(&core.gpu), core.stream.raw);
        let decoding = PartDims::decoding(full);
        let graph = capture(&gpu, stream, || core.calls(key.schedule, &decoding, key.launches))?;
        self.graphs.0.insert(key, graph);
        Ok(())
    }
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
