//! Activations of 8 bits: in groups of 32 columns whole multiples of a 127th of the largest magnitude.

use infernum_ir::encoding::CodeKind;

use super::super::threads::for_each_chunk;
use super::factors::LANES;
use super::{CHUNK, Codes, order};

/// Columns that share a scale, which the op `round_groups` is given, too.
pub(super) const GROUP: usize = 32;

/// The largest code.
const MOST: f32 = 127.0;

/// Rounds a group, as the reference of `round_groups` does, operation by operation: its scale, and whole numbers.
#[inline(always)]
fn round(group: &[f32], codes: &mut [f32]) -> f32 {
    let most = group.iter().fold(0.0, |most: f32, x| if x.abs() > most { x.abs() } else { most });
    // A whole number cannot be NaN: the scale says it, for all of the group.
    let scale = if group.iter().any(|x| x.is_nan()) { f32::NAN } else { most / MOST };
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
    /// In the chunk's order. Where groups are of 16 columns: of their first halves, with zeros for the others, and of
    /// their second ones.
    pub(super) codes: [[i8; CHUNK]; 2],
    /// For each half, each lane's sum of codes times the weight's zero.
    pub(super) zeros: [[i32; LANES]; 2],
    /// For each half, each lane's sum of codes times their scale.
    pub(super) sums: [[f32; LANES]; 2],
    /// The scale of each lane's block.
    pub(super) scales: [f32; LANES],
}

const NOTHING: Chunk = Chunk {
    codes: [[0; CHUNK]; 2],
    zeros: [[0; LANES]; 2],
    sums: [[0.0; LANES]; 2],
    scales: [0.0; LANES],
};

/// Activations of 8 bits for a weight.
pub(super) struct Rounded {
    /// `[tokens, chunks]`
    chunks: Vec<Chunk>,
    row: usize,
}

impl Rounded {
    /// `x` is `[tokens, K]`; codes of `w` are less `zero`.
    pub(super) fn new(w: &Codes<'_>, x: &[f32], tokens: usize, zero: i32) -> Rounded {
        let (row, order) = (w.chunks(), order(w.packing));
        let mut chunks = vec![NOTHING; tokens * row];
        for_each_chunk(&mut chunks, row, |t, chunks| {
            let x = &x[t * w.columns..][..w.columns];
            for (chunk, x) in chunks.iter_mut().zip(x.chunks(CHUNK)) {
                chunk.fill(x, &order, w.halves(), zero);
                if w.kind == CodeKind::E2m1 {
                    // Codes stand for twice what they mean, to be whole numbers.
                    chunk.scales = chunk.scales.map(|scale| scale * 0.5);
                }
            }
        });
        Rounded { chunks, row }
    }

    /// The chunks from token `t` on, and how many are of each token.
    pub(super) fn from(&self, t: usize) -> (&[Chunk], usize) {
        (&self.chunks[t * self.row..], self.row)
    }
}

impl Chunk {
    fn fill(&mut self, x: &[f32], order: &[u8; CHUNK], halves: bool, zero: i32) {
        let (mut codes, mut scales) = ([0.0; CHUNK], [0.0; CHUNK / GROUP]);
        let groups = x.chunks(GROUP).zip(codes.chunks_mut(GROUP));
        for ((x, codes), scale) in groups.zip(&mut scales) {
            *scale = round(x, codes);
        }
        // A lane of a vector has four codes of one block, of which every other is of one half.
        self.scales = std::array::from_fn(|lane| scales[lane % scales.len()]);
        let mut sums = [[0i32; LANES]; 2];
        for (i, column) in order.iter().enumerate() {
            let code = codes[usize::from(*column)] as i8;
            let (lane, half) = (i / 4 % LANES, if halves { i % 2 } else { 0 });
            self.codes[half][i] = code;
            sums[half][lane] += i32::from(code);
        }
        for (half, sums) in sums.iter().enumerate() {
            self.zeros[half] = sums.map(|sum| sum * zero);
            self.sums[half] = std::array::from_fn(|l| sums[l] as f32 * self.scales[l]);
        }
    }
}
