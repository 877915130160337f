//! The inputs of a step, as kernels see them: an [`abi::Step`] for each [`Part`] of its rows in each group of
//! layers, and the arrays that these name.

use infernum_codegen::cuda::abi::{self, Address, Part};
use infernum_ir::picking::PickRow;
use infernum_ir::{Dims, StepInput, Sym};

use super::parts::PartDims;

use crate::exec::{ExecError, StepInputs};

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
    /// Groups of layers, each with slots and tables of blocks of its own.
    pub(super) groups: usize,
    /// Rows for which tokens are picked, at most.
    pub(super) picks: usize,
}

/// Bytes of a view of the step.
const HEADER: usize = size_of::<abi::Step>();

/// Arrays behind the headers.
const FIELDS: usize = Field::Picks as usize + 1;

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
}

impl Layout {
    /// `contexts`: whether kernels read `context_positions`, which only then has room. `parts`: whether any is
    /// launched for a part of the rows.
    pub(super) fn new(limits: &Dims, room: Room, (contexts, parts): (bool, bool)) -> Layout {
        let Room { table, groups, picks } = room;
        let (t, b, seqs) = (limits.t as usize, limits.b as usize, limits.seqs as usize);
        let stride = table.min((limits.s as usize).div_ceil(StepInputs::BLOCK_SIZE)).max(1);
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
        ];
        let headers = groups * if parts { Part::ALL.len() } else { 1 };
        let (mut offsets, mut end) = ([0; FIELDS], (headers * HEADER).next_multiple_of(64));
        let blocks = Field::Blocks as usize;
        for field in (0..FIELDS).filter(|f| *f != blocks).chain([blocks]) {
            offsets[field] = end;
            end += sizes[field].next_multiple_of(64);
        }
        end += if parts { PromptArrays::bytes(limits) } else { 0 };
        Layout { base: 0, limits: *limits, stride, picks, offsets, end, parts, groups }
    }

    /// Where kernels of a group's layers that are launched for a part of the rows find what they must know of it.
    pub(super) fn view(&self, group: usize, part: Part) -> u64 {
        self.base + self.header(group, part) as u64
    }

    fn header(&self, group: usize, part: Part) -> usize {
        let parts = if self.parts { Part::ALL.len() } else { 1 };
        HEADER * (group * parts + part.view())
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
        for (b, seq) in seqs.iter().enumerate() {
            let table = inputs.blocks(b, group);
            if table.len() > stride {
                let found = table.len();
                let message =
                    format!("a sequence of {found} blocks, at most {stride} are planned for");
                return Err(ExecError::Inputs(message));
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
mod tests {
    use super::*;
    use infernum_ir::picking::Edits;

    use crate::sampling::{SamplingParams, SeenToken, Tell, TokenPick};

    fn room(blocks: usize, picks: usize) -> Room {
        Room { table: blocks, groups: 1, picks }
    }

    #[test]
    fn a_step_is_laid_out_as_kernels_read_it() {
        let limits = Dims { t: 8, b: 2, s: 64, pairs: 512, seqs: 2 };
        let layout = Layout::new(&limits, room(9, 2), (true, false)).at(1 << 20);
        let mut inputs = StepInputs::new(StepInputs::BLOCK_SIZE);
        inputs.push(&[5, 6], 18, &[3, 7]).expect("a sequence");
        inputs.push(&[8], 1, &[0]).expect("a sequence");
        let params = SamplingParams { temperature: 2.0, top_k: 40, ..SamplingParams::default() };
        let seen = [SeenToken { token: 5, generated: 1 }; 3];
        let edits = Edits { bias: &[(9, 1.0)], seen: &seen, allowed: None };
        let tell = Some(Tell { top: 5, given: None });
        inputs.set_pick(&TokenPick { params, position: 1, edits, counts_own: true, tell });
        let mut bytes = vec![7; layout.bytes()];
        let (dims, used) =
            layout.write(&inputs, 9, Some(Sym::B), 4096, &mut bytes).expect("a step");
        assert_eq!((dims.all.t, dims.all.b, dims.all.s), (3, 2, 19));
        assert!(used <= layout.bytes());
        let word =
            |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let wide =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        assert_eq!([word(0), word(4), word(8), word(12)], [3, 2, 19, 2]);
        assert_eq!([wide(16), wide(24)], [4, 2 * 18 + 1]);
        let array = |field: Field, n: usize| -> Vec<u32> {
            let at = (layout.address(field) - (1 << 20)) as usize;
            (0..n).map(|i| word(at + 4 * i)).collect()
        };
        assert_eq!(array(Field::Tokens, 3), [5, 6, 8]);
        assert_eq!(array(Field::Positions, 3), [16, 17, 0]);
        assert_eq!(array(Field::Slots, 3), [7 * 16, 7 * 16 + 1, 0]);
        assert_eq!(array(Field::Seq, 3), [0, 0, 1]);
        assert_eq!(array(Field::First, 3), [0, 2, 3]);
        assert_eq!(array(Field::ContextStart, 3), [0, 18, 19]);
        assert_eq!(array(Field::OutputRows, 2), [1, 2]);
        assert_eq!(array(Field::Blocks, 2), [3, 7]);
        assert_eq!(array(Field::ContextPositions, 19)[17..], [17, 0]);
        assert_eq!(array(Field::PairStart, 6), [0, 0, 18, 0, 36, 0]);
        let picks = array(Field::Picks, 2 * PickRow::WORDS);
        let (first, second) = picks.split_at(PickRow::WORDS);
        assert_eq!(first, [0; PickRow::WORDS], "greedy");
        let set = inputs.step().picks.row(1);
        assert_eq!(PickRow::from_words(second), set);
        assert_eq!((set.scale, set.top_k), (std::f32::consts::LOG2_E / 2.0, 40));
        let PickRow { lists, biased, seen, counts_own, told, given, .. } = set;
        assert_eq!([lists, biased, seen, counts_own, told, given], [0, 1, 3, 1, 6, 0]);
        assert_eq!(inputs.step().picks.words(), [9, 1.0f32.to_bits(), 5, 1, 5, 1, 5, 1]);
        assert_eq!(wide(32 + 8 * Field::Picks as usize), 4096, "the lists");
        let found = wide(32 + 8 * Field::Slots as usize);
        assert_eq!(found, layout.address(Field::Slots));
    }

    /// Each group's views have slots and tables of their own, and all else alike.
    #[test]
    fn groups_have_slots_and_tables_of_their_own() {
        use crate::exec::GroupKind;
        let limits = Dims { t: 9, b: 5, s: 64, pairs: 512, seqs: 5 };
        let room = Room { groups: 2, ..room(9, 0) };
        let layout = Layout::new(&limits, room, (false, true)).at(1 << 20);
        let groups = [GroupKind::Paged, GroupKind::Ring { window: 8 }];
        let mut inputs = StepInputs::new(StepInputs::BLOCK_SIZE).with_groups(&groups);
        inputs.push(&[1], 18, &[3, 7, 5, 6]).expect("a generated row");
        inputs.push(&[2, 3], 17, &[2, 8, 0, 4]).expect("a prompt");
        let mut bytes = vec![7; layout.bytes()];
        let (_, used) = layout.write(&inputs, 9, None, 0, &mut bytes).expect("a step");
        assert!(used <= layout.bytes());
        let words = |address: u64, n: usize| -> Vec<u32> {
            let at = (address - (1 << 20)) as usize;
            bytemuck::pod_collect_to_vec(&bytes[at..at + 4 * n])
        };
        for (group, [first, second]) in [[[3, 7], [2, 8]], [[5, 6], [0, 4]]].into_iter().enumerate()
        {
            for (part, tables) in [
                (Part::All, vec![first, second]),
                (Part::Generated, vec![first]),
                (Part::Prompt, vec![second]),
            ] {
                let header = words(layout.view(group, part), HEADER / 4);
                let step: abi::Step = bytemuck::pod_read_unaligned(bytemuck::cast_slice(&header));
                let new: Vec<u32> = match part {
                    Part::All => vec![first[1] * 16 + 1, second[0] * 16 + 15, second[1] * 16],
                    Part::Generated => vec![first[1] * 16 + 1],
                    Part::Prompt => vec![second[0] * 16 + 15, second[1] * 16],
                };
                assert_eq!(words(bytemuck::cast(step.slots), new.len()), new, "{group} {part:?}");
                for (b, table) in tables.iter().enumerate() {
                    let at = bytemuck::cast::<_, u64>(step.blocks) + (4 * b * layout.stride) as u64;
                    assert_eq!(words(at, 2), table, "{group} {part:?}");
                }
                let rows = words(bytemuck::cast(step.positions), new.len());
                assert_eq!(
                    rows,
                    if part == Part::Prompt {
                        vec![15, 16]
                    } else {
                        vec![17, 15, 16][..new.len()].to_vec()
                    }
                );
            }
        }
    }

    /// Each part's view is what a step of its rows alone would have, wherever the arrays lie; but for what is
    /// picked, which no part has.
    #[test]
    fn a_part_is_seen_as_a_step_of_its_own() {
        let sequences = [(1, 18, [3, 7]), (1, 1, [0, 0]), (4, 20, [5, 6]), (1, 9, [8, 0])];
        let inputs = |which: &[(usize, usize, [u32; 2])]| {
            let mut inputs = StepInputs::new(StepInputs::BLOCK_SIZE);
            for &(new, context, blocks) in which {
                let tokens: Vec<u32> = (0..new).map(|i| (10 * context + i) as u32).collect();
                inputs.push(&tokens, context, &blocks).expect("a sequence");
            }
            inputs
        };
        let limits = Dims { t: 9, b: 5, s: 64, pairs: 512, seqs: 5 };
        let layout = Layout::new(&limits, room(9, 2), (true, true)).at(1 << 20);
        for generated in 0..=sequences.len() {
            // Generated rows are those in front.
            let order: Vec<_> = (0..4).filter(|i| *i != 2).chain([2]).collect();
            let mixed: Vec<_> = order.iter().map(|i| sequences[*i]).collect();
            let mut all = StepInputs::new(StepInputs::BLOCK_SIZE);
            for (i, &(new, context, blocks)) in mixed.iter().enumerate() {
                if i == generated {
                    all.begin_prompts();
                }
                let tokens: Vec<u32> = (0..new).map(|i| (10 * context + i) as u32).collect();
                all.push(&tokens, context, &blocks).expect("a sequence");
            }
            let generated = generated.min(3); // the last has four tokens
            let mut bytes = vec![7; layout.bytes()];
            let (dims, used) = layout.write(&all, 9, Some(Sym::B), 0, &mut bytes).expect("a step");
            assert!(used <= layout.bytes());
            for (part, own) in [
                (Part::All, &mixed[..]),
                (Part::Generated, &mixed[..generated]),
                (Part::Prompt, &mixed[generated..]),
            ] {
                let size = |dims: Dims| Dims { b: 0, ..dims };
                assert_eq!(size(dims.of(part)), size(inputs(own).step().dims()));
                let seen = Seen { bytes: &bytes[..used], at: HEADER * part.view() };
                let mut alone = vec![9; layout.bytes()];
                let (_, end) =
                    layout.write(&inputs(own), 9, Some(Sym::B), 0, &mut alone).expect("a step");
                let alone = Seen { bytes: &alone[..end], at: 0 };
                assert_eq!(seen.arrays(), alone.arrays(), "{part:?}, {generated} generated");
                let step: abi::Step =
                    bytemuck::pod_read_unaligned(&bytes[seen.at..seen.at + HEADER]);
                let none = Address::default();
                assert_eq!(step.output_rows == none, part != Part::All);
            }
        }
    }

    /// A view, as a kernel sees it.
    struct Seen<'a> {
        bytes: &'a [u8],
        at: usize,
    }

    impl Seen<'_> {
        fn words(&self, at: usize, n: usize) -> Vec<u32> {
            let all = self.bytes[at..at + 4 * n].chunks_exact(4);
            all.map(|b| u32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
        }

        /// The step's sizes and all that it points to.
        fn arrays(&self) -> Vec<Vec<u32>> {
            let mut sizes = self.words(self.at, 8);
            sizes[1] = 0; // output is of all rows
            let [t, _, s, b, stride] = [0, 1, 2, 3, 4].map(|i| sizes[i] as usize);
            let array = |field: Field, n: usize| {
                let low = self.words(self.at + 32 + 8 * field as usize, 2)[0] as usize;
                self.words(low - (1 << 20), n)
            };
            let fields = [
                (Field::Tokens, t),
                (Field::Positions, t),
                (Field::ContextPositions, s),
                (Field::Seq, t),
                (Field::Slots, t),
                (Field::First, if t > 0 { b + 1 } else { 0 }),
                (Field::Context, b),
                (Field::ContextStart, if t > 0 { b + 1 } else { 0 }),
                (Field::PairStart, 2 * t),
            ];
            let mut all: Vec<_> = fields.into_iter().map(|(field, n)| array(field, n)).collect();
            let contexts = array(Field::Context, b);
            let blocks = array(Field::Blocks, b * stride);
            for (context, table) in contexts.iter().zip(blocks.chunks_exact(stride)) {
                all.push(table[..(*context as usize).div_ceil(StepInputs::BLOCK_SIZE)].to_vec());
            }
            all.push(sizes);
            all
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let limits = Dims { t: 2, b: 1, s: 32, pairs: 64, seqs: 1 };
        let layout = Layout::new(&limits, room(2, 1), (false, false));
        let mut bytes = vec![0; layout.bytes()];
        let mut inputs = StepInputs::new(StepInputs::BLOCK_SIZE);
        inputs.push(&[1], 20, &[1, 2]).expect("a sequence");
        let outside = layout.write(&inputs, 2, None, 0, &mut bytes);
        assert!(matches!(outside, Err(ExecError::Inputs(_))));
        inputs.push(&[1], 1, &[0]).expect("a sequence");
        let large = layout.write(&inputs, 9, None, 0, &mut bytes);
        assert!(matches!(large, Err(ExecError::TooLarge { .. })));
    }
}
