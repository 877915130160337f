//! Activations of 8 bits: in groups of 32 columns whole multiples of a 127th of the largest magnitude.

use infernum_ir::encoding::CodeKind;

use super::super::isa::{Isa, Kernel};
use super::super::threads::for_each_chunk;
use super::super::vector::Simd;
use super::factors::LANES;
use super::{CHUNK, Codes, order};

/// Columns that share a scale, which the op `round_groups` is given, too.
pub(super) const GROUP: usize = 32;

/// The largest code.
const MOST: f32 = 127.0;

/// Rounds a group, as the reference of `round_groups` does, operation by operation: its scale, and whole numbers.
#[inline(always)]
fn round(group: &[f32], codes: &mut [f32]) -> f32 {
    // Eight at a time, and without an early end, so that the compiler makes vectors of it.
    let (mut most, mut is_none) = ([0.0f32; 8], false);
    for eight in group.chunks(8) {
        for (most, x) in most.iter_mut().zip(eight) {
            *most = if x.abs() > *most { x.abs() } else { *most };
            is_none |= x.is_nan();
        }
    }
    let most = most.into_iter().fold(0.0, f32::max);
    // A whole number cannot be NaN: the scale says it, for all of the group.
    let scale = if is_none { f32::NAN } else { most / MOST };
    // Of numbers so small that their scale has no inverse nothing is left.
    let inverse = Some(1.0 / scale).filter(|inverse| inverse.is_finite()).unwrap_or(0.0);
    codes.iter_mut().zip(group).for_each(|(code, x)| *code = (x * inverse).round_ties_even());
    scale
}

/// Rounds a row in place.
pub(super) fn round_row(row: &mut [f32]) {
    let mut codes = [0.0; GROUP];
    for group in row.chunks_mut(GROUP) {
        let scale = round(group, &mut codes);
        group.iter_mut().zip(codes).for_each(|(x, code)| *x = code * scale);
    }
}

/// A chunk of a token, as vectors of eight lanes take it: lane `l` has the codes `4 l` to `4 l + 3` of each vector.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(super) struct Chunk {
    /// In the chunk's order, or where groups are of 16 columns as [`by_halves`] says.
    pub(super) codes: [i8; CHUNK],
    /// The scale of each lane's block.
    pub(super) scales: [f32; LANES],
    /// Each lane's two sums of codes times the weight's zero, of the first two of each vector's four codes and of the other
    /// two: what 16 bits hold of them.
    pub(super) pairs: [i16; 2 * LANES],
    /// All of each lane, or its columns of its block's first half and those of its second.
    pub(super) halves: [Half; 2],
}

/// Sums of a chunk's columns.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(super) struct Half {
    /// Each lane's sum of codes times the weight's zero.
    pub(super) zeros: [i32; LANES],
    /// Each lane's sum of codes times their scale.
    pub(super) sums: [f32; LANES],
}

const NOTHING: Chunk = Chunk {
    codes: [0; CHUNK],
    scales: [0.0; LANES],
    pairs: [0; 2 * LANES],
    halves: [Half { zeros: [0; LANES], sums: [0.0; LANES] }; 2],
};

/// Where code `i` of a chunk stands when a lane's codes of one half are neighbours: every other one is of the first.
pub(super) const fn by_halves(i: usize) -> usize {
    i / 4 * 4 + i % 2 * 2 + i % 4 / 2
}

/// Activations of 8 bits for a weight.
pub(super) struct Rounded {
    /// `[chunks, tokens]`: the tokens that are multiplied with a chunk of codes lie side by side.
    chunks: Vec<Chunk>,
    tokens: usize,
}

impl Rounded {
    /// `x` is `[tokens, K]`; codes of `w` are less `zero`.
    pub(super) fn new(isa: Isa, w: &Codes<'_>, x: &[f32], tokens: usize, zero: i32) -> Rounded {
        // Codes of `e2m1` stand for twice what they mean, to be whole numbers.
        let scale = if w.kind == CodeKind::E2m1 { 0.5 } else { 1.0 };
        let mut columns = [0; CHUNK];
        for (i, column) in order(w.packing).into_iter().enumerate() {
            columns[if w.halves() { by_halves(i) } else { i }] = column;
        }
        let fill = Fill { columns, halves: w.halves(), zero, scale };
        let mut chunks = vec![NOTHING; tokens * w.chunks()];
        // At least so many at a time that they are worth a thread's coming.
        let run = tokens.max(16);
        for_each_chunk(&mut chunks, run, |block, chunks| {
            for (i, chunk) in chunks.iter_mut().enumerate() {
                let (column, t) = ((block * run + i) / tokens, (block * run + i) % tokens);
                let x = &x[t * w.columns..][..w.columns];
                let columns = column * CHUNK..w.columns.min((column + 1) * CHUNK);
                // Units may have more chunks than there are columns.
                let x = x.get(columns).unwrap_or_default();
                isa.run(FillOne { fill: &fill, x, chunk });
            }
        });
        Rounded { chunks, tokens }
    }

    /// The chunks from token `t` on, and how many lie between a chunk of a token and its next.
    pub(super) fn from(&self, t: usize) -> (&[Chunk], usize) {
        (&self.chunks[t..], self.tokens)
    }
}

/// How chunks are made for a weight.
struct Fill {
    /// Which column each code is of.
    columns: [u8; CHUNK],
    halves: bool,
    zero: i32,
    scale: f32,
}

struct FillOne<'a> {
    fill: &'a Fill,
    x: &'a [f32],
    chunk: &'a mut Chunk,
}

impl Kernel for FillOne<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let FillOne { fill, x, chunk } = self;
        let (mut codes, mut scales) = ([0.0; CHUNK], [0.0; CHUNK / GROUP]);
        let groups = x.chunks(GROUP).zip(codes.chunks_mut(GROUP));
        for ((x, codes), scale) in groups.zip(&mut scales) {
            *scale = round(x, codes);
        }
        // A lane of a vector has four codes of one block, of which every other is of one half.
        for (lane, scale) in chunk.scales.iter_mut().enumerate() {
            *scale = scales[lane % scales.len()] * fill.scale;
        }
        let codes: [i8; CHUNK] = codes.map(|code| code as i8);
        for (code, column) in chunk.codes.iter_mut().zip(fill.columns) {
            *code = codes[usize::from(column)];
        }
        // Of the four vectors.
        let mut bytes = [0i16; 4 * LANES];
        for vector in chunk.codes.as_chunks::<{ 4 * LANES }>().0 {
            bytes.iter_mut().zip(vector).for_each(|(sum, code)| *sum += i16::from(*code));
        }
        let pairs: [i32; 2 * LANES] =
            std::array::from_fn(|i| i32::from(bytes[2 * i]) + i32::from(bytes[2 * i + 1]));
        for (pair, sum) in chunk.pairs.iter_mut().zip(pairs) {
            *pair = (sum * fill.zero) as i16;
        }
        for lane in 0..LANES {
            let (first, second) = (pairs[2 * lane], pairs[2 * lane + 1]);
            let sums = if fill.halves { [first, second] } else { [first + second, 0] };
            for (half, sum) in chunk.halves.iter_mut().zip(sums) {
                half.zeros[lane] = sum * fill.zero;
                half.sums[lane] = sum as f32 * scales[lane % scales.len()];
            }
        }
    }
}
