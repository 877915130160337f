//! The inputs of a step, as kernels see them: an [`abi::Step`] for each [`Part`] of its rows in each group of
//! layers, and the arrays that these name.

use std::ops::Range;

use infernum_codegen::cuda::abi::{self, Address, Part};
use infernum_ir::picking::PickRow;
use infernum_ir::{Dims, StepInput, Sym};

use super::parts::PartDims;

use crate::exec::{ExecError, GroupKind, StepInputs};

/// Where each array lies behind the headers, for steps of at most some size. The table of blocks
/// comes last: a small step copies only the rows that it has. Behind these a step that has generated rows and
/// prompt rows brings what its [`PromptArrays`] are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    base: u64,
    limits: Dims,
    /// Blocks of one sequence at most.
    stride: usize,
    /// Rows whose tokens are picked at most.
    picks: usize,
    /// Tokens of which it is told which text they are of, at most.
    segments: usize,
    adapters: usize,
    offsets: [usize; FIELDS],
    end: usize,
    /// Whether kernels are launched for parts of the rows, which only then have headers.
    parts: bool,
    /// Groups of layers, each with slots and tables of blocks of its own.
    groups: usize,
}

/// How much a layout has room for, besides what a step's sizes say.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Blocks in a sequence's table.
    pub(super) table: usize,
    /// Blocks of its slots, twice.
    pub(super) slots: usize,
    /// Groups of layers, each with slots and tables of blocks of its own.
    pub(super) groups: usize,
    /// Rows for which tokens are picked, at most.
    pub(super) picks: usize,
    /// Tokens of which it is told which text they are of, at most: none where no kernel reads that.
    pub(super) segments: usize,
    /// Tokens of which it is told which adapter they have, at most: none where no kernel reads that.
    pub(super) adapters: usize,
}

/// Where a slot is read that is zero.
const NO_BLOCK: u32 = u32::MAX;

/// Bytes of a view of the step.
const HEADER: usize = size_of::<abi::Step>();

/// Arrays behind the headers.
const FIELDS: usize = Field::Adapters as usize + 1;

/// One of them.
#[derive(Clone, Copy)]
#[repr(usize)]
enum Field {
    Tokens,
    Positions,
    OutputRows,
    ContextPositions,
    Seq,
    Slots,
    First,
    Context,
    ContextStart,
    PairStart,
    Blocks,
    Picks,
    Segments,
    Adapters,
}

impl Layout {
    /// `contexts`: whether kernels read `context_positions`, which only then has room. `parts`: whether any is
    /// launched for a part of the rows.
    pub(super) fn new(limits: &Dims, room: Room, (contexts, parts): (bool, bool)) -> Layout {
        let Room { table, slots, groups, picks, segments, adapters } = room;
        let (t, b, seqs) = (limits.t as usize, limits.b as usize, limits.seqs as usize);
        let stride = table.min((limits.s as usize).div_ceil(StepInputs::BLOCK_SIZE));
        let stride = stride.max(slots).max(1);
        let context_rows = if contexts { limits.s as usize } else { 0 };
        let sizes: [usize; FIELDS] = [
            4 * t,
            4 * t,
            4 * t.max(b),
            4 * context_rows,
            4 * t,
            4 * t * groups,
            4 * (seqs + 1),
            4 * seqs,
            4 * (seqs + 1),
            8 * t,
            4 * seqs * stride * groups,
            4 * PickRow::WORDS * picks,
            4 * segments,
            4 * adapters,
        ];
        let headers = groups * views(parts);
        let (mut offsets, mut end) = ([0; FIELDS], (headers * HEADER).next_multiple_of(64));
        let blocks = Field::Blocks as usize;
        for field in (0..FIELDS).filter(|f| *f != blocks).chain([blocks]) {
            offsets[field] = end;
            end += sizes[field].next_multiple_of(64);
        }
        end += if parts { PromptArrays::bytes(limits) } else { 0 };
        Layout {
            base: 0,
            limits: *limits,
            stride,
            picks,
            segments,
            adapters,
            offsets,
            end,
            parts,
            groups,
        }
    }

    /// Where kernels of a group's layers that are launched for a part of the rows find what they must know of it.
    pub(super) fn view(&self, group: usize, part: Part) -> u64 {
        self.base + self.header(group, part) as u64
    }

    fn header(&self, group: usize, part: Part) -> usize {
        HEADER * (group * views(self.parts) + part.view())
    }

    /// Where a group's slots begin in a step of so many tokens, and its tables in one of so many sequences.
    fn of_group(&self, group: usize, dims: &Dims) -> [u64; 2] {
        let group = group as u64;
        let slots = self.address(Field::Slots) + 4 * group * dims.t;
        [slots, self.address(Field::Blocks) + 4 * group * dims.seqs * self.stride as u64]
    }

