//! What the cache takes.

use std::collections::BTreeMap;
use std::fmt;

use infernum_codegen::{CacheLayout, Plan};
use infernum_ir::StateKind;
use infernum_runtime::{GroupKind, StepInputs};
use serde::Serialize;

use crate::capacity::Capacity;
use crate::load::block_bytes;

/// Bytes of a plan's cache: of tokens, and of a sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CacheSize {
    /// Bytes of a token's rows that are kept as long as their sequence.
    pub paged_row: u64,
    /// Bytes of a token's rows that are kept while tokens to come may see them, by how many rows back these see.
    pub ring_rows: BTreeMap<u64, u64>,
    /// Bytes of a sequence's states of fixed size.
    pub slots: u64,
    /// Tokens of the longest sequence.
    pub tokens: u64,
    /// Bytes of the blocks that such a sequence holds at most.
    pub sequence: u64,
    /// Bytes of all rows of such a sequence, as if none were given back.
    pub all_rows: u64,
}

impl CacheSize {
    /// Of a plan, whose steps have at most `chunk` tokens of a sequence.
    pub fn of(plan: &Plan, chunk: usize) -> CacheSize {
        let layout = CacheLayout::of(plan, StepInputs::BLOCK_SIZE);
        let tokens = plan.limits.s.checked_div(plan.limits.seqs).unwrap_or(0);
        let (mut paged_row, mut ring_rows) = (0u64, BTreeMap::new());
        for (state, place) in plan.states.iter().zip(&layout.planes) {
            let row = match layout.groups[place.group] {
                StateKind::Paged => &mut paged_row,
                StateKind::Ring(window) => ring_rows.entry(window).or_insert(0),
                StateKind::Slot => continue,
            };
            *row = row.saturating_add(state.ty.bytes());
        }
        let blocks = Capacity::one(tokens).blocks(&GroupKind::of_layout(&layout), chunk) as u64;
        let rows = ring_rows.values().fold(paged_row, |sum, row| sum.saturating_add(*row));
        CacheSize {
            paged_row,
            ring_rows,
            slots: plan.slot_bytes_per_sequence(),
            tokens,
            sequence: blocks.saturating_mul(block_bytes(plan)),
            all_rows: rows.saturating_mul(tokens),
        }
    }
}

impl fmt::Display for CacheSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        write!(f, "rows         {} bytes a token", self.paged_row)?;
        for (window, row) in &self.ring_rows {
            write!(f, ", {row} of each of the last {window}")?;
        }
        if self.slots > 0 {
            write!(f, "\nslots        {} bytes a sequence", self.slots)?;
        }
        write!(
            f,
            "\na sequence   of {} tokens: {:.1} MiB of cache",
            self.tokens,
            mib(self.sequence)
        )?;
        if !self.ring_rows.is_empty() {
            write!(f, " ({:.1} if every row were kept)", mib(self.all_rows))?;
        }
        Ok(())
    }
}
