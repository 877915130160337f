//! What a sequence holds of the cache, by group of layers.

use infernum_codegen::{CacheLayout, Plan};
use infernum_ir::StateKind;

use super::StepInputs;

/// How a group of layers keeps its state of a sequence, in blocks from one pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// A row for each token, as long as the sequence lives.
    Paged,
    /// A row for each token; blocks that no token to come may see are given back.
    Ring {
        /// Rows that a token sees, its own included.
        window: usize,
    },
    /// One state for all tokens so far, which fills so many blocks.
    Slot {
        /// The blocks.
        blocks: usize,
    },
}

/// What a step needs to know of a group, for one sequence.
#[derive(Clone, Copy, Debug)]
pub enum GroupRows<'a> {
    /// Row `i` of the context lies in block `table[i / block_size]`. Where nothing of a block may be seen,
    /// any number stands.
    Table(&'a [u32]),
    /// The state is in these blocks before the step (none: it is zero), and is to be in those after it.
    Slot {
        /// Where it is read from; not written unless it is the same.
        read: &'a [u32],
        /// Where it is written to.
        write: &'a [u32],
    },
}

impl GroupKind {
    /// The groups of a plan's cache.
    pub fn of_layout(layout: &CacheLayout) -> Vec<GroupKind> {
        let blocks = usize::try_from(layout.slot_blocks).unwrap_or(usize::MAX);
        let kind = |kind: &StateKind| match kind {
            StateKind::Slot => GroupKind::Slot { blocks },
            StateKind::Paged => GroupKind::Paged,
            StateKind::Ring(window) => {
                GroupKind::Ring { window: usize::try_from(*window).unwrap_or(usize::MAX) }
            }
        };
        layout.groups.iter().map(kind).collect()
    }

    /// The groups of a plan's cache in blocks of [`StepInputs::BLOCK_SIZE`] rows.
    pub fn of_plan(plan: &Plan) -> Vec<GroupKind> {
        GroupKind::of_layout(&CacheLayout::of(plan, StepInputs::BLOCK_SIZE))
    }

    /// The first row that tokens from `position` on may see.
    pub fn first_row(self, position: usize) -> usize {
        match self {
            GroupKind::Ring { window } => (position + 1).saturating_sub(window),
            GroupKind::Paged | GroupKind::Slot { .. } => 0,
        }
    }

    /// Blocks of `block_size` tokens that a sequence of `tokens` holds at most, if no step computes more than
    /// `chunk` of its rows.
    pub fn most_blocks(self, tokens: usize, block_size: usize, chunk: usize) -> usize {
        let all = tokens.div_ceil(block_size);
        match self {
            GroupKind::Paged => all,
            // Rows of the step under way are given back only once it is known that they hold.
            GroupKind::Ring { window } => {
                let rows = window.max(chunk).saturating_add(chunk);
                all.min(rows.div_ceil(block_size).saturating_add(1))
            }
            // A snapshot that it begins with, and its own.
            GroupKind::Slot { blocks } => blocks.saturating_mul(2),
        }
    }

    /// Blocks that a group keeps under a prefix.
    pub fn width(self) -> usize {
        match self {
            GroupKind::Paged | GroupKind::Ring { .. } => 1,
            GroupKind::Slot { blocks } => blocks,
        }
    }
}

/// [`GroupKind::most_blocks`] of all groups.
pub fn most_blocks(groups: &[GroupKind], tokens: usize, block_size: usize, chunk: usize) -> usize {
    let most = groups.iter().map(|g| g.most_blocks(tokens, block_size, chunk));
    most.fold(0, usize::saturating_add)
}

/// Tokens of the longest sequence for which so many `blocks` are enough, but no more than `most`.
pub fn longest_sequence(
    groups: &[GroupKind],
    blocks: usize,
    block_size: usize,
    chunk: usize,
    most: usize,
) -> usize {
    let (mut fits, mut end) = (0, most.saturating_add(1));
    while end - fits > 1 {
        let tokens = fits + (end - fits) / 2;
        if most_blocks(groups, tokens, block_size, chunk) <= blocks {
            fits = tokens;
        } else {
            end = tokens;
        }
    }
    fits
}

/// The tables of a sequence of so many tokens, as [`StepInputs::push`](super::StepInputs::push) takes them, on
/// [`most_blocks`] of its own, which rings use in turn.
pub fn tables(
    groups: &[GroupKind],
    tokens: usize,
    block_size: usize,
    chunk: usize,
    blocks: impl IntoIterator<Item = u32>,
) -> Vec<u32> {
    let mut blocks = blocks.into_iter();
    let all = groups.iter().map(|group| match group {
        GroupKind::Slot { blocks } => *blocks,
        GroupKind::Paged | GroupKind::Ring { .. } => tokens.div_ceil(block_size),
    });
    let longest = all.max().unwrap_or(0);
    let table = |group: &GroupKind| {
        let most = group.most_blocks(tokens, block_size, chunk);
        let own: Vec<u32> = blocks.by_ref().take(most).collect();
        let entries = if own.is_empty() { 0 } else { longest };
        (0..entries).map(move |i| own[i % own.len()])
    };
    groups.iter().flat_map(table).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUPS: [GroupKind; 2] = [GroupKind::Paged, GroupKind::Ring { window: 10 }];

    #[test]
    fn rings_hold_no_more_than_windows_and_steps() {
        let most = |tokens, chunk| most_blocks(&GROUPS, tokens, 4, chunk);
        assert_eq!(most(8, 100), 2 + 2);
        assert_eq!(most(400, 2), 100 + 4);
        assert_eq!(most(400, 20), 100 + 11);
        assert_eq!(GroupKind::Slot { blocks: 3 }.most_blocks(400, 4, 20), 6);
        assert_eq!(most_blocks(&[GroupKind::Ring { window: usize::MAX }], 9, 4, usize::MAX), 3);
    }

    #[test]
    fn a_sequence_is_as_long_as_all_groups_have_room() {
        for blocks in 0..60 {
            let longest = longest_sequence(&GROUPS, blocks, 4, 2, 100);
            assert!(most_blocks(&GROUPS, longest, 4, 2) <= blocks);
            assert!(longest == 100 || most_blocks(&GROUPS, longest + 1, 4, 2) > blocks);
        }
        assert_eq!(longest_sequence(&GROUPS[..1], 7, 16, 2048, 1 << 20), 112);
        assert_eq!(longest_sequence(&GROUPS[1..], 7, 4, 2, usize::MAX - 1), usize::MAX - 1);
    }

    #[test]
    fn rings_use_their_blocks_in_turn() {
        let tables = tables(&GROUPS, 24, 4, 2, 10..);
        assert_eq!(tables, [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 16, 17]);
    }
}