    /// Its size.
    pub(super) fn bytes(&self) -> usize {
        self.end
    }

    /// The address at which kernels see it.
    pub(super) fn at(self, base: u64) -> Layout {
        Layout { base, ..self }
    }

    fn address(&self, field: Field) -> u64 {
        self.base + self.offsets[field as usize] as u64
    }

    /// Where an input that is an operand lies.
    pub(super) fn input(&self, input: StepInput) -> u64 {
        self.address(match input {
            StepInput::Tokens => Field::Tokens,
            StepInput::Positions => Field::Positions,
            StepInput::ContextPositions => Field::ContextPositions,
            StepInput::Segments => Field::Segments,
            StepInput::Adapters => Field::Adapters,
            StepInput::OutputRows => Field::OutputRows,
            StepInput::Picks => Field::Picks,
        })
    }

    /// Writes a step, after checking it; what must be copied is the returned number of bytes. `lists`
    /// is where kernels see those that picks name.
    pub(super) fn write(
        &self,
        inputs: &StepInputs,
        blocks: usize,
        output_rows: Option<Sym>,
        lists: u64,
        to: &mut [u8],
    ) -> Result<(PartDims, usize), ExecError> {
        let dims = PartDims::new(inputs);
        ExecError::check_limits(&dims.all, &self.limits)?;
        if let Some(block) = inputs.all_blocks().iter().find(|b| **b as usize >= blocks) {
            let message = format!("block {block} is outside a KV cache of {blocks} block(s)");
            return Err(ExecError::Inputs(message));
        }
        let seqs = &inputs.step().seqs;
        let mut w = Writer { layout: self, lists, to, at: [0; FIELDS] };
        w.extend(Field::Tokens, inputs.tokens());
        let segments = inputs.step().segments().take(self.segments);
        segments.for_each(|segment| w.push(Field::Segments, segment));
        let adapters = inputs.step().token_adapters().take(self.adapters);
        adapters.for_each(|adapter| w.push(Field::Adapters, adapter));
        let contexts =
            self.offsets[Field::Seq as usize] > self.offsets[Field::ContextPositions as usize];
        let (mut token, mut row, mut pair) = (0u32, 0u32, 0u64);
        for (b, seq) in seqs.iter().enumerate() {
            w.push(Field::First, token);
            w.push(Field::Context, seq.context as u32);
            w.push(Field::ContextStart, row);
            for position in seq.context - seq.new..seq.context {
                w.push(Field::Positions, position as u32);
                w.push(Field::Seq, b as u32);
                w.push_wide(Field::PairStart, pair);
                pair += seq.context as u64;
                if output_rows == Some(Sym::T) {
                    w.push(Field::OutputRows, token);
                }
                token += 1;
            }
            if contexts {
                (0..seq.context).for_each(|p| w.push(Field::ContextPositions, p as u32));
            }
            row += seq.context as u32;
        }
        for group in 0..self.groups {
            w.tables(inputs, group)?;
        }
        w.push(Field::First, token);
        w.push(Field::ContextStart, row);
        if output_rows != Some(Sym::T) {
            inputs.step().output_rows().for_each(|row| w.push(Field::OutputRows, row));
        }
        let rows = if output_rows == Some(Sym::T) { dims.all.t } else { dims.all.b };
        for row in 0..self.picks.min(rows as usize) {
            w.extend(Field::Picks, &inputs.step().picks.row(row).words());
        }
        let used =
            self.offsets[Field::Blocks as usize] + 4 * self.groups * seqs.len() * self.stride;
        Ok((dims, w.headers(&dims, used)))
    }

    /// Bytes of what brings picks later.
    pub(super) fn picks_bytes(&self) -> usize {
        self.headers() + 4 * PickRow::WORDS * self.picks
    }

    /// Of a step that is `staged` and on the GPU already: writes how its tokens are picked now, and where the lists are
    /// that picks name. What goes where on the GPU.
    pub(super) fn write_picks(
        &self,
        inputs: &StepInputs,
        lists: u64,
        staged: &[u8],
        to: &mut [u8],
    ) -> [(u64, Range<usize>); 2] {
        let (headers, picks) = to.split_at_mut(self.headers());
        headers.copy_from_slice(&staged[..headers.len()]);
        for group in 0..self.groups {
            let at = self.header(group, Part::All);
            let header = &mut headers[at..at + HEADER];
            let step: abi::Step = bytemuck::pod_read_unaligned(header);
            let step = abi::Step { words: Address::new(lists), ..step };
            header.copy_from_slice(bytemuck::bytes_of(&step));
        }
        let rows = inputs.step().picks.rows();
        let rows = &rows[..rows.len().min(self.picks)];
        for (row, to) in rows.iter().zip(picks.chunks_exact_mut(4 * PickRow::WORDS)) {
            to.copy_from_slice(bytemuck::cast_slice(&row.words()));
        }
        let end = headers.len() + 4 * PickRow::WORDS * rows.len();
        [(self.base, 0..headers.len()), (self.address(Field::Picks), headers.len()..end)]
    }

