//! Packed weights ([`infernum_ir::encoding::packing`]): `y = x · Wᵀ + bias` over codes as they are stored.
//!
//! A unit's eight rows are read a chunk of 128 columns at a time. A chunk's codes come out of their planes in an
//! order of their own, which is that of a warp's lanes ([`order`]); it is `x` that is brought into that order, once a
//! call. In the order of planes of bits, four neighbours are of one block of 32 columns, and every other two of them
//! of one group of 16.
//!
//! Two ways to multiply:
//! - `x` as it is ([`full`]): a chunk's values are made in f32 and multiplied.
//! - `x` rounded to 8 bits ([`activations`]): whole numbers are multiplied, and sums of 32 products are scaled ([`eight`]).

mod activations;
mod eight;
mod factors;
mod full;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use infernum_ir::Encoding;
use infernum_ir::encoding::packing::ROWS as PACKED_ROWS;
use infernum_ir::encoding::{CodeKind, Element, Packing};

use super::element::{Act, ActMut, Weights};
use super::isa::{Isa, Kernel, Level};
use super::linear::Epilogue;
use super::ops;
use super::threads::for_each_block;
use super::vector::Simd;
use activations::Rounded;
use factors::Factors;
use full::Full;

/// Columns that are read at a time.
const CHUNK: usize = 128;

/// Rows of a unit.
const ROWS: usize = PACKED_ROWS as usize;

/// Packed bytes that a thread takes at a time, and bands at most.
const BLOCK_BYTES: usize = 128 << 10;
const BLOCK_BANDS: usize = 64;

/// How far ahead of what is read memory is asked for. Scales, read first, lie at a unit's end, so that the CPU does not see
/// by itself in which order units are read: without this half of the time is spent waiting for them.
const AHEAD: usize = 4 << 10;

/// Tokens that pass over a block at a time: their chunks and their sums fit a core's first cache together.
const BLOCK_TOKENS: usize = 32;

/// A packed weight matrix `[N, K]`.
#[derive(Clone, Copy)]
pub struct Codes<'a> {
    packing: &'a Packing,
    kind: CodeKind,
    rows: usize,
    columns: usize,
    bytes: &'a [u8],
}

impl<'a> Codes<'a> {
    /// `None` where the encoding is no packed one, or the bytes are not those of so many rows and columns.
    pub fn new(
        encoding: &'a Encoding,
        rows: usize,
        columns: usize,
        bytes: &'a [u8],
    ) -> Option<Self> {
        let packing = encoding.packing()?;
        let size = rows.div_ceil(ROWS) as u64 * packing.band(columns as u64);
        let kind = encoding.def().code.kind;
        (size == bytes.len() as u64 && columns > 0).then_some(Codes {
            packing,
            kind,
            rows,
            columns,
            bytes,
        })
    }

    /// `N`.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// `K`.
    pub const fn columns(&self) -> usize {
        self.columns
    }

    /// Chunks of a row, those of its last unit included.
    fn chunks(&self) -> usize {
        (self.packing.across(self.columns as u64) * self.packing.columns) as usize / CHUNK
    }

