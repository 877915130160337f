//! How much is to run together.

use infernum_runtime::{GroupKind, StepInputs, longest_sequence, most_blocks};

use crate::error::Error;

/// The largest step that is wanted, and the cache behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Sequences that run together.
    pub sequences: u64,
    /// Tokens of the longest one, prompt and output.
    pub max_length: u64,
    /// Blocks of the KV cache; enough for all sequences at their longest when `None`.
    pub kv_blocks: Option<usize>,
}

impl Capacity {
    /// So many sequences, each with room in the cache for so many tokens.
    pub fn new(sequences: u64, max_length: u64) -> Capacity {
        Capacity { sequences, max_length, kv_blocks: None }
    }

    /// One sequence.
    pub fn one(max_length: u64) -> Capacity {
        Capacity::new(1, max_length)
    }

    /// Refuses what no machine holds, and what positions and rows are too short to count.
    pub(crate) fn check(self, chunk: usize) -> Result<(), Error> {
        const SEQUENCES: u64 = 1 << 20;
        const CHUNK: u64 = 1 << 24;
        /// Positions are 32 bits with a sign.
        const LENGTH: u64 = i32::MAX as u64;
        let sizes = [
            ("sequences", self.sequences, SEQUENCES),
            ("tokens of a sequence", self.max_length, LENGTH),
            ("tokens of a chunk", chunk as u64, CHUNK),
        ];
        match sizes.into_iter().find(|(_, found, most)| *found == 0 || found > most) {
            Some((what, found, most)) => Err(Error::Capacity { what, found, most }),
            None => Ok(()),
        }
    }

    /// Blocks of the KV cache that it takes, whose layers form these groups, in steps of at most `chunk` rows of a
    /// sequence.
    pub fn blocks(self, groups: &[GroupKind], chunk: usize) -> usize {
        let tokens = usize::try_from(self.max_length).unwrap_or(usize::MAX);
        let each = most_blocks(groups, tokens, StepInputs::BLOCK_SIZE, chunk);
        let sequences = usize::try_from(self.sequences).unwrap_or(usize::MAX);
        self.kv_blocks.unwrap_or_else(|| each.saturating_mul(sequences))
    }

    /// Tokens of the longest sequence that a cache of so many blocks holds.
    pub fn longest(self, groups: &[GroupKind], chunk: usize, blocks: usize) -> usize {
        let most = usize::try_from(self.max_length).unwrap_or(usize::MAX);
        longest_sequence(groups, blocks, StepInputs::BLOCK_SIZE, chunk, most)
    }
}