    /// Bytes of the headers.
    fn headers(&self) -> usize {
        HEADER * self.groups * views(self.parts)
    }
}

/// Headers of a group.
fn views(parts: bool) -> usize {
    if parts { Part::ALL.len() } else { 1 }
}

struct Writer<'a> {
    layout: &'a Layout,
    lists: u64,
    to: &'a mut [u8],
    /// Bytes written of each array.
    at: [usize; FIELDS],
}

impl Writer<'_> {
    /// Writes the views of the step, once its arrays are there; `used` bytes are taken, and those that are
    /// returned then.
    fn headers(&mut self, dims: &PartDims, used: usize) -> usize {
        let mut arrays = None;
        let mut end = used;
        if self.layout.parts && dims.is_mixed() {
            let own = PromptArrays { from: used.next_multiple_of(64), dims: dims.of(Part::Prompt) };
            own.write(self, &dims.generated);
            end = own.from + PromptArrays::bytes(&own.dims);
            arrays = Some(own);
        }
        for group in 0..self.layout.groups {
            let all = self.header(group, &dims.all);
            self.put(group, Part::All, &all);
            if !self.layout.parts {
                continue;
            }
            // What is picked is picked for all rows at once.
            let part =
                abi::Step { output_rows: Address::default(), words: Address::default(), ..all };
            self.put(group, Part::Generated, &of_size(part, &dims.generated));
            let prompt = of_size(part, &dims.of(Part::Prompt));
            let prompt =
                arrays.as_ref().map_or(prompt, |own| own.view(self.layout, group, dims, prompt));
            self.put(group, Part::Prompt, &prompt);
        }
        end
    }

    /// A group's slots and tables of blocks.
    fn tables(&mut self, inputs: &StepInputs, group: usize) -> Result<(), ExecError> {
        const SIZE: usize = StepInputs::BLOCK_SIZE;
        let (seqs, stride) = (&inputs.step().seqs, self.layout.stride);
        let is_slot = matches!(inputs.groups()[group], GroupKind::Slot { .. });
        self.at[Field::Slots as usize] = 4 * group * inputs.tokens().len();
        for (b, seq) in seqs.iter().enumerate() {
            let table = inputs.blocks(b, group);
            let entries = if is_slot { 2 * table.len() } else { table.len() };
            if entries > stride {
                let message =
                    format!("a sequence of {entries} blocks, at most {stride} are planned for");
                return Err(ExecError::Inputs(message));
            }
            if is_slot {
                self.at[Field::Blocks as usize] = 4 * (group * seqs.len() + b) * stride;
                let read = inputs.slot_read(b, group);
                for (i, block) in table.iter().enumerate() {
                    self.push(Field::Blocks, *block);
                    self.push(Field::Blocks, read.get(i).copied().unwrap_or(NO_BLOCK));
                }
                continue;
            }
            for position in seq.context - seq.new..seq.context {
                let slot = table[position / SIZE] * SIZE as u32 + (position % SIZE) as u32;
                self.push(Field::Slots, slot);
            }
            self.at[Field::Blocks as usize] = 4 * (group * seqs.len() + b) * stride;
            self.extend(Field::Blocks, table);
        }
        Ok(())
    }

    fn put(&mut self, group: usize, part: Part, step: &abi::Step) {
        let at = self.layout.header(group, part);
        self.to[at..at + HEADER].copy_from_slice(bytemuck::bytes_of(step));
    }

    fn header(&self, group: usize, dims: &Dims) -> abi::Step {
        let at = |field| self.layout.address(field);
        let [slots, blocks] = self.layout.of_group(group, dims);
        abi::Step {
            T: dims.t as i32,
            B: dims.b as i32,
            S: dims.s as i32,
            seqs: dims.seqs as i32,
            block_stride: self.layout.stride as i64,
            pairs: dims.pairs as i64,
            tokens: Address::new(at(Field::Tokens)),
            positions: Address::new(at(Field::Positions)),
            output_rows: Address::new(at(Field::OutputRows)),
            context_positions: Address::new(at(Field::ContextPositions)),
            seq: Address::new(at(Field::Seq)),
            slots: Address::new(slots),
            first: Address::new(at(Field::First)),
            context: Address::new(at(Field::Context)),
            context_start: Address::new(at(Field::ContextStart)),
            pair_start: Address::new(at(Field::PairStart)),
            blocks: Address::new(blocks),
            words: Address::new(self.lists),
            all: dims.t as i32,
            before: 0,
        }
    }

    fn push(&mut self, field: Field, value: u32) {
        let at = self.layout.offsets[field as usize] + self.at[field as usize];
        self.to[at..at + 4].copy_from_slice(&value.to_le_bytes());
        self.at[field as usize] += 4;
    }

    /// As pushing each; tables of blocks are most of what a decode step brings.
    fn extend(&mut self, field: Field, values: &[u32]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let at = self.layout.offsets[field as usize] + self.at[field as usize];
        self.to[at..at + bytes.len()].copy_from_slice(bytes);
        self.at[field as usize] += bytes.len();
    }

    fn push_wide(&mut self, field: Field, value: u64) {
        let at = self.layout.offsets[field as usize] + self.at[field as usize];
        self.to[at..at + 8].copy_from_slice(&value.to_le_bytes());
        self.at[field as usize] += 8;
    }
}

