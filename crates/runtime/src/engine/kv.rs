//! The paged KV cache's bookkeeping: which sequences a block belongs to, and what it holds.

pub(super) use super::prefixes::Prefix;
use super::prefixes::Prefixes;

/// Hands out the cache's blocks and counts who uses each. What a full block holds can be kept for others that
/// begin the same: it then is found by its tokens and what goes before them, and shared without a
/// copy. What is kept and unused is given to others when nothing else is free, the longest unused
/// first.
///
/// Groups of layers have blocks of their own under each prefix, all from this one pool.
#[derive(Clone, Debug)]
pub struct BlockPool {
    block_size: usize,
    /// Blocks that are handed out together, side by side.
    run: usize,
    free: Vec<u32>,
    users: Vec<u32>,
    kept: Vec<Option<Kept>>,
    prefixes: Prefixes,
    unused: Unused,
}

/// What a block is kept as.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Kept {
    node: u32,
    group: usize,
}

/// Prefixes that are known at most, for each block of the cache. Groups that give their first blocks back leave prefixes
/// with few blocks, which still cost the host some memory: far less than a block does.
const PREFIXES: usize = 64;

impl BlockPool {
    /// A pool of `total` free blocks of `block_size` tokens, for one group of layers.
    pub fn new(total: usize, block_size: usize) -> BlockPool {
        BlockPool::for_groups(total, block_size, 1, &[1])
    }