    /// The units of eight rows.
    fn band(&self, band: usize) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let size = self.packing.band(self.columns as u64) as usize;
        self.bytes[band * size..][..size].chunks_exact(self.packing.bytes as usize)
    }

    /// Groups of 16 columns have scales of their own.
    fn halves(&self) -> bool {
        self.packing.group < 32
    }

    /// Whether codes are whole numbers of 8 bits, once their zero is subtracted, or become such when doubled.
    pub fn is_whole(&self) -> bool {
        matches!(self.kind, CodeKind::Unsigned | CodeKind::Signed | CodeKind::E2m1)
    }

    /// Reads its values.
    pub fn reader(&self, isa: Isa) -> Reader<'a> {
        let order = order(self.packing);
        #[cfg(target_arch = "x86_64")]
        if isa.level() >= Level::Avx2 {
            // SAFETY: that level says that there are AVX2, FMA and F16C.
            let values = Means::Vectors(Box::new(unsafe { x86::Values::new(self, &order) }));
            return Reader { w: *self, isa, order, values };
        }
        let zero = self.packing.zero as f32;
        let meanings = std::array::from_fn(|code| match (self.kind, code as u8) {
            (CodeKind::E4m3, code) => Element::F8e4m3.read(&[code]).float(),
            (CodeKind::E5m2, code) => Element::F8e5m2.read(&[code]).float(),
            (CodeKind::E2m1, code) => {
                0.5 * (f32::from(E2M1[usize::from(code & 15)]) - f32::from(E2M1_ZERO))
            }
            (_, code) => f32::from(code) - zero,
        });
        Reader {
            w: *self,
            isa,
            order,
            values: Means::Table(Box::new(meanings), std::marker::PhantomData),
        }
    }

    /// The codes of a chunk, in its order.
    fn bytes_of(&self, unit: &[u8], row: usize, chunk: usize, out: &mut [u8; CHUNK]) {
        out.fill(0);
        for plane in &self.packing.planes {
            let (bits, from) = (plane.bits as usize, plane.at as usize);
            if bits == 8 {
                // Blocks lie in pairs.
                for (pair, out) in out.chunks_exact_mut(64).enumerate() {
                    out.copy_from_slice(&unit[from + (chunk * 2 + pair) * 512 + row * 64..][..64]);
                }
                continue;
            }
            let row_bytes = 16 * bits;
            let plane_row = &unit[from + (chunk * ROWS + row) * row_bytes..][..row_bytes];
            let (places, mask) = (&PLACES[bits.ilog2() as usize], (1 << bits) - 1);
            for (out, (byte, bit)) in out.iter_mut().zip(places) {
                *out |= (plane_row[usize::from(*byte)] >> bit & mask) << plane.shift;
            }
        }
    }
}

/// What makes a weight's values of its codes.
pub struct Reader<'a> {
    w: Codes<'a>,
    isa: Isa,
    order: [u8; CHUNK],
    values: Means<'a>,
}

/// By what codes become values.
enum Means<'a> {
    #[cfg(target_arch = "x86_64")]
    Vectors(Box<x86::Values<'a>>),
    /// What each code means, but for its scale. The name of `'a` is for targets without vectors.
    Table(Box<[f32; 256]>, std::marker::PhantomData<&'a ()>),
}

impl Reader<'_> {
    /// The values of a chunk, in its order.
    fn chunk(
        &self,
        factors: &Factors,
        unit: &[u8],
        (row, chunk): (usize, usize),
        out: &mut [f32; CHUNK],
    ) {
        let meanings = match &self.values {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: they are only made where the CPU has what they need.
            Means::Vectors(values) => {
                return unsafe { values.chunk(factors, unit, (row, chunk), out) };
            }
            Means::Table(meanings, _) => meanings,
        };
        let mut codes = [0; CHUNK];
        self.w.bytes_of(unit, row, chunk, &mut codes);
        let halves = self.w.halves();
        let lanes = codes.chunks_exact(4).zip(self.order.chunks_exact(4));
        for ((codes, columns), out) in lanes.zip(out.chunks_exact_mut(4)) {
            // Four neighbours are of one block.
            let block = usize::from(columns[0]) / 32;
            let first = factors.of(row, chunk, 0, block);
            let second = if halves { factors.of(row, chunk, 1, block) } else { first };
            for ((code, column), out) in codes.iter().zip(columns).zip(out) {
                let (scale, minimum) = if column % 32 < 16 { first } else { second };
                *out = meanings[usize::from(*code)] * scale - minimum;
            }
        }
    }

    /// Writes the values of row `n`, in the order of columns.
    ///
    /// # Panics
    /// If `out` is no row, or there is no such row.
    pub fn row(&self, n: usize, out: &mut [f32]) {
        let (w, isa) = (&self.w, self.isa);
        assert!(n < w.rows && out.len() == w.columns, "row {n} of {} is not there", w.rows);
        let (mut factors, mut values) = (Factors::new(w), [0.0; CHUNK]);
        let mut columns = out.chunks_mut(CHUNK);
        for unit in w.band(n / ROWS) {
            factors.read(isa, w, unit);
            for chunk in 0..factors.chunks() {
                let Some(columns) = columns.next() else { return };
                self.chunk(&factors, unit, (n % ROWS, chunk), &mut values);
                for (column, value) in self.order.iter().zip(values) {
                    if let Some(out) = columns.get_mut(usize::from(*column)) {
                        *out = value;
                    }
                }
            }
        }
    }
}

