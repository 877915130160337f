//! Codes out of their planes.
//!
//! SAFETY, for every block here: callers have AVX2, FMA and F16C, and units that planes end within ([`Site::new`]).

#![allow(clippy::wildcard_imports, reason = "thirty names, all with the prefix _mm")]

use std::arch::x86_64::*;

use super::super::activations::by_halves;
use super::super::{CHUNK, E2M1, ROWS, place};
use super::{FOURS, HIGHS, LOOKUP, ONES, Site, TWOS};

impl Site<'_> {
    /// As [`Self::codes`], as bytes.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn bytes(
        &self,
        unit: &[u8],
        chunk: usize,
        row: usize,
        out: &mut [u8; CHUNK],
    ) {
        macro_rules! run {
            ($($parts:expr),+) => {
                match self.parts {
                    $(p if p == const { $parts } => unsafe {
                        self.codes::<{ $parts }, 1>(unit, chunk, row)
                    },)+
                    _ => unreachable!("planes that no packing has: {}", self.parts),
                }
            };
        }
        let codes = of_all_parts!(run);
        for (out, codes) in out.as_chunks_mut::<32>().0.iter_mut().zip(codes) {
            unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), codes) }
        }
    }

    /// The codes of a row, in the order of activations; those of 8 bits as signed numbers.
    #[inline(always)]
    pub(super) unsafe fn codes<const PARTS: u8, const HALVES: usize>(
        &self,
        unit: &[u8],
        chunk: usize,
        row: usize,
    ) -> [__m256i; 4] {
        let plane = |part: u8, bits: usize| {
            let at = self.planes[part.trailing_zeros() as usize];
            unit.as_ptr().wrapping_add(at + (chunk * ROWS + row) * 16 * bits)
        };
        unsafe {
            let mut codes = [_mm256_setzero_si256(); 4];
            if PARTS & FOURS != 0 {
                let (p, low) = (plane(FOURS, 4), _mm256_set1_epi8(0x0f));
                for h in 0..2 {
                    let v = ordered::<HALVES>(_mm256_loadu_si256(p.add(32 * h).cast()));
                    codes[2 * h] = _mm256_and_si256(v, low);
                    codes[2 * h + 1] = _mm256_and_si256(_mm256_srli_epi16::<4>(v), low);
                }
            }
            if PARTS & HIGHS != 0 {
                // Bit 7 is flipped: what stands for 128 is then zero.
                let (p, high) = (plane(HIGHS, 4), _mm256_set1_epi8(0xf0u8 as i8));
                let sign = _mm256_set1_epi8(0x80u8 as i8);
                for h in 0..2 {
                    let v = ordered::<HALVES>(_mm256_loadu_si256(p.add(32 * h).cast()));
                    let even = _mm256_and_si256(_mm256_slli_epi16::<4>(v), high);
                    let odd = _mm256_and_si256(v, high);
                    codes[2 * h] = _mm256_xor_si256(_mm256_or_si256(codes[2 * h], even), sign);
                    codes[2 * h + 1] =
                        _mm256_xor_si256(_mm256_or_si256(codes[2 * h + 1], odd), sign);
                }
            }
            if PARTS & TWOS != 0 {
                let p = plane(TWOS, 2);
                let shifted = usize::from(PARTS & FOURS != 0);
                let meanings = [0, 1].map(|s| {
                    let meanings = TWOS_MEAN[shifted][s].as_ptr().cast();
                    _mm256_broadcastsi128_si256(_mm_loadu_si128(meanings))
                });
                for h in 0..2 {
                    let part = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.add(16 * h).cast()));
                    let four = four_bits::<HALVES>(part);
                    for s in 0..2 {
                        let two = _mm256_shuffle_epi8(meanings[s], four);
                        codes[2 * h + s] = _mm256_or_si256(codes[2 * h + s], two);
                    }
                }
            }
            if PARTS & ONES != 0 {
                let (p, to) = (plane(ONES, 1), _mm256_set1_epi8(1 << (PARTS & (TWOS | FOURS))));
                for h in 0..2 {
                    let part = _mm256_set1_epi64x(p.add(8 * h).cast::<i64>().read_unaligned());
                    let v = _mm256_shuffle_epi8(part, table(&ONES_FROM[HALVES - 1]));
                    for s in 0..2 {
                        let bit = table(&ONES_BIT[HALVES - 1][s]);
                        let set = _mm256_cmpeq_epi8(_mm256_and_si256(v, bit), bit);
                        let code = &mut codes[2 * h + s];
                        *code = _mm256_or_si256(*code, _mm256_and_si256(set, to));
                    }
                }
            }
            if PARTS & LOOKUP != 0 {
                let meanings = _mm256_broadcastsi128_si256(_mm_loadu_si128(E2M1.as_ptr().cast()));
                for v in &mut codes {
                    *v = _mm256_shuffle_epi8(meanings, *v);
                }
            }
            codes
        }
    }
}

