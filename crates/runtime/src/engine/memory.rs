//! What sequences hold of the cache: who needs which blocks, who gives them back, and what is shared.

use super::held::Held;
use super::kv::{BlockPool, Prefix};
use super::sequence::Sequence;
use crate::exec::{GroupKind, GroupRows};

/// Tokens after which a state of fixed size is kept for others, besides those at the ends of prompts.
const SNAPSHOT_EVERY: usize = 4096;

/// The groups of layers, and how far steps go.
#[derive(Clone, Debug)]
pub(super) struct Groups {
    kinds: Vec<GroupKind>,
    block_size: usize,
    /// Rows of a sequence in one step at most.
    chunk: usize,
    /// [`SNAPSHOT_EVERY`], in whole blocks; 0 keeps no states of fixed size.
    pub(super) snapshot_every: usize,
}

impl Sequence {
    /// Gives all that it holds back: it has computed nothing from then on.
    pub(super) fn release(&mut self, pool: &mut BlockPool) {
        let longest = self.held.iter().map(|h| h.blocks.len()).max().unwrap_or(0);
        // The last first: of a prefix, what fewer share is given away sooner.
        for at in (0..longest).rev() {
            for held in self.held.iter().filter(|h| h.gone <= at) {
                held.blocks.get(at).into_iter().for_each(|b| pool.release(*b));
            }
        }
        for held in &mut self.held {
            held.blocks.clear();
            held.gone = 0;
            held.release_slot(pool);
        }
        pool.leave(self.prefix);
        self.restart();
    }
}

impl Groups {
    /// `chunk`: rows of a sequence that a step computes at most.
    pub(super) fn new(kinds: Vec<GroupKind>, block_size: usize, chunk: usize) -> Groups {
        let snapshot_every = SNAPSHOT_EVERY.next_multiple_of(block_size.max(1));
        Groups { kinds, block_size: block_size.max(1), chunk: chunk.max(1), snapshot_every }
    }

    pub(super) fn kinds(&self) -> &[GroupKind] {
        &self.kinds
    }

    /// Nothing of any group.
    pub(super) fn none(&self) -> Vec<Held> {
        self.kinds.iter().map(|_| Held::default()).collect()
    }

    /// Blocks that a sequence of so many tokens holds at most.
    pub(super) fn most(&self, pool: &BlockPool, tokens: usize) -> usize {
        let most = |kind: &GroupKind| {
            pool.whole_runs(kind.most_blocks(tokens, self.block_size, self.chunk))
        };
        self.kinds.iter().map(most).fold(0, usize::saturating_add)
    }

    /// How long a group's table must be for all rows that a sequence may compute next.
    pub(super) fn needed(&self, pool: &BlockPool, s: &Sequence, group: usize) -> usize {
        let length = s.length();
        let blocks = match self.kinds[group] {
            GroupKind::Paged => length.div_ceil(self.block_size),
            // As many as it ever holds: what is given back at one end is taken at the other, so that a prompt
            // that has begun needs no more memory than it has.
            kind @ GroupKind::Ring { .. } => {
                let most = kind.most_blocks(length, self.block_size, self.chunk);
                length.div_ceil(self.block_size).min(s.held[group].gone + most)
            }
            GroupKind::Slot { blocks } => blocks,
        };
        pool.whole_runs(blocks)
    }

    /// Blocks that it lacks for them.
    pub(super) fn missing(&self, pool: &BlockPool, s: &Sequence) -> usize {
        let lacks = |(group, held): (usize, &Held)| {
            self.needed(pool, s, group).saturating_sub(held.blocks.len())
        };
        s.held.iter().enumerate().map(lacks).sum()
    }

    /// Gives it those; false, giving none, where the pool has too few.
    pub(super) fn grow(&self, pool: &mut BlockPool, s: &mut Sequence) -> bool {
        if self.missing(pool, s) > pool.free() {
            return false;
        }
        (0..self.kinds.len()).all(|group| {
            let needed = self.needed(pool, s, group);
            pool.grow(&mut s.held[group].blocks, needed)
        })
    }

    /// Rows that the tables hold from the next one on.
    pub(super) fn room(&self, s: &Sequence) -> usize {
        let rows = |(kind, held): (&GroupKind, &Held)| match kind {
            GroupKind::Slot { .. } => usize::MAX,
            _ => (held.blocks.len() * self.block_size).saturating_sub(s.submitted),
        };
        self.kinds.iter().zip(&s.held).map(rows).min().unwrap_or(0)
    }

