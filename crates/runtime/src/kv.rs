//! The paged KV cache's bookkeeping: which block belongs to which sequence.

/// Hands out the cache's blocks. A block is free or owned by one sequence, never both.
#[derive(Clone, Debug)]
pub struct BlockPool {
    free: Vec<u32>,
    total: usize,
    block_size: usize,
}

impl BlockPool {
    /// A pool of `total` free blocks of `block_size` tokens.
    pub fn new(total: usize, block_size: usize) -> BlockPool {
        // The lowest block is handed out first.
        let free = (0..total as u32).rev().collect();
        BlockPool { free, total, block_size: block_size.max(1) }
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks that nobody owns.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// All blocks.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Grows `blocks` until it holds `tokens` tokens; false, changing nothing, where the pool has
    /// too few.
    pub fn grow(&mut self, blocks: &mut Vec<u32>, tokens: usize) -> bool {
        let missing = tokens.div_ceil(self.block_size).saturating_sub(blocks.len());
        if missing > self.free.len() {
            return false;
        }
        blocks.extend(self.free.drain(self.free.len() - missing..).rev());
        true
    }

    /// Takes a sequence's blocks back.
    pub fn release(&mut self, blocks: &mut Vec<u32>) {
        self.free.extend(blocks.drain(..).rev());
        debug_assert!(self.free.len() <= self.total, "a block was released twice");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever sequences do, every block has one owner at a time and none is lost.
        #[test]
        fn blocks_are_neither_shared_nor_lost(
            steps in prop::collection::vec((0..6usize, 0..80usize), 1..200)
        ) {
            let mut pool = BlockPool::new(20, 8);
            let mut sequences: Vec<Vec<u32>> = vec![Vec::new(); 6];
            for (who, tokens) in steps {
                if tokens == 0 {
                    pool.release(&mut sequences[who]);
                } else {
                    let before = (pool.free(), sequences[who].clone());
                    let grown = pool.grow(&mut sequences[who], tokens);
                    if grown {
                        prop_assert!(sequences[who].len() * 8 >= tokens);
                    } else {
                        prop_assert_eq!(before, (pool.free(), sequences[who].clone()));
                    }
                }
                let mut all: Vec<u32> = sequences.concat();
                all.extend(&pool.free);
                all.sort_unstable();
                prop_assert_eq!(all, (0..20).collect::<Vec<u32>>());
            }
        }
    }
}
