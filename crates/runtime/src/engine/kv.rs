//! The paged KV cache's bookkeeping: which sequences a block belongs to, and what it holds.

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;

/// What a block's rows depend on besides its tokens: all tokens before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Prefix {
    /// Nothing: it is a sequence's first block. Those of one salt are shared.
    Root(u64),
    /// The block that was [kept](BlockPool::keep) under this name, and what that depends on.
    After(u64),
}

/// Hands out the cache's blocks and counts who uses each. A full block can be kept for others that
/// begin the same: it then is found by its tokens and what goes before them, and shared without a
/// copy. What is kept and unused is given to others when nothing else is free, the longest unused
/// first.
///
/// Names of kept blocks are never used again and tokens are compared, so that two different
/// prefixes can never be taken for one another.
#[derive(Clone, Debug)]
pub struct BlockPool {
    block_size: usize,
    /// Blocks that are handed out together, side by side.
    run: usize,
    free: Vec<u32>,
    users: Vec<u32>,
    kept: Vec<Option<Kept>>,
    /// Tokens of each kept block.
    tokens: Vec<u32>,
    found: HashTable<u32>,
    hasher: RandomState,
    unused: Unused,
    next_name: u64,
}

#[derive(Clone, Copy, Debug)]
struct Kept {
    name: u64,
    after: Prefix,
    hash: u64,
}

impl BlockPool {
    /// A pool of `total` free blocks of `block_size` tokens.
    pub fn new(total: usize, block_size: usize) -> BlockPool {
        BlockPool::of_runs(total, block_size, 1)
    }

    /// As [`BlockPool::new`], but blocks are handed out `run` at a time, side by side; what does not
    /// fill a run is left out.
    pub fn of_runs(total: usize, block_size: usize, run: usize) -> BlockPool {
        let (run, block_size) = (run.max(1), block_size.max(1));
        let total = total - total % run;
        BlockPool {
            block_size,
            run,
            // The lowest block is handed out first.
            free: (0..total as u32).step_by(run).rev().collect(),
            users: vec![0; total],
            kept: vec![None; total],
            tokens: vec![0; total * block_size],
            found: HashTable::with_capacity(total),
            hasher: RandomState::new(),
            unused: Unused::new(total),
            next_name: 0,
        }
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks that no sequence uses.
    pub fn free(&self) -> usize {
        self.free.len() * self.run + self.unused.len
    }

    /// All blocks.
    pub fn total(&self) -> usize {
        self.users.len()
    }

    /// Blocks that a sequence of `tokens` tokens takes.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size).next_multiple_of(self.run)
    }

    /// Grows `blocks` until it holds `tokens` tokens; false, changing nothing, where the pool has
    /// too few.
    pub fn grow(&mut self, blocks: &mut Vec<u32>, tokens: usize) -> bool {
        let missing = self.blocks_for(tokens).saturating_sub(blocks.len());
        if missing > self.free() {
            return false;
        }
        for _ in 0..missing / self.run {
            let Some(first) = self.free.pop().or_else(|| self.evict()) else { return false };
            for block in first..first + self.run as u32 {
                self.users[block as usize] = 1;
                blocks.push(block);
            }
        }
        true
    }

    /// Takes the last blocks of a sequence back until so many tokens' are left.
    pub fn shrink(&mut self, blocks: &mut Vec<u32>, tokens: usize) {
        let left = self.blocks_for(tokens).min(blocks.len());
        for block in blocks.drain(left..).rev() {
            self.release_one(block);
        }
    }

    /// The name under which a block is kept.
    pub fn name(&self, block: u32) -> Option<u64> {
        self.kept.get(block as usize)?.map(|kept| kept.name)
    }

    /// Takes a sequence's blocks back, as far as no other uses them.
    pub fn release(&mut self, blocks: &mut Vec<u32>) {
        // The last first: of a prefix, what fewer share is given away sooner.
        while let Some(block) = blocks.pop() {
            self.release_one(block);
        }
    }