    /// Gives the rows after the first `rows` back, and the blocks that nothing is left in. All rows go where a group
    /// no longer has what it needs to go on from there.
    pub(super) fn truncate(&self, pool: &mut BlockPool, s: &mut Sequence, rows: usize) {
        let size = self.block_size;
        // A block that is kept is others', too: it is given back as a whole, since none of its rows may be
        // written again.
        let mut rows = if rows < s.kept * size { rows - rows % size } else { rows };
        let is_shorter = rows < s.submitted;
        if is_shorter {
            let lacks = |(kind, held): (&GroupKind, &Held)| match kind {
                GroupKind::Slot { .. } => true,
                _ => kind.first_row(rows) / size < held.gone,
            };
            if self.kinds.iter().zip(&s.held).any(lacks) {
                rows = 0;
            }
            s.truncations += 1;
            s.submitted = rows;
            s.computed = s.computed.min(rows);
        }
        while s.kept * size > rows {
            s.prefix = pool.back(s.prefix);
            s.kept -= 1;
        }
        let left = pool.whole_runs(rows.div_ceil(size));
        for (kind, held) in self.kinds.iter().zip(&mut s.held) {
            match kind {
                GroupKind::Slot { .. } if !is_shorter => {}
                GroupKind::Slot { .. } => held.release_slot(pool),
                _ => held.shrink(pool, left),
            }
        }
    }

    /// Keeps what is full and computed for others.
    pub(super) fn keep(&self, pool: &mut BlockPool, s: &mut Sequence) {
        while (s.kept + 1) * self.block_size <= s.computed.min(s.shareable()) {
            let (at, end) = (s.kept, (s.kept + 1) * self.block_size);
            let next = pool.enter(s.prefix, &s.tokens[at * self.block_size..end]);
            pool.leave(std::mem::replace(&mut s.prefix, next));
            s.kept += 1;
            for (group, held) in s.held.iter_mut().enumerate() {
                match self.kinds[group] {
                    GroupKind::Slot { .. } => {
                        let left = held.left.iter().position(|(rows, _)| *rows == end);
                        if let Some((_, mut blocks)) = left.map(|i| held.left.swap_remove(i)) {
                            pool.keep(next, group, &mut blocks);
                            pool.release_all(&mut blocks);
                        }
                    }
                    _ if at >= held.gone => {
                        pool.keep(next, group, &mut held.blocks[at..=at]);
                    }
                    _ => {}
                }
            }
        }
    }

    /// Gives the blocks back that no row to come may see, once their own rows are known to hold.
    pub(super) fn give_back(&self, pool: &mut BlockPool, s: &mut Sequence) {
        // The last row of a step under way may be taken out of it and be the next one again.
        let is_open = s.cursor.is_some() && s.computed < s.submitted;
        let next = s.submitted - usize::from(is_open);
        for (kind, held) in self.kinds.iter().zip(&mut s.held) {
            let first = kind.first_row(next).min(s.computed) / self.block_size;
            for block in held.blocks.iter().take(first).skip(held.gone) {
                pool.release(*block);
            }
            held.gone = first.max(held.gone);
        }
    }

    /// Takes what the cache has of a sequence's next rows, as far as every group has what it needs to go on
    /// from there: false if that is nothing. One row is left to compute.
    pub(super) fn share(&self, pool: &mut BlockPool, s: &mut Sequence) -> bool {
        let (size, from) = (self.block_size, s.kept);
        if s.submitted != from * size {
            return false;
        }
        // Blocks side by side that each group has, up to the one looked at.
        let mut last: Vec<usize> = s.held.iter().map(|h| from - h.gone.min(from)).collect();
        let (mut prefix, mut path, mut best) = (s.prefix, Vec::new(), 0);
        let known = s.shareable().min(s.tokens.len() - 1);
        while (from + path.len() + 1) * size <= known {
            let at = from + path.len();
            let Some(next) = pool.find(prefix, &s.tokens[at * size..(at + 1) * size]) else {
                break;
            };
            prefix = next;
            path.push(next);
            let mut all = true;
            for (group, (kind, last)) in self.kinds.iter().zip(&mut last).enumerate() {
                let is_kept = pool.kept(next, group).is_some();
                *last = if is_kept { *last + 1 } else { 0 };
                all &= match kind {
                    GroupKind::Slot { .. } => is_kept,
                    _ => at + 1 - kind.first_row((at + 1) * size) / size <= *last,
                };
            }
            if all {
                best = path.len();
            }
        }
        path.truncate(best);
        if !path.is_empty() {
            self.take(pool, s, &path);
        }
        !path.is_empty()
    }

