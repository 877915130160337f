//! Scales and minimums as vectors, read where they lie.
//!
//! SAFETY, for every block here: callers have AVX2, FMA and F16C, and units that what [`Spread::new`] looked at ends in.

#![allow(clippy::wildcard_imports, reason = "twenty names, all with the prefix _mm")]

use std::arch::x86_64::*;

use infernum_ir::encoding::Element;
use infernum_ir::encoding::packing::Factor;

use super::super::{CHUNK, Codes, ROWS};

/// Where the numbers of a row's chunk are, and which lanes they go to.
pub(super) struct Spread {
    element: Element,
    at: usize,
    /// Bytes of a row, and of the numbers of a chunk.
    row: usize,
    chunk: usize,
    /// From a chunk's numbers to the next one's: 0 where all chunks of a unit share one.
    step: usize,
    outer: Option<(Element, usize)>,
    /// For each half, which of a chunk's numbers a lane has.
    lanes: [[i32; 8]; 2],
}

impl Spread {
    /// # Panics
    /// Where they end behind their unit.
    pub(super) fn new(w: &Codes<'_>, factor: &Factor) -> Spread {
        let (groups, group) = (w.packing.groups() as usize, w.packing.group as usize);
        let size = factor.element.size() as usize;
        let end = factor.at as usize + ROWS * groups * size;
        let outer = factor.outer.map(|(element, at)| (element, at as usize));
        let outer_end = outer.map_or(0, |(element, at)| at + ROWS * element.size() as usize);
        assert!(end.max(outer_end) <= w.packing.bytes as usize, "factors end behind their unit");
        Spread {
            element: factor.element,
            at: factor.at as usize,
            row: groups * size,
            chunk: (CHUNK / group).max(1) * size,
            step: CHUNK / group * size,
            outer,
            lanes: [0, 1].map(|half| {
                std::array::from_fn(|lane| ((lane % 4 * 32 + half * 16) / group) as i32)
            }),
        }
    }

    /// What numbers of each row are multiplied by.
    #[inline(always)]
    pub(super) unsafe fn outer(&self, unit: &[u8]) -> [f32; ROWS] {
        let mut rows = [1.0; ROWS];
        if let Some((element, at)) = self.outer {
            unsafe {
                let numbers = read(element, unit.as_ptr().add(at), ROWS * element.size() as usize);
                _mm256_storeu_ps(rows.as_mut_ptr(), numbers);
            }
        }
        rows
    }

    /// The numbers of a row's chunk, for each half.
    #[inline(always)]
    pub(super) unsafe fn of<const HALVES: usize>(
        &self,
        unit: &[u8],
        outer: &[f32; ROWS],
        chunk: usize,
        row: usize,
    ) -> [__m256; HALVES] {
        unsafe {
            let at = self.at + row * self.row + chunk * self.step;
            let mut numbers = read(self.element, unit.as_ptr().add(at), self.chunk);
            if self.outer.is_some() {
                numbers = _mm256_mul_ps(numbers, _mm256_set1_ps(outer[row]));
            }
            let mut halves = [numbers; HALVES];
            for (half, lanes) in halves.iter_mut().zip(&self.lanes) {
                let lanes = _mm256_loadu_si256(lanes.as_ptr().cast());
                *half = _mm256_permutevar8x32_ps(numbers, lanes);
            }
            halves
        }
    }
}

/// The numbers in so many bytes, a power of two, in the lowest lanes.
#[inline(always)]
unsafe fn read(element: Element, from: *const u8, bytes: usize) -> __m256 {
    unsafe {
        if bytes == 32 {
            return _mm256_loadu_ps(from.cast());
        }
        let raw = match bytes {
            16 => _mm_loadu_si128(from.cast()),
            8 => _mm_loadl_epi64(from.cast()),
            4 => _mm_cvtsi32_si128(from.cast::<i32>().read_unaligned()),
            2 => _mm_cvtsi32_si128(from.cast::<u16>().read_unaligned().into()),
            _ => _mm_cvtsi32_si128(from.read().into()),
        };
        match element {
            Element::F16 => _mm256_cvtph_ps(raw),
            Element::Bf16 => {
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(raw)))
            }
            Element::U8 => _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(raw)),
            Element::I8 => _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw)),
            // Packed factors are of no other type than f32.
            _ => _mm256_castps128_ps256(_mm_castsi128_ps(raw)),
        }
    }
}
