//! The inputs of a step, as kernels see them: [`abi::Step`] and the arrays that it names.

use infernum_codegen::cuda::abi::{self, Address};
use infernum_ir::picking::PickRow;
use infernum_ir::{Dims, StepInput, Sym};

use crate::exec::{ExecError, StepInputs};

/// Where each array lies behind the header, for steps of at most some size. The table of blocks
/// comes last: a small step copies only the rows that it has.
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
}

/// Arrays behind the header.
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
    /// `contexts`: whether kernels read `context_positions`, which only then has room. `picks`: for how many
    /// rows at most tokens are picked.
    pub(super) fn new(limits: &Dims, kv_blocks: usize, contexts: bool, picks: usize) -> Layout {
        let (t, b) = (limits.t as usize, limits.b as usize);
        let stride = kv_blocks.min((limits.s as usize).div_ceil(StepInputs::BLOCK_SIZE)).max(1);
        let context_rows = if contexts { limits.s as usize } else { 0 };
        let sizes: [usize; FIELDS] = [
            4 * t,
            4 * t,
            4 * t.max(b),
            4 * context_rows,
            4 * t,
            4 * t,
            4 * (b + 1),
            4 * b,
            4 * (b + 1),
            8 * t,
            4 * b * stride,
            4 * PickRow::WORDS * picks,
        ];
        let (mut offsets, mut end) = ([0; FIELDS], size_of::<abi::Step>().next_multiple_of(64));
        let blocks = Field::Blocks as usize;
        for field in (0..FIELDS).filter(|f| *f != blocks).chain([blocks]) {
            offsets[field] = end;
            end += sizes[field].next_multiple_of(64);
        }
        Layout { base: 0, limits: *limits, stride, picks, offsets, end }
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

    /// Writes a step, after checking it; what must be copied is the returned number of bytes. `words`
    /// is where kernels see the lists that picks name.
    pub(super) fn write(
        &self,
        inputs: &StepInputs,
        blocks: usize,
        output_rows: Option<Sym>,
        words: u64,
        to: &mut [u8],
    ) -> Result<(Dims, usize), ExecError> {
        let dims = inputs.step().dims();
        ExecError::check_limits(&dims, &self.limits)?;
        if let Some(block) = inputs.all_blocks().iter().find(|b| **b as usize >= blocks) {
            let message = format!("block {block} is outside a KV cache of {blocks} block(s)");
            return Err(ExecError::Inputs(message));
        }
        let seqs = &inputs.step().seqs;
        let mut w = Writer { layout: self, to, at: [0; FIELDS] };
        w.header(&dims, words);
        w.extend(Field::Tokens, inputs.tokens());
        let contexts =
            self.offsets[Field::Seq as usize] > self.offsets[Field::ContextPositions as usize];
        let (mut token, mut row, mut pair) = (0u32, 0u32, 0u64);
        for (b, seq) in seqs.iter().enumerate() {
            let table = inputs.blocks(b);
            if table.len() > self.stride {
                let (found, limit) = (table.len(), self.stride);
                let message =
                    format!("a sequence of {found} blocks, at most {limit} are planned for");
                return Err(ExecError::Inputs(message));
            }
            w.push(Field::First, token);
            w.push(Field::Context, seq.context as u32);
            w.push(Field::ContextStart, row);
            for position in seq.context - seq.new..seq.context {
                let (block, within) =
                    (position / StepInputs::BLOCK_SIZE, position % StepInputs::BLOCK_SIZE);
                let slot = table[block] * StepInputs::BLOCK_SIZE as u32 + within as u32;
                w.push(Field::Positions, position as u32);
                w.push(Field::Seq, b as u32);
                w.push(Field::Slots, slot);
                w.push_wide(Field::PairStart, pair);
                pair += seq.context as u64;
                if output_rows == Some(Sym::T) {
                    w.push(Field::OutputRows, token);
                }
                token += 1;
            }
            if output_rows != Some(Sym::T) {
                w.push(Field::OutputRows, token - 1);
            }
            if contexts {
                (0..seq.context).for_each(|p| w.push(Field::ContextPositions, p as u32));
            }
            row += seq.context as u32;
            w.at[Field::Blocks as usize] = 4 * b * self.stride;
            w.extend(Field::Blocks, table);
        }
        w.push(Field::First, token);
        w.push(Field::ContextStart, row);
        let rows = if output_rows == Some(Sym::T) { dims.t } else { dims.b };
        for row in 0..self.picks.min(rows as usize) {
            w.extend(Field::Picks, &inputs.step().picks.row(row).words());
        }
        let used = self.offsets[Field::Blocks as usize] + 4 * seqs.len() * self.stride;
        Ok((dims, used))
    }
}

struct Writer<'a> {
    layout: &'a Layout,
    to: &'a mut [u8],
    /// Bytes written of each array.
    at: [usize; FIELDS],
}

impl Writer<'_> {
    fn header(&mut self, dims: &Dims, words: u64) {
        let at = |field| self.layout.address(field);
        let step = abi::Step {
            T: dims.t as i32,
            B: dims.b as i32,
            S: dims.s as i32,
            block_stride: self.layout.stride as i32,
            pairs: dims.pairs as i64,
            tokens: Address::new(at(Field::Tokens)),
            positions: Address::new(at(Field::Positions)),
            output_rows: Address::new(at(Field::OutputRows)),
            context_positions: Address::new(at(Field::ContextPositions)),
            seq: Address::new(at(Field::Seq)),
            slots: Address::new(at(Field::Slots)),
            first: Address::new(at(Field::First)),
            context: Address::new(at(Field::Context)),
            context_start: Address::new(at(Field::ContextStart)),
            pair_start: Address::new(at(Field::PairStart)),
            blocks: Address::new(at(Field::Blocks)),
            words: Address::new(words),
        };
        self.to[..size_of::<abi::Step>()].copy_from_slice(bytemuck::bytes_of(&step));
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

#[cfg(test)]
mod tests {
    use super::*;
    use infernum_ir::picking::Edits;

    use crate::sampling::{SamplingParams, SeenToken, Tell, TokenPick};

    #[test]
    fn a_step_is_laid_out_as_kernels_read_it() {
        let limits = Dims { t: 8, b: 2, s: 64, pairs: 512 };
        let layout = Layout::new(&limits, 9, true, 2).at(1 << 20);
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
        assert_eq!((dims.t, dims.b, dims.s), (3, 2, 19));
        assert!(used <= layout.bytes());
        let word =
            |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let wide =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        assert_eq!([word(0), word(4), word(8), word(12)], [3, 2, 19, 4]);
        assert_eq!(wide(16), 2 * 18 + 1);
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
        let expected = PickRow { scale: std::f32::consts::LOG2_E / 2.0, top_k: 40, ..inputs.step().picks.row(1) };
        assert_eq!(PickRow::from_words(second), expected);
        let PickRow { lists, biased, seen, counts_own, told, given, .. } = expected;
        assert_eq!([lists, biased, seen, counts_own, told, given], [0, 1, 3, 1, 6, 0]);
        assert_eq!(inputs.step().picks.words(), [9, 1.0f32.to_bits(), 5, 1, 5, 1, 5, 1]);
        assert_eq!(wide(24 + 8 * 11), 4096, "the lists");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let limits = Dims { t: 2, b: 1, s: 32, pairs: 64 };
        let layout = Layout::new(&limits, 2, false, 1);
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