    fn release_one(&mut self, block: u32) {
        let users = &mut self.users[block as usize];
        debug_assert!(*users > 0, "block {block} was released twice");
        *users = users.saturating_sub(1);
        if *users > 0 {
            return;
        }
        if self.kept[block as usize].is_some() {
            self.unused.push(block);
        } else if (block as usize).is_multiple_of(self.run) {
            self.free.push(block);
        }
    }

    /// The block that holds `tokens` after `after`, for one more user, and its name.
    pub fn share(&mut self, after: Prefix, tokens: &[u32]) -> Option<(u32, u64)> {
        let (block, name) = self.find(self.hash(after, tokens), after, tokens)?;
        if self.users[block as usize] == 0 {
            self.unused.remove(block);
        }
        self.users[block as usize] += 1;
        Some((block, name))
    }

    /// Keeps a full block of one user for others, now and when it is released. Where there is one of
    /// the same contents, that is what the user goes on with: the block to use, and its name.
    pub fn keep(&mut self, block: u32, after: Prefix, tokens: &[u32]) -> (u32, u64) {
        let hash = self.hash(after, tokens);
        if let Some((same, name)) = self.share(after, tokens) {
            self.release_one(block);
            return (same, name);
        }
        let name = self.next_name;
        self.next_name += 1;
        self.kept[block as usize] = Some(Kept { name, after, hash });
        let at = block as usize * self.block_size;
        self.tokens[at..at + self.block_size].copy_from_slice(tokens);
        let kept = &self.kept;
        self.found.insert_unique(hash, block, |b| kept[*b as usize].map_or(0, |k| k.hash));
        (block, name)
    }

    fn hash(&self, after: Prefix, tokens: &[u32]) -> u64 {
        self.hasher.hash_one((after, tokens))
    }

    fn find(&self, hash: u64, after: Prefix, tokens: &[u32]) -> Option<(u32, u64)> {
        let same = |block: &u32| {
            let at = *block as usize * self.block_size;
            self.kept[*block as usize].is_some_and(|k| k.after == after)
                && self.tokens[at..at + self.block_size] == *tokens
        };
        let block = *self.found.find(hash, same)?;
        self.kept[block as usize].map(|k| (block, k.name))
    }

    /// Gives up the kept block that was unused longest.
    fn evict(&mut self) -> Option<u32> {
        let block = self.unused.pop()?;
        let kept = self.kept[block as usize].take();
        if let Some(Ok(entry)) = kept.map(|k| self.found.find_entry(k.hash, |b| *b == block)) {
            entry.remove();
        }
        Some(block)
    }
}

/// Blocks in the order in which they fell out of use: a list threaded through two arrays.
#[derive(Clone, Debug)]
struct Unused {
    /// Of each block, and last of the list's head: what comes after it and before it.
    next: Vec<u32>,
    prev: Vec<u32>,
    len: usize,
}

impl Unused {
    fn new(total: usize) -> Unused {
        let alone: Vec<u32> = (0..=total as u32).collect();
        Unused { next: alone.clone(), prev: alone, len: 0 }
    }

    fn head(&self) -> u32 {
        self.next.len() as u32 - 1
    }

    fn push(&mut self, block: u32) {
        let head = self.head();
        let last = self.prev[head as usize];
        self.link(last, block);
        self.link(block, head);
        self.len += 1;
    }

    fn remove(&mut self, block: u32) {
        self.link(self.prev[block as usize], self.next[block as usize]);
        self.len -= 1;
    }

    fn pop(&mut self) -> Option<u32> {
        let first = self.next[self.head() as usize];
        (first != self.head()).then(|| {
            self.remove(first);
            first
        })
    }

