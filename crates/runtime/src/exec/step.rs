//! What goes into a step and what comes out.

use std::ops::Range;

use infernum_codegen::cuda::abi::{self, FED};
use infernum_codegen::{Asks, CacheLayout, Plan};
use infernum_ir::StateKind;
use infernum_ir::interp::{SeqShape, StepShape};

use super::{ExecError, GroupKind, GroupRows};
use crate::sampling::{Logprobs, TokenPick};

/// The inputs of one step: tokens of several sequences, flattened, and where each sequence's
/// rows lie in the paged KV cache. Filled again for every step, without allocating once it has
/// grown.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each says one thing of it")]
pub struct StepInputs {
    block_size: usize,
    step: StepShape,
    /// Sequences of generated rows, and whether those that come next are of prompts.
    generated: usize,
    has_prompts: bool,
    /// The first row of output of the last sequence pushed.
    first_output: usize,
    /// Whether other rows yield than the last of each sequence, so that the step lists them.
    lists_outputs: bool,
    tokens: Vec<u32>,
    groups: Vec<GroupKind>,
    blocks: Vec<u32>,
    /// Where what each sequence has of each group begins in `blocks`; of a slot, what is read and what is written.
    tables: Vec<[usize; 2]>,
    /// Whether any token is still to come.
    fed: bool,
    /// Whether it is still to be said how some row's token is picked.
    defers_picks: bool,
    logit_rows: LogitRows,
}

/// Rows of a step's output whose logits are brought to the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LogitRows {
    /// All.
    #[default]
    All,
    /// These, in order. Executors that do not [sample](super::Executor::samples) bring those of all, and so do
    /// plans that yield a row for each token.
    Of(Vec<u32>),
}

/// The result of one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// `[rows, columns]`, row-major: the logits, of [`logit_rows`](StepOutput::logit_rows) alone. Empty
    /// where the plan yields tokens.
    pub logits: Vec<f32>,
    /// The log-probabilities of rows that [asked](TokenPick::tell) for them and have a token, in order; from
    /// executors that [sample](super::Executor::samples).
    pub told: Vec<(u32, Logprobs)>,
    /// The rows that `logits` holds.
    pub logit_rows: LogitRows,
    /// One for each token that yields one, or one for each token, as the plan says. Where no token yields one,
    /// nothing is known of them.
    pub rows: usize,
    /// The size of the vocabulary; 0 where the plan yields tokens.
    pub columns: usize,
    /// A token of each row, from executors that [sample](super::Executor::samples), where
    /// [`StepInputs::set_pick`] says which, and from plans that yield the likeliest (pass `greedy`). Empty
    /// from others. [`NO_TOKEN`](infernum_ir::NO_TOKEN) for a
    /// row that has a NaN, or no number above -inf.
    pub tokens: Vec<u32>,
}

impl StepOutput {
    /// The logits of one row; empty where they were not brought.
    pub fn row(&self, row: usize) -> &[f32] {
        let at = match &self.logit_rows {
            LogitRows::All => Some(row),
            LogitRows::Of(rows) => rows.binary_search(&(row as u32)).ok(),
        };
        let range = |at: usize| at * self.columns..(at + 1) * self.columns;
        at.and_then(|at| self.logits.get(range(at))).unwrap_or_default()
    }

    /// What is told of one row.
    pub fn told(&self, row: usize) -> Option<&Logprobs> {
        let found = self.told.binary_search_by_key(&row, |(row, _)| *row as usize).ok();
        found.map(|at| &self.told[at].1)
    }
}

impl StepInputs {
    /// Tokens that one block of the KV cache holds, unless one chooses otherwise.
    pub const BLOCK_SIZE: usize = abi::PAGE;

    /// No sequences yet. `block_size` is that of the executor's cache, in tokens.
    pub fn new(block_size: usize) -> StepInputs {
        StepInputs {
            block_size: block_size.max(1),
            step: StepShape::default(),
            generated: 0,
            has_prompts: false,
            first_output: 0,
            lists_outputs: false,
            tokens: Vec::new(),
            groups: vec![GroupKind::Paged],
            blocks: Vec::new(),
            tables: Vec::new(),
            fed: false,
            defers_picks: false,
            logit_rows: LogitRows::All,
        }
    }

    /// As [`StepInputs::new`]; logits are brought of those sequences' rows alone that
    /// [ask](StepInputs::ask_logits) for them.
    pub fn asking(block_size: usize) -> StepInputs {
        StepInputs { logit_rows: LogitRows::Of(Vec::new()), ..StepInputs::new(block_size) }
    }

