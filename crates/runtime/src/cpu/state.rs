//! What kernels know about the step.

use infernum_ir::interp::{StepShape, TokenPlace};
use infernum_ir::{Dims, StepInput, Sym};

use crate::exec::{ExecError, GroupKind, StepInputs};

/// One step, worked out once for all its launches. Kept between steps for its memory.
#[derive(Debug, Default)]
pub(crate) struct StepState {
    pub(super) step: StepShape,
    pub(super) dims: Dims,
    /// Every token's place in ragged values.
    pub(super) places: Vec<TokenPlace>,
    /// For every context row, its row in a plane of the cache; by group of layers.
    rows: Vec<Vec<u32>>,
    /// Of each sequence of the step, by group: the blocks of its slot before the step, and those after it.
    slots: Vec<Vec<[Vec<u32>; 2]>>,
    /// Rows of a block.
    block_size: usize,
    /// The group of the layer that runs.
    group: usize,
    tokens: Vec<u32>,
    positions: Vec<i32>,
    context_positions: Vec<i32>,
    segments: Vec<u32>,
    adapters: Vec<u32>,
    output_rows: Vec<u32>,
    /// The words of each row's pick.
    picks: Vec<u32>,
}

impl StepState {
    /// Takes a step over, after checking it against a cache of `blocks` blocks.
    pub(super) fn fill(
        &mut self,
        inputs: &StepInputs,
        limits: &Dims,
        blocks: usize,
        output_rows: Option<Sym>,
    ) -> Result<(), ExecError> {
        let dims = inputs.step().dims();
        ExecError::check_limits(&dims, limits)?;
        if let Some(block) = inputs.all_blocks().iter().find(|b| **b as usize >= blocks) {
            let message = format!("block {block} is outside a KV cache of {blocks} block(s)");
            return Err(ExecError::Inputs(message));
        }
        self.dims = dims;
        self.step.seqs.clone_from(&inputs.step().seqs);
        self.step.outputs.clone_from(&inputs.step().outputs);
        refill(&mut self.places, self.step.tokens());
        refill(&mut self.tokens, inputs.tokens().iter().copied());
        refill(&mut self.segments, inputs.step().segments());
        refill(&mut self.adapters, inputs.step().token_adapters());
        refill(&mut self.positions, self.places.iter().map(|p| p.row as i32));
        self.group = 0;
        self.rows.resize_with(inputs.groups().len(), Vec::new);
        self.rows.iter_mut().for_each(Vec::clear);
        self.slots.resize_with(inputs.groups().len(), Vec::new);
        self.slots.iter_mut().for_each(Vec::clear);
        self.block_size = inputs.block_size();
        self.context_positions.clear();
        self.output_rows.clear();
        let size = inputs.block_size();
        for (i, seq) in self.step.seqs.iter().enumerate() {
            for (group, (kind, rows)) in inputs.groups().iter().zip(&mut self.rows).enumerate() {
                if matches!(kind, GroupKind::Slot { .. }) {
                    let lists = [inputs.slot_read(i, group), inputs.blocks(i, group)];
                    self.slots[group].push(lists.map(<[u32]>::to_vec));
                    continue;
                }
                let blocks = inputs.blocks(i, group);
                let row = |r: usize| blocks[r / size] * size as u32 + (r % size) as u32;
                rows.extend((0..seq.context).map(row));
            }
            self.context_positions.extend(0..seq.context as i32);
        }
        if output_rows == Some(Sym::T) {
            self.output_rows.extend(0..dims.t as u32);
        } else {
            self.output_rows.extend(inputs.step().output_rows());
        }
        self.step.picks.clone_from(&inputs.step().picks);
        let rows = 0..self.output_rows.len();
        refill(&mut self.picks, rows.flat_map(|row| inputs.step().picks.row(row).words()));
        Ok(())
    }

    /// From here on a layer of this group runs.
    pub(super) fn enter(&mut self, group: usize) {
        self.group = group;
    }

    /// For every context row, its row in the planes of the layer that runs.
    pub(super) fn rows(&self) -> &[u32] {
        &self.rows[self.group]
    }

    /// Of each sequence: the blocks of the layer's slots before the step, none if they are zero, and those after it.
    pub(super) fn slot_blocks(&self) -> &[[Vec<u32>; 2]] {
        &self.slots[self.group]
    }

    /// Rows of a block.
    pub(super) fn block_size(&self) -> usize {
        self.block_size
    }

    /// The rows that the step may write in the planes of the layer that runs: those of its tokens or, where these are
    /// slots, all of their blocks.
    pub(crate) fn written_rows(&self) -> Vec<usize> {
        if self.slots[self.group].is_empty() {
            return self.slots().collect();
        }
        let blocks = self.slots[self.group].iter().flat_map(|[_, to]| to);
        let size = self.block_size;
        blocks.flat_map(|b| *b as usize * size..(*b as usize + 1) * size).collect()
    }

    /// An input's elements, as bytes.
    pub(super) fn input(&self, input: StepInput) -> &[u8] {
        match input {
            StepInput::Tokens => bytemuck::cast_slice(&self.tokens),
            StepInput::Positions => bytemuck::cast_slice(&self.positions),
            StepInput::ContextPositions => bytemuck::cast_slice(&self.context_positions),
            StepInput::Segments => bytemuck::cast_slice(&self.segments),
            StepInput::Adapters => bytemuck::cast_slice(&self.adapters),
            StepInput::OutputRows => bytemuck::cast_slice(&self.output_rows),
            StepInput::Picks => bytemuck::cast_slice(&self.picks),
        }
    }

    /// The cache rows of the new tokens, in order.
    pub(crate) fn slots(&self) -> impl Iterator<Item = usize> + '_ {
        self.places.iter().map(|p| self.rows()[p.context_start + p.row] as usize)
    }
}

fn refill<T>(vec: &mut Vec<T>, items: impl Iterator<Item = T>) {
    vec.clear();
    vec.extend(items);
}