    /// Goes on after the last of `path`, the prefixes that follow the sequence's own.
    fn take(&self, pool: &mut BlockPool, s: &mut Sequence, path: &[Prefix]) {
        let (from, to) = (s.kept, s.kept + path.len());
        let rows = to * self.block_size;
        for (group, held) in s.held.iter_mut().enumerate() {
            if let GroupKind::Slot { .. } = self.kinds[group] {
                pool.release_all(&mut held.read);
                held.read.extend_from_slice(pool.share(path[to - from - 1], group).unwrap_or(&[]));
                continue;
            }
            let first = self.kinds[group].first_row(rows) / self.block_size;
            for (at, prefix) in (from..to).zip(path) {
                let shared = if at < first { None } else { pool.share(*prefix, group) };
                let shared = shared.and_then(|blocks| blocks.first().copied());
                match held.blocks.get_mut(at) {
                    // It has its own already: another computed the same meanwhile.
                    Some(own) => {
                        let own = std::mem::replace(own, shared.unwrap_or(*own));
                        pool.release(own);
                    }
                    None => held.blocks.push(shared.unwrap_or(0)),
                }
            }
            for block in held.blocks.iter().take(first.min(from)).skip(held.gone) {
                pool.release(*block);
            }
            held.gone = first.max(held.gone);
        }
        if let Some(last) = path.last() {
            pool.hold(*last);
            pool.leave(std::mem::replace(&mut s.prefix, *last));
        }
        s.kept = to;
        (s.computed, s.submitted) = (rows, rows);
    }

    /// Rows of a sequence from `past` on that a step may compute in one go: states of fixed size are kept at the
    /// ends of steps.
    pub(super) fn uncut(&self, s: &Sequence, past: usize) -> usize {
        if !self.snapshots() {
            return usize::MAX;
        }
        let next = (past / self.snapshot_every + 1) * self.snapshot_every;
        let end = Some(self.end_of_prompt(s)).filter(|end| *end > past);
        end.map_or(next, |end| end.min(next)) - past
    }

    /// Before a step's inputs take a sequence's rows from `past` on: where its state is worth keeping, it goes
    /// on in other blocks, if there are some to spare.
    pub(super) fn leave_snapshots(
        &self,
        pool: &mut BlockPool,
        s: &mut Sequence,
        past: usize,
        spare: usize,
    ) {
        let is_point = past > 0
            && (past.is_multiple_of(self.snapshot_every.max(1)) || past == self.end_of_prompt(s));
        if !self.snapshots() || !is_point {
            return;
        }
        for (group, held) in s.held.iter_mut().enumerate() {
            let GroupKind::Slot { blocks } = self.kinds[group] else { continue };
            let mut fresh = Vec::new();
            if !held.read.is_empty()
                || pool.free() < blocks + spare
                || !pool.grow(&mut fresh, blocks)
            {
                continue;
            }
            let mut state = std::mem::replace(&mut held.blocks, fresh);
            if s.kept * self.block_size == past {
                pool.keep(s.prefix, group, &mut state);
                held.read = state;
            } else {
                held.left.push((past, state));
            }
        }
    }

    /// What a step is told of a sequence whose rows from `past` on it computes.
    pub(super) fn rows<'a>(
        &'a self,
        s: &'a Sequence,
        past: usize,
    ) -> impl Iterator<Item = GroupRows<'a>> {
        self.kinds.iter().zip(&s.held).map(move |(kind, held)| {
            if !matches!(kind, GroupKind::Slot { .. }) {
                return GroupRows::Table(&held.blocks);
            }
            let left = held.left.iter().find(|(rows, _)| *rows == past);
            let read = match left {
                _ if past == 0 => &[][..],
                Some((_, state)) => state,
                None if held.read.is_empty() => &held.blocks,
                None => &held.read,
            };
            GroupRows::Slot { read, write: &held.blocks }
        })
    }

    /// Once a step that a sequence has a part in is submitted: what it reads, and no step after it, may be given
    /// to these.
    pub(super) fn depart(&self, pool: &mut BlockPool, s: &mut Sequence) {
        self.give_back(pool, s);
        s.held.iter_mut().for_each(|held| pool.release_all(&mut held.read));
    }

    fn snapshots(&self) -> bool {
        self.snapshot_every > 0 && self.has_slots()
    }

    /// Whether any group has a state that a step moves from one place to another.
    pub(super) fn has_slots(&self) -> bool {
        self.kinds.iter().any(|kind| matches!(kind, GroupKind::Slot { .. }))
    }

    /// The last full blocks of a prompt before its last token, in rows.
    fn end_of_prompt(&self, s: &Sequence) -> usize {
        s.request.tokens.len().saturating_sub(1) / self.block_size * self.block_size
    }
}