/// Bytes of codes, in the order of activations: where groups are halves of blocks, a lane's codes of one half are
/// neighbours.
#[inline(always)]
unsafe fn ordered<const HALVES: usize>(v: __m256i) -> __m256i {
    unsafe { if HALVES == 2 { _mm256_shuffle_epi8(v, table(&BY_HALVES)) } else { v } }
}

/// Of a row's part of a plane of two bits, for each byte of codes the four bits that hold those of its two vectors.
#[inline(always)]
unsafe fn four_bits<const HALVES: usize>(part: __m256i) -> __m256i {
    unsafe {
        // A byte has two codes of each vector, in neighbouring lanes: it is brought to the first one's place, and its upper
        // half to the second one's, which has nothing yet.
        let first = _mm256_shuffle_epi8(part, table(&TWOS_FROM[HALVES - 1]));
        let second = _mm256_slli_epi64::<28>(first);
        _mm256_and_si256(_mm256_or_si256(first, second), _mm256_set1_epi8(0x0f))
    }
}

/// What four bits mean in each of the two vectors, and at bit 4, behind a plane of four bits.
static TWOS_MEAN: [[[u8; 16]; 2]; 2] = [[twos(0, 0), twos(1, 0)], [twos(0, 4), twos(1, 4)]];

/// What four bits, the codes of two vectors, say of vector `s`, shifted by `shift`.
const fn twos(s: usize, shift: u32) -> [u8; 16] {
    let (mut meanings, mut four) = ([0; 16], 0);
    while four < 16 {
        meanings[four] = ((four >> (2 * s) & 3) << shift) as u8;
        four += 1;
    }
    meanings
}

#[inline(always)]
unsafe fn table(bytes: &[u8; 32]) -> __m256i {
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// Where a byte of a vector of codes stands: as it is packed, or [`by_halves`].
const fn stands(halves: usize, i: usize) -> usize {
    if halves == 2 { by_halves(i) } else { i }
}

/// Where each byte of a lane of 16 comes from when codes of one half become neighbours.
static BY_HALVES: [u8; 32] = {
    let (mut bytes, mut i) = ([0; 32], 0);
    while i < 32 {
        bytes[by_halves(i)] = (i % 16) as u8;
        i += 1;
    }
    bytes
};

/// For each byte of a vector, the byte of a row's part of a plane of two bits, and of one, that its code's bits are in;
/// of the latter the bit, too. Of the former those alone whose code has the lower half of the byte. First as codes are
/// packed, then by halves.
static TWOS_FROM: [[u8; 32]; 2] = [from(2, 1), from(2, 2)];
static ONES_FROM: [[u8; 32]; 2] = [from(1, 1), from(1, 2)];
static ONES_BIT: [[[u8; 32]; 2]; 2] = [[bit(0, 1), bit(32, 1)], [bit(0, 2), bit(32, 2)]];

const fn from(bits: usize, halves: usize) -> [u8; 32] {
    // A byte that comes from nowhere is zero.
    let (mut bytes, mut i) = ([0x80; 32], 0);
    while i < 32 {
        let (byte, bit) = place(bits, i);
        if bits == 1 || bit < 4 {
            bytes[stands(halves, i)] = byte as u8;
        }
        i += 1;
    }
    bytes
}

const fn bit(first: usize, halves: usize) -> [u8; 32] {
    let (mut bytes, mut i) = ([0; 32], 0);
    while i < 32 {
        bytes[stands(halves, i)] = 1 << place(1, first + i).1;
        i += 1;
    }
    bytes
}