/// Where the bits of code `i` of a chunk lie in the row of a plane of 4, 2 or 1 bits: the byte, and the lowest bit.
const fn place(bits: usize, i: usize) -> (usize, usize) {
    // Codes lie in lanes of four, eight of which are a vector: of two quads and two steps of pairs.
    let (vector, lane, j) = (i / 32, i % 32 / 4, i % 4);
    let (quad, block, blocks) = (vector / 2 * 2 + lane / 4, lane % 4, 4 / bits);
    (quad * 4 * bits + block / blocks * 4 + j, (block % blocks * 2 + vector % 2) * bits)
}

/// The [`place`] of each code of a chunk, in planes of 1, 2 and 4 bits.
static PLACES: [[(u8, u8); CHUNK]; 3] = [places(1), places(2), places(4)];

const fn places(bits: usize) -> [(u8, u8); CHUNK] {
    let (mut all, mut i) = ([(0, 0); CHUNK], 0);
    while i < CHUNK {
        let (byte, bit) = place(bits, i);
        all[i] = (byte as u8, bit as u8);
        i += 1;
    }
    all
}

/// The columns of the codes of a chunk.
fn order(packing: &Packing) -> [u8; CHUNK] {
    let bytes = packing.planes.iter().any(|p| p.bits == 8);
    std::array::from_fn(|i| {
        let (block, quad, pair, odd) = if bytes {
            let (j, pairs) = (i % 4, i % 8 / 4);
            (i / 64 * 2 + i % 16 / 8, i % 64 / 16, 2 * pairs + 1 - j % 2, j / 2)
        } else {
            let (vector, lane, j) = (i / 32, i % 32 / 4, i % 4);
            (lane % 4, vector / 2 * 2 + lane / 4, vector % 2 + 2 * (j % 2), j / 2)
        };
        (block * 32 + pair * 8 + quad * 2 + odd) as u8
    })
}

/// Sums of a token, of each of a unit's rows: the lanes of a vector.
type Lanes = [[f32; factors::LANES]; ROWS];

/// Twice what codes of `e2m1` mean, from 0 on.
const E2M1: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// What stands for zero among them.
const E2M1_ZERO: u8 = 12;

/// How a product of codes is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// Activations are used in full.
    None,
    /// They are rounded to 8 bits, as the op `round_groups` does in groups of 32.
    Eight,
}

/// `y[T, N] = x[T, K] · w[N, K]ᵀ + bias[N]`, summed in f32 and rounded once; with `add`, added to what `y` holds before.
/// The sum's order depends on the instruction set and on K only.
///
/// # Panics
/// If the lengths of `x`, `y` and `bias` are not `t * K`, `t * N` and `[N, 1]`.
#[allow(clippy::too_many_arguments, reason = "those of a product, as for plain weights")]
pub fn linear_codes(
    isa: Isa,
    x: Act<'_>,
    t: usize,
    w: &Codes<'_>,
    bias: Option<&Weights<'_>>,
    y: ActMut<'_>,
    add: bool,
    rounding: Rounding,
) {
    assert_eq!(x.len(), t * w.columns, "x is not [{t}, {}]", w.columns);
    let epilogue = Epilogue::new(t, w.rows, bias, y, add);
    if t == 0 || w.rows == 0 {
        return;
    }
    let x = Input::new(isa, w, x, t, rounding);
    let size = w.packing.band(w.columns as u64) as usize;
    let bands = (BLOCK_BYTES / size).clamp(1, BLOCK_BANDS);
    let all = w.rows.div_ceil(ROWS);
    for_each_block(all.div_ceil(bands), |block| {
        let bands = block * bands..all.min((block + 1) * bands);
        isa.run(BlockOf { isa, w, x: &x, bands, tokens: t, epilogue: &epilogue });
    });
}

