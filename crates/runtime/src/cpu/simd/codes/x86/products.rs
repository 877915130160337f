//! Codes times activations, and sums of such products.
//!
//! Products of bytes are added in pairs to 16 bits (`maddubs`), and such sums to one another. Of codes that, less what
//! stands for zero, are [`MOST`] at most all of a chunk's fit, so that 16 bits are left only once a chunk: what is
//! between may overflow, as only the difference counts. Scales that are whole numbers are multiplied on that occasion,
//! exactly.
//!
//! SAFETY, for every block here: callers have AVX2, FMA and F16C.

#![allow(clippy::wildcard_imports, reason = "thirty names, all with the prefix _mm")]
#![allow(clippy::needless_range_loop, reason = "indices of several arrays of vectors at once")]

use std::arch::x86_64::*;

use super::super::CHUNK;
use super::super::activations::Chunk;
use super::super::factors::LANES;
use super::{HIGHS, bits};

/// Of a code, less what stands for zero: eight products with numbers up to 127 are added to 16 bits.
pub(super) const MOST: i32 = 32;

/// How sums of products become numbers that scales are multiplied by.
#[derive(Clone, Copy)]
pub(super) enum Way {
    /// By 32 bits, as soon as 16 are full.
    Wide,
    /// A chunk's sums fit 16 bits.
    Narrow,
    /// And scales are whole numbers times one of the row.
    Scaled,
}

impl Way {
    pub(super) const WIDE: u8 = 0;
    pub(super) const NARROW: u8 = 1;
    pub(super) const SCALED: u8 = 2;
}

/// What is multiplied of a row's chunk.
#[derive(Clone, Copy)]
pub(super) struct Row<const HALVES: usize> {
    pub(super) codes: [__m256i; 4],
    /// One for each lane, of each half.
    pub(super) minimums: [__m256; HALVES],
    /// As minimums; of [`Way::Scaled`] what whole numbers are multiplied by.
    pub(super) scales: [__m256; HALVES],
    /// Of [`Way::Scaled`]: whole numbers of 16 bits, in each lane that of its block's first half and that of the second.
    pub(super) whole: __m256i,
}

/// Adds two rows' products with a token's chunk to their sums, vectors of lanes.
#[inline(always)]
pub(super) unsafe fn add<
    const PARTS: u8,
    const HALVES: usize,
    const MINIMUMS: bool,
    const WAY: u8,
>(
    rows: &[Row<HALVES>; 2],
    x: &Chunk,
    sums: &mut [[f32; LANES]; 2],
) {
    unsafe {
        let mut acc = [_mm256_loadu_ps(sums[0].as_ptr()), _mm256_loadu_ps(sums[1].as_ptr())];
        let x_scale = _mm256_loadu_ps(x.scales.as_ptr());
        if WAY == Way::SCALED {
            let narrow = narrow(rows, x);
            for r in 0..2 {
                let whole = _mm256_cvtepi32_ps(_mm256_madd_epi16(narrow[r], rows[r].whole));
                acc[r] = _mm256_fmadd_ps(whole, _mm256_mul_ps(rows[r].scales[0], x_scale), acc[r]);
            }
        } else {
            let whole = if WAY == Way::WIDE {
                wide::<PARTS, HALVES>(rows, x)
            } else {
                narrow(rows, x).map(|sums| halves(sums))
            };
            for h in 0..HALVES {
                for r in 0..2 {
                    let whole = _mm256_cvtepi32_ps(whole[r][h]);
                    let scale = _mm256_mul_ps(rows[r].scales[h], x_scale);
                    acc[r] = _mm256_fmadd_ps(whole, scale, acc[r]);
                }
            }
        }
        if MINIMUMS {
            for (h, half) in x.halves[..HALVES].iter().enumerate() {
                let x_sums = _mm256_loadu_ps(half.sums.as_ptr());
                for r in 0..2 {
                    acc[r] = _mm256_fnmadd_ps(rows[r].minimums[h], x_sums, acc[r]);
                }
            }
        }
        for r in 0..2 {
            _mm256_storeu_ps(sums[r].as_mut_ptr(), acc[r]);
        }
    }
}

/// Sums of 32 bits of a lane's two of 16: of both, or of each half its own.
#[inline(always)]
unsafe fn halves<const HALVES: usize>(narrow: __m256i) -> [__m256i; HALVES] {
    unsafe {
        let of: [__m256i; HALVES] = std::array::from_fn(|h| match (HALVES, h) {
            (1, _) => _mm256_set1_epi16(1),
            (_, 0) => _mm256_set1_epi32(1),
            _ => _mm256_set1_epi32(1 << 16),
        });
        of.map(|of| _mm256_madd_epi16(narrow, of))
    }
}

/// Sums of two rows' products, in each lane two of 16 bits.
#[inline(always)]
unsafe fn narrow<const HALVES: usize>(rows: &[Row<HALVES>; 2], x: &Chunk) -> [__m256i; 2] {
    unsafe {
        let zeros = _mm256_loadu_si256(x.pairs.as_ptr().cast());
        let mut sums = [_mm256_setzero_si256(); 2];
        for i in 0..4 {
            let x = vector(&x.codes, i);
            for r in 0..2 {
                let pairs = _mm256_maddubs_epi16(rows[r].codes[i], x);
                sums[r] = if i == 0 {
                    _mm256_sub_epi16(pairs, zeros)
                } else {
                    _mm256_add_epi16(sums[r], pairs)
                };
            }
        }
        sums
    }
}

/// How many sums of two products fit 16 bits together.
const fn room(bits: u32) -> usize {
    if bits <= 5 { 4 } else { 1 << 7u32.saturating_sub(bits) }
}

/// Sums of two rows' products in each lane, of all four vectors, and of each half.
#[inline(always)]
unsafe fn wide<const PARTS: u8, const HALVES: usize>(
    rows: &[Row<HALVES>; 2],
    x: &Chunk,
) -> [[__m256i; HALVES]; 2] {
    let room = const { room(bits(PARTS)) };
    unsafe {
        let mut wide = [[_mm256_setzero_si256(); HALVES]; 2];
        for r in 0..2 {
            for (h, half) in x.halves[..HALVES].iter().enumerate() {
                let zeros = _mm256_loadu_si256(half.zeros.as_ptr().cast());
                wide[r][h] = _mm256_sub_epi32(wide[r][h], zeros);
            }
        }
        let mut narrow = [_mm256_setzero_si256(); 2];
        for i in 0..4 {
            let x = vector(&x.codes, i);
            for r in 0..2 {
                let code = rows[r].codes[i];
                let pairs = if PARTS & HIGHS != 0 {
                    // Of two signed numbers, one gives its sign to the other.
                    _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(x, code))
                } else {
                    _mm256_maddubs_epi16(code, x)
                };
                narrow[r] = if i % room == 0 { pairs } else { _mm256_add_epi16(narrow[r], pairs) };
                if i % room == room - 1 {
                    let sums = halves::<HALVES>(narrow[r]);
                    for h in 0..HALVES {
                        wide[r][h] = _mm256_add_epi32(wide[r][h], sums[h]);
                    }
                }
            }
        }
        wide
    }
}

#[inline(always)]
unsafe fn vector(codes: &[i8; CHUNK], i: usize) -> __m256i {
    unsafe { _mm256_loadu_si256(codes.as_ptr().add(32 * i).cast()) }
}