    /// As [`BlockPool::new`], but blocks are handed out `run` at a time, side by side; what does not
    /// fill a run is left out. Each group keeps so many blocks (`widths`) under a prefix.
    pub fn for_groups(total: usize, block_size: usize, run: usize, widths: &[usize]) -> BlockPool {
        let (run, block_size) = (run.max(1), block_size.max(1));
        let total = total - total % run;
        BlockPool {
            block_size,
            run,
            // The lowest block is handed out first.
            free: (0..total as u32).step_by(run).rev().collect(),
            users: vec![0; total],
            kept: vec![None; total],
            prefixes: Prefixes::new(block_size, widths),
            unused: Unused::new(total),
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

    /// `blocks`, filling whole runs.
    pub fn whole_runs(&self, blocks: usize) -> usize {
        blocks.next_multiple_of(self.run)
    }

    /// Grows `blocks` to so many; false, changing nothing, where the pool has too few.
    pub fn grow(&mut self, blocks: &mut Vec<u32>, to: usize) -> bool {
        let missing = self.whole_runs(to).saturating_sub(blocks.len());
        if missing > self.free() {
            return false;
        }
        for _ in 0..missing / self.run {
            if self.free.is_empty() {
                self.evict();
            }
            let Some(first) = self.free.pop() else { return false };
            for block in first..first + self.run as u32 {
                self.users[block as usize] = 1;
                blocks.push(block);
            }
        }
        true
    }

    /// Whether a block is kept.
    pub fn is_kept(&self, block: u32) -> bool {
        self.kept.get(block as usize).is_some_and(Option::is_some)
    }

    /// Takes a block back from one user.
    pub fn release(&mut self, block: u32) {
        let users = &mut self.users[block as usize];
        assert!(*users > 0, "block {block} was released twice");
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

    /// Takes blocks back from one user.
    pub fn release_all(&mut self, blocks: &mut Vec<u32>) {
        // The last first: of a prefix, what fewer share is given away sooner.
        while let Some(block) = blocks.pop() {
            self.release(block);
        }
    }

    /// The prefix that is `tokens` after `after`, if it is known.
    pub fn find(&self, after: Prefix, tokens: &[u32]) -> Option<Prefix> {
        self.prefixes.find(after, tokens).map(Prefix::Node)
    }

    /// Makes the prefix that is `tokens` after `after` known. It stays so until it is [left](BlockPool::leave), and as
    /// long as blocks are kept under it, or under longer ones.
    pub fn enter(&mut self, after: Prefix, tokens: &[u32]) -> Prefix {
        while self.prefixes.len() >= PREFIXES * self.total() && self.evict() {}
        Prefix::Node(self.prefixes.enter(after, tokens))
    }

    /// Holds on to a prefix that is known.
    pub fn hold(&mut self, prefix: Prefix) {
        self.prefixes.hold(prefix);
    }

    /// Lets go of a prefix.
    pub fn leave(&mut self, prefix: Prefix) {
        self.prefixes.leave(prefix);
    }

    /// Lets go of a prefix, for the one that is a block shorter.
    pub fn back(&mut self, prefix: Prefix) -> Prefix {
        let shorter = self.prefixes.shorter(prefix);
        self.prefixes.hold(shorter);
        self.prefixes.leave(prefix);
        shorter
    }

    /// The blocks that a group keeps under a prefix.
    pub fn kept(&self, prefix: Prefix, group: usize) -> Option<&[u32]> {
        match prefix {
            Prefix::Root(..) => None,
            Prefix::Node(node) => self.prefixes.blocks(node, group),
        }
    }

    /// The blocks that a group keeps under a prefix, for one more user.
    pub fn share(&mut self, prefix: Prefix, group: usize) -> Option<&[u32]> {
        let Prefix::Node(node) = prefix else { return None };
        let blocks = self.prefixes.blocks(node, group)?;
        for &block in blocks {
            if self.users[block as usize] == 0 {
                self.unused.remove(block);
            }
            self.users[block as usize] += 1;
        }
        Some(blocks)
    }

    /// Keeps a group's full blocks, which have one user, for others, now and when they are released. Where there are
    /// some already of the same prefix, those are what the user goes on with: they take the place of `blocks`.
    pub fn keep(&mut self, prefix: Prefix, group: usize, blocks: &mut [u32]) {
        let Prefix::Node(node) = prefix else { return };
        if let Some(same) = self.share(prefix, group) {
            let same = same.to_vec();
            blocks.iter().for_each(|b| self.release(*b));
            blocks.copy_from_slice(&same);
            return;
        }
        for &block in &*blocks {
            self.kept[block as usize] = Some(Kept { node, group });
        }
        self.prefixes.set(node, group, blocks);
    }

    /// Gives up what was unused longest of all that is kept; false if nothing is.
    fn evict(&mut self) -> bool {
        let Some(block) = self.unused.first() else { return false };
        let Some(Kept { node, group }) = self.kept[block as usize] else { return false };
        // Blocks that are kept together are used together.
        let blocks = self.prefixes.blocks(node, group).map(<[u32]>::to_vec).unwrap_or_default();
        for &block in &blocks {
            self.unused.remove(block);
            self.kept[block as usize] = None;
            self.free.push(block);
        }
        self.prefixes.unset(node, group);
        true
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

    fn first(&self) -> Option<u32> {
        let first = self.next[self.head() as usize];
        (first != self.head()).then_some(first)
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
        /// Blocks that are used, kept though unused, and free.
        pub(crate) fn census(&self) -> [usize; 3] {
            let used = self.users.iter().filter(|u| **u > 0).count();
            [used, self.unused.len, self.free.len() * self.run]
        }

        /// Fails unless `users` are all that use blocks, every block is used, kept or free, and `prefixes` are those
        /// that sequences hold on to.
        pub(crate) fn check(&self, users: &[&[u32]], prefixes: &[Prefix]) {
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
            let kept = self.prefixes.check(prefixes);
            assert_eq!(kept.len(), self.kept.iter().flatten().count());
            for (block, node, group) in kept {
                assert_eq!(self.kept[block as usize], Some(Kept { node, group }));
            }
        }
    }

    proptest! {
        /// Whatever sequences do, a block is used by those that have it, and else kept or free; one
        /// that is found holds what was asked for.
        #[test]
        fn blocks_are_neither_lost_nor_mixed_up(
            steps in prop::collection::vec((0..5usize, 0..40usize, 0..3u32, 0..2u64), 1..300)
        ) {
            // The second group keeps two blocks under every other prefix.
            let mut pool = BlockPool::for_groups(24, 4, 1, &[1, 2]);
            // What was last written to each block: a group's, of a text of a salt.
            let mut written = vec![None; 24];
            let mut sequences: [(Vec<u32>, Prefix); 5] =
                std::array::from_fn(|_| (Vec::new(), Prefix::Root(0, 0)));
            for (who, tokens, alphabet, salt) in steps {
                let (blocks, prefix) = &mut sequences[who];
                pool.release_all(blocks);
                pool.leave(*prefix);
                *prefix = Prefix::Root(salt, 0);
                let text: Vec<u32> = (0..tokens as u32).map(|i| i % (alphabet + 1)).collect();
                for (i, part) in text.chunks_exact(4).enumerate() {
                    let whole = |group: usize| Some((group, salt, text[..4 * (i + 1)].to_vec()));
                    let next = pool.enter(*prefix, part);
                    pool.leave(std::mem::replace(prefix, next));
                    for (group, width) in [(0, 1), (1, 2)].into_iter().take(1 + i % 2) {
                        let mut own = Vec::new();
                        if let Some(found) = pool.share(next, group) {
                            prop_assert!(found.iter().all(|b| written[*b as usize] == whole(group)));
                            own.extend_from_slice(found);
                        } else if pool.grow(&mut own, width) {
                            own.iter().for_each(|b| written[*b as usize] = whole(group));
                            pool.keep(next, group, &mut own);
                        } else {
                            prop_assert!(pool.free() < width);
                        }
                        blocks.append(&mut own);
                    }
                }
                let users: Vec<&[u32]> = sequences.iter().map(|(b, _)| &b[..]).collect();
                let prefixes: Vec<Prefix> = sequences.iter().map(|(_, p)| *p).collect();
                pool.check(&users, &prefixes);
                prop_assert_eq!(pool.census().iter().sum::<usize>(), 24);
            }
        }
    }

    #[test]
    fn runs_lie_side_by_side() {
        let mut pool = BlockPool::for_groups(11, 4, 3, &[1]);
        assert_eq!((pool.free(), pool.total()), (9, 9));
        let mut blocks = Vec::new();
        assert!(pool.grow(&mut blocks, 2));
        assert_eq!(blocks, [0, 1, 2]);
        pool.check(&[&blocks], &[]);
        let mut other = Vec::new();
        assert!(pool.grow(&mut other, 6) && !pool.grow(&mut blocks, 4));
        pool.release_all(&mut other);
        pool.release_all(&mut blocks);
        pool.check(&[], &[]);
    }

    #[test]
    fn what_was_unused_longest_is_given_away_first() {
        let mut pool = BlockPool::new(3, 1);
        let root = Prefix::Root(0, 0);
        for token in 0..3 {
            let mut blocks = Vec::new();
            assert!(pool.grow(&mut blocks, 1));
            let prefix = pool.enter(root, &[token]);
            pool.keep(prefix, 0, &mut blocks);
            pool.leave(prefix);
            pool.release_all(&mut blocks);
        }
        let eldest = pool.find(root, &[0]).expect("the eldest");
        let mut block = pool.share(eldest, 0).expect("its block").to_vec();
        pool.release_all(&mut block); // now the youngest
        let mut blocks = Vec::new();
        assert!(pool.grow(&mut blocks, 1));
        assert!(pool.find(root, &[1]).is_none() && pool.find(root, &[2]).is_some());
        assert!(pool.find(Prefix::Root(1, 0), &[0]).is_none(), "another tenant's");
        assert!(pool.find(Prefix::Root(0, 1), &[0]).is_none(), "another adapter's");
    }

    #[test]
    fn a_prefix_is_known_while_anything_hangs_on_it() {
        let mut pool = BlockPool::for_groups(2, 1, 1, &[1, 1]);
        let first = pool.enter(Prefix::Root(0, 0), &[7]);
        let second = pool.enter(first, &[8]);
        let mut block = Vec::new();
        assert!(pool.grow(&mut block, 1));
        pool.keep(second, 1, &mut block);
        pool.leave(first);
        pool.leave(second);
        assert_eq!(pool.find(first, &[8]), Some(second));
        assert!(pool.kept(first, 1).is_none() && pool.kept(second, 0).is_none());
        pool.release_all(&mut block);
        assert!(pool.grow(&mut block, 2), "both blocks are free");
        assert_eq!((pool.find(Prefix::Root(0, 0), &[7]), pool.prefixes.len()), (None, 0));
    }
}
