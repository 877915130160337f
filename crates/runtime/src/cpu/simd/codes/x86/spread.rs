//! Scales and minimums as vectors, read where they lie.
//!
//! SAFETY, for every block here: callers have AVX2, FMA and F16C, and units that what [`Spread::new`] looked at ends in.

#![allow(clippy::wildcard_imports, reason = "twenty names, all with the prefix _mm")]

use std::arch::x86_64::*;

use infernum_ir::encoding::Element;
use infernum_ir::encoding::packing::Factor;

use super::super::{CHUNK, Codes, ROWS};

/// Numbers of a unit at most, eight rows of groups of 16 in 512 columns, and those of a vector that is read from the last.
const MOST: usize = ROWS * 32 + 8;

/// The scales of a unit's rows, or their minimums: as f32, each row's one after another.
pub(super) struct Spread {
    element: Element,
    at: usize,
    outer: Option<(Element, usize)>,
    /// Numbers of a row, and from a chunk's first to the next one's: 0 where all chunks of a unit share one.
    row: usize,
    step: usize,
    /// For each half, which of a chunk's numbers a lane has.
    lanes: [[i32; 8]; 2],
    /// Where in each 16 bits of a vector the byte of a whole number comes from.
    bytes: [u8; 32],
    numbers: [f32; MOST],
    of_rows: [f32; ROWS],
}

impl Spread {
    /// # Panics
    /// Where they end behind their unit, or are more than any packing has.
    pub(super) fn new(w: &Codes<'_>, factor: &Factor) -> Spread {
        let (groups, group) = (w.packing.groups() as usize, w.packing.group as usize);
        let end = factor.at as usize + ROWS * groups * factor.element.size() as usize;
        let outer = factor.outer.map(|(element, at)| (element, at as usize));
        let outer_end = outer.map_or(0, |(element, at)| at + ROWS * element.size() as usize);
        assert!(end.max(outer_end) <= w.packing.bytes as usize, "factors end behind their unit");
        // Eight bytes are read of whole numbers, wherever those of a chunk begin.
        let read = factor.at + (ROWS * groups) as u64 + 8;
        let whole = matches!(factor.element, Element::U8 | Element::I8);
        assert!(!whole || read <= w.packing.bytes, "a unit ends within whole numbers");
        assert!(ROWS * groups + 8 <= MOST, "{groups} groups in a row of a unit");
        Spread {
            element: factor.element,
            at: factor.at as usize,
            outer,
            row: groups,
            step: CHUNK / group,
            lanes: [0, 1].map(|half| {
                std::array::from_fn(|lane| ((lane % 4 * 32 + half * 16) / group) as i32)
            }),
            // The upper one, so that a shift makes a number of it.
            bytes: std::array::from_fn(|i| match i % 2 {
                0 => 0x80,
                _ => ((i / 4 % 4 * 32 + i / 2 % 2 * 16) / group) as u8,
            }),
            numbers: [0.0; MOST],
            of_rows: [1.0; ROWS],
        }
    }

    /// Reads those of a unit.
    #[inline(always)]
    pub(super) unsafe fn read(&mut self, unit: &[u8]) {
        unsafe {
            let numbers = &mut self.numbers[..ROWS * self.row];
            widen(self.element, unit.as_ptr().add(self.at), numbers);
            self.read_outer(unit);
        }
    }

    /// Reads those of a unit's rows.
    #[inline(always)]
    pub(super) unsafe fn read_outer(&mut self, unit: &[u8]) {
        if let Some((element, at)) = self.outer {
            unsafe { widen(element, unit.as_ptr().add(at), &mut self.of_rows) }
        }
    }

    /// The number of a row.
    #[inline(always)]
    pub(super) unsafe fn outer(&self, row: usize) -> __m256 {
        unsafe { _mm256_set1_ps(self.of_rows[row]) }
    }

    /// The numbers of a row's chunk, for each half.
    #[inline(always)]
    pub(super) unsafe fn of<const HALVES: usize>(
        &self,
        chunk: usize,
        row: usize,
    ) -> [__m256; HALVES] {
        unsafe {
            let from = self.numbers.as_ptr().add(row * self.row + chunk * self.step);
            // No more than a chunk's own, which were written together: a load that takes parts of two stores waits until
            // both are in the cache.
            let numbers = match self.step {
                8 => _mm256_loadu_ps(from),
                4 => _mm256_broadcast_ps(&from.cast::<__m128>().read_unaligned()),
                2 => _mm256_castpd_ps(_mm256_set1_pd(from.cast::<f64>().read_unaligned())),
                _ => _mm256_set1_ps(*from),
            };
            let numbers = match self.outer {
                Some(_) => _mm256_mul_ps(numbers, self.outer(row)),
                None => numbers,
            };
            // Four or one lie as lanes want them.
            if HALVES == 1 && self.step != 2 {
                return [numbers; HALVES];
            }
            let mut halves = [numbers; HALVES];
            for (half, lanes) in halves.iter_mut().zip(&self.lanes) {
                let lanes = _mm256_loadu_si256(lanes.as_ptr().cast());
                *half = _mm256_permutevar8x32_ps(numbers, lanes);
            }
            halves
        }
    }

    /// The numbers of a row's chunk as whole ones of 16 bits, of bytes: in each lane those of its block's two halves.
    #[inline(always)]
    pub(super) unsafe fn whole(&self, unit: &[u8], chunk: usize, row: usize) -> __m256i {
        unsafe {
            let from = unit.as_ptr().add(self.at + row * self.row + chunk * self.step);
            let eight = _mm256_set1_epi64x(from.cast::<i64>().read_unaligned());
            let upper = _mm256_shuffle_epi8(eight, _mm256_loadu_si256(self.bytes.as_ptr().cast()));
            if self.element == Element::I8 {
                _mm256_srai_epi16::<8>(upper)
            } else {
                _mm256_srli_epi16::<8>(upper)
            }
        }
    }
}

/// Numbers of one type, a multiple of eight.
#[inline(always)]
unsafe fn widen(element: Element, from: *const u8, out: &mut [f32]) {
    macro_rules! each {
        ($size:literal, $from:ident => $eight:expr) => {
            for (i, out) in out.chunks_exact_mut(8).enumerate() {
                unsafe {
                    let $from = from.add(8 * i * $size);
                    _mm256_storeu_ps(out.as_mut_ptr(), $eight);
                }
            }
        };
    }
    match element {
        Element::F16 => each!(2, p => _mm256_cvtph_ps(_mm_loadu_si128(p.cast()))),
        Element::Bf16 => each!(2, p => {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }),
        Element::U8 => each!(1, p => {
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())))
        }),
        Element::I8 => each!(1, p => {
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())))
        }),
        // An exponent; of 0 it is one of a number without a leading one, and of 255 not a number.
        Element::F8e8m0 => each!(1, p => {
            let bits = _mm256_slli_epi32::<23>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())));
            let below = _mm256_set1_epi32(0x0040_0000);
            let infinite = _mm256_cmpeq_epi32(bits, _mm256_set1_epi32(0x7f80_0000));
            let bits = _mm256_max_epi32(bits, below);
            _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_and_si256(infinite, below)))
        }),
        // Packed factors are of no other type than f32.
        _ => each!(4, p => _mm256_loadu_ps(p.cast())),
    }
}