fn of_size(step: abi::Step, dims: &Dims) -> abi::Step {
    let (t, b, s, seqs) = (dims.t as i32, dims.b as i32, dims.s as i32, dims.seqs as i32);
    abi::Step { T: t, B: b, S: s, seqs, pairs: dims.pairs as i64, ..step }
}

/// What the prompt rows of a step that has generated rows, too, have for themselves: the arrays whose numbers
/// count tokens, sequences or context rows, from their own first. Others are found where they are.
struct PromptArrays {
    /// The offset of the first.
    from: usize,
    /// Sizes of the part.
    dims: Dims,
}

impl PromptArrays {
    const OWN: [Field; 4] = [Field::PairStart, Field::Seq, Field::First, Field::ContextStart];

    /// Room for those of a part of these sizes.
    fn bytes(dims: &Dims) -> usize {
        PromptArrays::OWN.map(|f| PromptArrays::size(f, dims)).iter().sum()
    }

    fn size(field: Field, dims: &Dims) -> usize {
        let (t, seqs) = (dims.t as usize, dims.seqs as usize);
        match field {
            Field::PairStart => 8 * t,
            Field::Seq => 4 * t,
            _ => 4 * (seqs + 1),
        }
    }

    fn at(&self, field: Field) -> usize {
        let before = PromptArrays::OWN.iter().take_while(|f| **f as usize != field as usize);
        self.from + before.map(|f| PromptArrays::size(*f, &self.dims)).sum::<usize>()
    }

    /// Makes them of those of the whole step; `before` are the sizes of the rows before the part.
    fn write(&self, w: &mut Writer<'_>, before: &Dims) {
        let (from, to) = w.to.split_at_mut(self.from);
        for field in PromptArrays::OWN {
            let (skipped, less) = match field {
                Field::PairStart => (8 * before.t, before.pairs),
                Field::Seq => (4 * before.t, before.seqs),
                Field::First => (4 * before.seqs, before.t),
                _ => (4 * before.seqs, before.s),
            };
            let size = PromptArrays::size(field, &self.dims);
            let start = w.layout.offsets[field as usize] + skipped as usize;
            let to = &mut to[self.at(field) - self.from..][..size];
            to.copy_from_slice(&from[start..start + size]);
            if matches!(field, Field::PairStart) {
                lower::<8>(to, |n| (u64::from_le_bytes(n) - less).to_le_bytes());
            } else {
                lower::<4>(to, |n| (u32::from_le_bytes(n) - less as u32).to_le_bytes());
            }
        }
    }

    /// The part's view, which is of its size already.
    fn view(&self, layout: &Layout, group: usize, dims: &PartDims, part: abi::Step) -> abi::Step {
        let before = &dims.generated;
        let [slots, blocks] = layout.of_group(group, &dims.all);
        let beyond = |field, elements: u64| layout.address(field) + 4 * elements;
        let own = |field| layout.base + self.at(field) as u64;
        abi::Step {
            tokens: Address::new(beyond(Field::Tokens, before.t)),
            positions: Address::new(beyond(Field::Positions, before.t)),
            context_positions: Address::new(beyond(Field::ContextPositions, before.s)),
            seq: Address::new(own(Field::Seq)),
            slots: Address::new(slots + 4 * before.t),
            first: Address::new(own(Field::First)),
            context: Address::new(beyond(Field::Context, before.seqs)),
            context_start: Address::new(own(Field::ContextStart)),
            pair_start: Address::new(own(Field::PairStart)),
            blocks: Address::new(blocks + 4 * before.seqs * layout.stride as u64),
            before: before.t as i32,
            ..part
        }
    }
}

/// Changes each number of `N` bytes.
fn lower<const N: usize>(bytes: &mut [u8], change: impl Fn([u8; N]) -> [u8; N]) {
    let (numbers, _) = bytes.as_chunks_mut::<N>();
    numbers.iter_mut().for_each(|n| *n = change(*n));
}

#[cfg(test)]
mod tests;