    /// The same for a cache of several groups of layers, as the executor [says](super::Executor::groups).
    #[must_use]
    pub fn with_groups(self, groups: &[GroupKind]) -> StepInputs {
        StepInputs { groups: groups.to_vec(), ..self }
    }

    /// The groups of layers.
    pub fn groups(&self) -> &[GroupKind] {
        &self.groups
    }

    /// Refuses a step for a cache of other groups.
    pub(crate) fn check_groups(&self, layout: &CacheLayout) -> Result<(), ExecError> {
        // What a ring's window is does not matter here: its table has a place for every block.
        let slot = |kind: &GroupKind| match kind {
            GroupKind::Slot { blocks } => Some(*blocks as u64),
            GroupKind::Paged | GroupKind::Ring { .. } => None,
        };
        let own =
            layout.groups.iter().map(|k| (*k == StateKind::Slot).then_some(layout.slot_blocks));
        if own.eq(self.groups.iter().map(slot)) {
            return Ok(());
        }
        let own = GroupKind::of_layout(layout);
        Err(ExecError::Inputs(format!(
            "it is for layers that keep {:?}, the cache for {own:?}: make it with its executor's groups",
            self.groups
        )))
    }

    /// Refuses a part of a sequence, for a plan that takes them whole.
    pub(crate) fn check_whole(&self, plan: &Plan) -> Result<(), ExecError> {
        let cut = self.step.seqs.iter().find(|s| plan.takes_whole && s.new != s.context);
        cut.map_or(Ok(()), |SeqShape { new, context }| {
            let message = format!(
                "{new} token(s) of a sequence of {context}: the plan computes sequences whole, expected all of them in one step"
            );
            Err(ExecError::Inputs(message))
        })
    }

    /// Removes all sequences.
    pub fn clear(&mut self) {
        self.step.seqs.clear();
        self.step.seconds.clear();
        self.step.adapters.clear();
        self.step.outputs.clear();
        (self.first_output, self.lists_outputs) = (0, false);
        (self.generated, self.has_prompts) = (0, false);
        self.tokens.clear();
        self.blocks.clear();
        self.tables.clear();
        (self.fed, self.defers_picks) = (false, false);
        self.step.picks.clear();
        if let LogitRows::Of(rows) = &mut self.logit_rows {
            rows.clear();
        }
    }

    /// The last `rows` tokens of the last sequence pushed yield a row of output each, or none does; one does where
    /// this is not called. To be said before anything is asked of these rows.
    pub fn yield_rows(&mut self, rows: usize) -> Result<(), ExecError> {
        let new = self.step.seqs.last().map_or(0, |s| s.new);
        if rows > new {
            let message = format!("{rows} rows of output, of a sequence of {new} token(s)");
            return Err(ExecError::Inputs(message));
        }
        if !self.lists_outputs {
            if rows == 1 {
                return Ok(());
            }
            self.lists_outputs = true;
            let mut outputs = std::mem::take(&mut self.step.outputs);
            outputs.extend(self.step.output_rows());
            self.step.outputs = outputs;
        }
        self.step.outputs.pop();
        let end = self.tokens.len() as u32;
        self.step.outputs.extend(end - rows as u32..end);
        Ok(())
    }

    /// The last sequence pushed is of two texts, of which the second begins at this row.
    pub fn set_second(&mut self, row: usize) {
        let last = self.step.seqs.len().checked_sub(1);
        self.step.seconds.extend(last.map(|seq| (seq, row)));
    }

    /// The last sequence pushed is computed with the adapter in this slot of the executor's banks.
    pub fn set_adapter(&mut self, slot: usize) {
        let last = self.step.seqs.len().checked_sub(1);
        self.step.adapters.extend(last.map(|seq| (seq, slot as u32 + 1)));
    }

    /// Refuses adapters that a plan has no slots for.
    pub(crate) fn check_adapters(&self, plan: &Plan) -> Result<(), ExecError> {
        let slots = plan.adapters;
        match self.step.adapters.iter().find(|(_, adapter)| u64::from(*adapter) > slots) {
            None => Ok(()),
            Some((_, adapter)) => {
                let slot = adapter - 1;
                Err(ExecError::Inputs(format!(
                    "adapter slot {slot} is outside the plan's {slots} slot(s)"
                )))
            }
        }
    }

    /// Rows of output of the last sequence pushed: see [`StepInputs::yield_rows`].
    pub fn last_outputs(&self) -> Range<usize> {
        self.first_output..self.outputs()
    }

    fn outputs(&self) -> usize {
        if self.lists_outputs { self.step.outputs.len() } else { self.step.seqs.len() }
    }