    fn link(&mut self, a: u32, b: u32) {
        self.next[a as usize] = b;
        self.prev[b as usize] = a;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl BlockPool {
        /// Fails unless `users` are all that use blocks, and every block is used, kept or free.
        pub(crate) fn check(&self, users: &[&[u32]]) {
            let mut counts = vec![0u32; self.total()];
            users.iter().copied().flatten().for_each(|b| counts[*b as usize] += 1);
            assert_eq!(counts, self.users);
            let mut all: Vec<u32> =
                self.free.iter().flat_map(|b| *b..*b + self.run as u32).collect();
            assert!(all.iter().all(|b| self.kept[*b as usize].is_none()), "free, and kept");
            let mut block = self.unused.next[self.unused.head() as usize];
            let listed = all.len();
            while block != self.unused.head() {
                assert!(self.kept[block as usize].is_some(), "unused and not kept");
                all.push(block);
                block = self.unused.next[block as usize];
            }
            assert_eq!(all.len() - listed, self.unused.len);
            all.extend((0..self.total() as u32).filter(|b| counts[*b as usize] > 0));
            all.sort_unstable();
            assert_eq!(all, (0..self.total() as u32).collect::<Vec<_>>());
            assert_eq!(self.found.len(), self.kept.iter().flatten().count());
        }
    }

    proptest! {
        /// Whatever sequences do, a block is used by those that have it, and else kept or free; one
        /// that is found holds what was asked for.
        #[test]
        fn blocks_are_neither_lost_nor_mixed_up(
            steps in prop::collection::vec((0..5usize, 0..40usize, 0..3u32, 0..2u64), 1..300)
        ) {
            let mut pool = BlockPool::new(12, 4);
            // What was last written to each block, and after what.
            let mut written = vec![Vec::new(); 12];
            let mut sequences: Vec<Vec<u32>> = vec![Vec::new(); 5];
            for (who, tokens, alphabet, salt) in steps {
                let mut blocks = std::mem::take(&mut sequences[who]);
                pool.release(&mut blocks);
                let text: Vec<u32> = (0..tokens as u32).map(|i| i % (alphabet + 1)).collect();
                let mut prefix = Prefix::Root(salt);
                for (i, part) in text.chunks_exact(4).enumerate() {
                    let whole = (salt, text[..4 * (i + 1)].to_vec());
                    if i == blocks.len() {
                        if let Some((block, name)) = pool.share(prefix, part) {
                            prop_assert_eq!(&written[block as usize], &vec![whole]);
                            blocks.push(block);
                            prefix = Prefix::After(name);
                            continue;
                        }
                        let free = pool.free();
                        if !pool.grow(&mut blocks, 4 * (i + 1)) {
                            prop_assert_eq!(free, 0);
                            break;
                        }
                    }
                    written[blocks[i] as usize] = vec![whole];
                    let (block, name) = pool.keep(blocks[i], prefix, part);
                    blocks[i] = block;
                    prefix = Prefix::After(name);
                }
                sequences[who] = blocks;
                let users: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();
                pool.check(&users);
            }
        }
    }

    #[test]
    fn runs_lie_side_by_side() {
        let mut pool = BlockPool::of_runs(11, 4, 3);
        assert_eq!((pool.free(), pool.total()), (9, 9));
        let mut blocks = Vec::new();
        assert!(pool.grow(&mut blocks, 5));
        assert_eq!(blocks, [0, 1, 2]);
        pool.check(&[&blocks]);
        let mut other = Vec::new();
        assert!(pool.grow(&mut other, 24) && !pool.grow(&mut blocks, 13));
        pool.release(&mut other);
        pool.release(&mut blocks);
        pool.check(&[]);
    }

    #[test]
    fn what_was_unused_longest_is_given_away_first() {
        let mut pool = BlockPool::new(3, 1);
        let root = Prefix::Root(0);
        for token in 0..3 {
            let mut blocks = Vec::new();
            assert!(pool.grow(&mut blocks, 1));
            pool.keep(blocks[0], root, &[token]);
            pool.release(&mut blocks);
        }
        let (block, _) = pool.share(root, &[0]).expect("the eldest");
        pool.release(&mut vec![block]); // now the youngest
        let mut blocks = Vec::new();
        assert!(pool.grow(&mut blocks, 1));
        assert!(pool.share(root, &[1]).is_none() && pool.share(root, &[2]).is_some());
        assert!(pool.share(Prefix::Root(1), &[0]).is_none(), "another tenant's");
    }
}
