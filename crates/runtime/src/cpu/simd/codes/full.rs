//! Products of values with activations in full.

use super::super::vector::Simd;
use super::factors::Factors;
use super::{AHEAD, CHUNK, Codes, ROWS, Reader};

/// Activations `[chunks, tokens, 128]` in the order of a weight's chunks, zeros behind its columns: the tokens that are
/// multiplied with a chunk of values lie side by side.
pub(super) struct Full<'a> {
    reader: Reader<'a>,
    x: Vec<[f32; CHUNK]>,
    tokens: usize,
}

impl<'a> Full<'a> {
    /// `x` is `[tokens, K]`.
    pub(super) fn new(reader: Reader<'a>, x: &[f32], tokens: usize) -> Full<'a> {
        let w = &reader.w;
        let mut all = vec![[0.0; CHUNK]; w.chunks() * tokens];
        for (t, from) in x.chunks_exact(w.columns).enumerate() {
            for (chunk, from) in from.chunks(CHUNK).enumerate() {
                for (to, column) in all[chunk * tokens + t].iter_mut().zip(reader.order) {
                    *to = from.get(usize::from(column)).copied().unwrap_or(0.0);
                }
            }
        }
        Full { reader, x: all, tokens }
    }

    /// Sums `[tokens, stride]` of a band's rows and the tokens from `t` on. `lanes` is what they are gathered in.
    ///
    /// # Safety
    /// The CPU has `S`'s instructions.
    #[inline(always)]
    pub(super) unsafe fn sum<S: Simd>(
        &self,
        band: usize,
        (t, tokens): (usize, usize),
        (sums, stride): (&mut [f32], usize),
        lanes: &mut Vec<f32>,
    ) {
        let Full { reader, x, .. } = self;
        let w: &Codes<'_> = &reader.w;
        lanes.clear();
        lanes.resize(tokens * ROWS * S::LANES, 0.0);
        let (mut factors, mut values) = (Factors::new(w), [[0.0; CHUNK]; ROWS]);
        for (i, unit) in w.band(band).enumerate() {
            for at in (0..unit.len()).step_by(64) {
                // SAFETY: no address is an error to ask for.
                unsafe { S::prefetch(unit.as_ptr().wrapping_add(at + AHEAD)) }
            }
            factors.read(reader.isa, w, unit);
            for chunk in 0..factors.chunks() {
                for (row, values) in values.iter_mut().enumerate() {
                    reader.chunk(&factors, unit, (row, chunk), values);
                }
                let x = &x[(i * factors.chunks() + chunk) * self.tokens + t..][..tokens];
                for (x, lanes) in x.iter().zip(lanes.chunks_exact_mut(ROWS * S::LANES)) {
                    // SAFETY: the caller's.
                    unsafe { add::<S>(&values, x, lanes) }
                }
            }
        }
        for (lanes, sums) in lanes.chunks_exact(ROWS * S::LANES).zip(sums.chunks_mut(stride)) {
            for (lanes, sum) in lanes.chunks_exact(S::LANES).zip(sums) {
                // SAFETY: the caller's; there are as many lanes.
                *sum = unsafe { S::sum(S::load_f32(lanes.as_ptr().cast())) };
            }
        }
    }
}

/// Adds a chunk's products to the lanes `[ROWS, S::LANES]` of a token.
///
/// # Safety
/// The CPU has `S`'s instructions.
///
/// # Panics
/// Where there are fewer lanes.
#[inline(always)]
unsafe fn add<S: Simd>(values: &[[f32; CHUNK]; ROWS], x: &[f32; CHUNK], lanes: &mut [f32]) {
    assert!(lanes.len() >= ROWS * S::LANES, "{} lanes", lanes.len());
    let lanes = lanes.as_mut_ptr();
    // SAFETY: the lanes are there by the line above; a chunk is a multiple of a vector's lanes.
    unsafe {
        let mut sums = [S::splat(0.0); ROWS];
        for (row, sum) in sums.iter_mut().enumerate() {
            *sum = S::load_f32(lanes.add(row * S::LANES).cast());
        }
        for at in (0..CHUNK).step_by(S::LANES) {
            let x = S::load_f32(x.as_ptr().add(at).cast());
            for (values, sum) in values.iter().zip(&mut sums) {
                *sum = S::fma(S::load_f32(values.as_ptr().add(at).cast()), x, *sum);
            }
        }
        for (row, sum) in sums.iter().enumerate() {
            S::store_f32(lanes.add(row * S::LANES).cast(), *sum);
        }
    }
}