/// Rows of `columns`, rounded as [`Rounding::Eight`] says.
pub fn rounded(isa: Isa, x: Act<'_>, columns: usize) -> Vec<f32> {
    let mut wide = wide(isa, x);
    wide.chunks_exact_mut(columns).for_each(activations::round_row);
    wide
}

fn wide(isa: Isa, x: Act<'_>) -> Vec<f32> {
    let mut wide = vec![0.0; x.len()];
    ops::widen(isa, x, &mut wide);
    wide
}

/// `x`, made ready for all bands.
enum Input<'a> {
    Full(Box<Full<'a>>),
    Eight(Rounded),
}

impl<'a> Input<'a> {
    fn new(isa: Isa, w: &Codes<'a>, x: Act<'_>, t: usize, rounding: Rounding) -> Input<'a> {
        let wide = match rounding {
            Rounding::Eight if !w.is_whole() => rounded(isa, x, w.columns),
            _ => wide(isa, x),
        };
        if rounding == Rounding::Eight && w.is_whole() {
            return Input::Eight(Rounded::new(isa, w, &wide, t, eight::zero(w)));
        }
        Input::Full(Box::new(Full::new(w.reader(isa), &wide, t)))
    }
}

struct BlockOf<'a> {
    isa: Isa,
    w: &'a Codes<'a>,
    x: &'a Input<'a>,
    bands: std::ops::Range<usize>,
    tokens: usize,
    epilogue: &'a Epilogue<'a>,
}

impl Kernel for BlockOf<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let BlockOf { w, bands, epilogue, .. } = &self;
        let start = bands.start * ROWS;
        let rows = w.rows.min(bands.end * ROWS) - start;
        let padded = bands.len() * ROWS;
        let mut bias = vec![0.0; rows];
        // SAFETY: the contract gives `S`.
        unsafe { epilogue.read_bias::<S>(start, &mut bias) };
        // [tokens, padded]
        let mut sums = vec![0.0; self.tokens.min(BLOCK_TOKENS) * padded];
        let (mut lanes, mut full_lanes) = (Vec::new(), Vec::new());
        let mut products =
            matches!(self.x, Input::Eight(_)).then(|| eight::Bands::new(self.isa, w));
        for t in (0..self.tokens).step_by(BLOCK_TOKENS) {
            let tokens = BLOCK_TOKENS.min(self.tokens - t);
            let sums = &mut sums[..tokens * padded];
            for (i, band) in bands.clone().enumerate() {
                let sums = &mut sums[i * ROWS..];
                match (self.x, &mut products) {
                    (Input::Eight(x), Some(products)) => {
                        lanes.clear();
                        lanes.resize(tokens, [[0.0; factors::LANES]; ROWS]);
                        products.multiply(self.isa, band, x.from(t), &mut lanes);
                        eight::sum(&lanes, sums, padded);
                    }
                    // SAFETY: the contract gives `S`.
                    (Input::Full(x), _) => unsafe {
                        x.sum::<S>(band, (t, tokens), (sums, padded), &mut full_lanes);
                    },
                    // They are made where activations have eight bits.
                    (Input::Eight(_), None) => {}
                }
            }
            for (c, sums) in sums.chunks_exact(padded).enumerate() {
                // SAFETY: the contract gives `S`; these rows are this block's own.
                unsafe { epilogue.store::<S>(t + c, start, &bias, &sums[..rows]) }
            }
        }
    }
}