    /// Asks for the logits of the last sequence pushed, of all of its rows of output; where an executor picks,
    /// they come edited.
    pub fn ask_logits(&mut self) {
        let last = self.last_outputs();
        if let LogitRows::Of(rows) = &mut self.logit_rows {
            let known = rows.last().map_or(0, |row| *row as usize + 1);
            rows.extend(last.start.max(known) as u32..last.end as u32);
        }
    }

    /// Rows of output whose logits are wanted.
    pub fn logit_rows(&self) -> &LogitRows {
        &self.logit_rows
    }

    /// How the token after the last sequence pushed is picked; the likeliest if this is not called.
    /// Executors that do not [sample](super::Executor::samples) pay no heed to it.
    pub fn set_pick(&mut self, pick: &TokenPick<'_>) {
        if let Some(row) = self.last_outputs().last() {
            self.set_row_pick(row, pick);
        }
    }

    /// As [`StepInputs::set_pick`], of any row of output.
    pub fn set_row_pick(&mut self, row: usize, pick: &TokenPick<'_>) {
        if !pick.is_greedy() {
            self.step.picks.set(row, pick.row(), pick.edits);
        }
    }

    /// How some row's token is picked will be said once the step is submitted, by [`Executor::pick`](super::Executor::pick).
    pub fn defer_picks(&mut self) {
        self.defers_picks = true;
    }

    /// Whether how tokens are picked is not all said yet.
    pub fn defers_picks(&self) -> bool {
        self.defers_picks
    }

    /// Whether nothing but the likeliest token of each row of output is wanted.
    pub fn is_greedy(&self) -> bool {
        let no_logits = matches!(&self.logit_rows, LogitRows::Of(rows) if rows.is_empty());
        no_logits && self.step.picks.rows().is_empty() && !self.defers_picks
    }

    /// What the step asks of its schedule.
    pub(crate) fn asks(&self) -> Asks {
        Asks { greedy: self.is_greedy(), adapted: !self.step.adapters.is_empty() }
    }

    /// The rows of sequences pushed from here on are of prompts, also where there is one token.
    pub fn begin_prompts(&mut self) {
        self.has_prompts = true;
    }

    /// Sequences whose row was generated, or could have been: the first ones pushed, of one token each, up to
    /// the first that has more or to [`StepInputs::begin_prompts`]. Executors may compute their rows in
    /// another way than those of prompts, so that whoever pushes them first gains by it.
    pub fn generated(&self) -> usize {
        self.generated
    }

    /// Adds a sequence: `tokens` to compute, after which its cache holds `context` rows, row `i`
    /// in block `blocks[i / block_size]`. No block may be another sequence's that is written. For a cache of several
    /// groups of layers `blocks` is a table of each, one after the other and of one length; a slot, which fills the first
    /// of its blocks, is read and written in the same place, and zero before the first token.
    pub fn push(
        &mut self,
        tokens: &[u32],
        context: usize,
        blocks: &[u32],
    ) -> Result<(), ExecError> {
        let each = blocks.len() / self.groups.len().max(1);
        let table = |group| GroupRows::Table(&blocks[group * each..(group + 1) * each]);
        self.push_rows(tokens, context, (0..self.groups.len()).map(table))
    }

