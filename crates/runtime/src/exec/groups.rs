//! What a sequence holds of the cache, by group of layers.

use infernum_codegen::CacheLayout;
use infernum_ir::StateKind;

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
        let kind = |kind: &StateKind| match kind {
            StateKind::Paged => GroupKind::Paged,
            StateKind::Ring(window) => {
                GroupKind::Ring { window: usize::try_from(*window).unwrap_or(usize::MAX) }
            }
        };
        layout.groups.iter().map(kind).collect()
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
