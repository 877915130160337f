//! What a sequence holds of the cache.

use super::kv::BlockPool;

/// What a sequence holds of one group.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// Its table of blocks; of a slot, the blocks that the next step writes to.
    pub(super) blocks: Vec<u32>,
    /// How many at the table's beginning were given back: they may be anyone's.
    pub(super) gone: usize,
    /// Of a slot: what the next step reads, if that is not what it writes to. Others may read it, too.
    pub(super) read: Vec<u32>,
    /// Of a slot: states after so many rows that the sequence has left, until those rows are known to hold.
    pub(super) left: Vec<(usize, Vec<u32>)>,
}

impl Held {
    /// Gives what a table has beyond `left` blocks back.
    pub(super) fn shrink(&mut self, pool: &mut BlockPool, left: usize) {
        while self.blocks.len() > left {
            let block = self.blocks.pop();
            block
                .into_iter()
                .filter(|_| self.blocks.len() >= self.gone)
                .for_each(|b| pool.release(b));
        }
        self.gone = self.gone.min(left);
    }

    /// Gives all blocks of a slot back.
    pub(super) fn release_slot(&mut self, pool: &mut BlockPool) {
        pool.release_all(&mut self.blocks);
        pool.release_all(&mut self.read);
        self.left.drain(..).for_each(|(_, mut blocks)| pool.release_all(&mut blocks));
    }
}