    /// As [`StepInputs::push`], with what the sequence has of each group.
    pub fn push_rows<'a>(
        &mut self,
        tokens: &[u32],
        context: usize,
        rows: impl IntoIterator<Item = GroupRows<'a>>,
    ) -> Result<(), ExecError> {
        if tokens.is_empty() || tokens.len() > context {
            let n = tokens.len();
            let message = format!("{n} token(s) do not fit a context of {context} row(s)");
            return Err(ExecError::Inputs(message));
        }
        let (tables, blocks) = (self.tables.len(), self.blocks.len());
        let pushed = self.push_tables(tokens.len(), context, rows);
        if pushed.is_err() {
            self.tables.truncate(tables);
            self.blocks.truncate(blocks);
            return pushed;
        }
        self.tokens.extend_from_slice(tokens);
        self.first_output = self.outputs();
        self.step.seqs.push(SeqShape { new: tokens.len(), context });
        if self.lists_outputs {
            self.step.outputs.push(self.tokens.len() as u32 - 1);
        }
        self.has_prompts |= tokens.len() > 1;
        self.generated += usize::from(!self.has_prompts);
        Ok(())
    }

    fn push_tables<'a>(
        &mut self,
        new: usize,
        context: usize,
        rows: impl IntoIterator<Item = GroupRows<'a>>,
    ) -> Result<(), ExecError> {
        let mut groups = 0;
        for (group, rows) in rows.into_iter().enumerate() {
            groups += 1;
            let start = self.blocks.len();
            let message = match (self.groups.get(group), rows) {
                (Some(GroupKind::Paged | GroupKind::Ring { .. }), GroupRows::Table(table)) => {
                    let needed = context.div_ceil(self.block_size);
                    if let Some(table) = table.get(..needed) {
                        self.blocks.extend_from_slice(table);
                        self.tables.push([start; 2]);
                        continue;
                    }
                    let (size, found) = (self.block_size, table.len());
                    format!(
                        "{context} context rows need {needed} block(s) of {size}, found {found}"
                    )
                }
                (Some(GroupKind::Slot { blocks }), GroupRows::Slot { read, write })
                    if write.len() >= *blocks && (read.is_empty() || read.len() >= *blocks) =>
                {
                    let read = read.get(..*blocks).unwrap_or(&[]);
                    self.blocks.extend_from_slice(read);
                    self.tables.push([start, self.blocks.len()]);
                    self.blocks.extend_from_slice(&write[..*blocks]);
                    continue;
                }
                // In one place, which is zero before the first token.
                (Some(GroupKind::Slot { blocks }), GroupRows::Table(table))
                    if table.len() >= *blocks =>
                {
                    let read = if new == context { &[] } else { &table[..*blocks] };
                    self.blocks.extend_from_slice(read);
                    self.tables.push([start, self.blocks.len()]);
                    self.blocks.extend_from_slice(&table[..*blocks]);
                    continue;
                }
                (expected, _) => {
                    format!("group {group}: expected what belongs to {expected:?}, found {rows:?}")
                }
            };
            return Err(ExecError::Inputs(message));
        }
        if groups != self.groups.len() {
            let expected = self.groups.len();
            let message =
                format!("expected what {expected} group(s) of layers have, found {groups}");
            return Err(ExecError::Inputs(message));
        }
        Ok(())
    }

    /// As [`StepInputs::push_rows`], of one token: that of row `row` of the output of the step submitted before this one,
    /// which need not have ended. For executors that [take](super::Executor::feeds) it.
    pub fn push_fed<'a>(
        &mut self,
        row: usize,
        context: usize,
        rows: impl IntoIterator<Item = GroupRows<'a>>,
    ) -> Result<(), ExecError> {
        self.push_rows(&[FED | row as u32], context, rows)?;
        self.fed = true;
        Ok(())
    }

    /// Whether any token is that of a row of the step before.
    pub fn is_fed(&self) -> bool {
        self.fed
    }

    /// The row of the step before whose token a token is to be, if it is.
    pub fn fed_row(token: u32) -> Option<usize> {
        (token & FED != 0).then_some((token & !FED) as usize)
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// The sequences, in the order of their tokens.
    pub fn step(&self) -> &StepShape {
        &self.step
    }

    /// Whether all rows are [generated](StepInputs::generated) ones.
    pub fn is_decode_only(&self) -> bool {
        self.generated == self.step.seqs.len()
    }

    /// Token ids, u32 `[T]`; see [`StepInputs::fed_row`].
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// A group's table of the blocks of one sequence; of a slot, those that are written. Panics outside.
    pub fn blocks(&self, seq: usize, group: usize) -> &[u32] {
        let at = seq * self.groups.len() + group;
        let end = self.tables.get(at + 1).map_or(self.blocks.len(), |next| next[0]);
        &self.blocks[self.tables[at][1]..end]
    }

    /// The blocks that a group's slot is read from; none if it is zero. Panics outside.
    pub fn slot_read(&self, seq: usize, group: usize) -> &[u32] {
        let [read, write] = self.tables[seq * self.groups.len() + group];
        &self.blocks[read..write]
    }

    /// The cache's rows that a step writes in a group: one a token or, of slots, all in their blocks.
    pub(crate) fn written_rows(&self, group: usize) -> impl Iterator<Item = usize> + '_ {
        let is_slot = matches!(self.groups[group], GroupKind::Slot { .. });
        self.step.seqs.iter().enumerate().flat_map(move |(b, seq)| {
            let table = self.blocks(b, group);
            let row = move |p: usize| {
                table[p / self.block_size] as usize * self.block_size + p % self.block_size
            };
            let all = if is_slot {
                0..table.len() * self.block_size
            } else {
                seq.context - seq.new..seq.context
            };
            all.map(row)
        })
    }

    /// All blocks that the step names; some may be given back already.
    pub fn all_blocks(&self) -> &[u32] {
        &self.blocks
    }
}
