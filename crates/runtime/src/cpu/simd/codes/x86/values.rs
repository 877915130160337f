//! Values in f32, eight at a time.
//!
//! SAFETY, for every block here: a [`Values`] is only made where there are AVX2, FMA and F16C, of a [`Site`] whose planes
//! end within units.

#![allow(clippy::wildcard_imports, reason = "twenty names, all with the prefix _mm")]

use std::arch::x86_64::*;

use infernum_ir::encoding::CodeKind;

use super::super::factors::{Factors, LANES};
use super::super::{CHUNK, Codes, E2M1_ZERO};
use super::{HIGHS, LOOKUP, Site};

/// What makes the values of a weight.
pub(in super::super) struct Values<'a> {
    w: Codes<'a>,
    /// Where planes of fewer bits than eight are; none where codes are a plane of bytes.
    site: Option<Site<'a>>,
    meaning: Meaning,
    /// What scales are multiplied by instead of the numbers: a power of two.
    factor: f32,
    /// For eight values each, which of a chunk's scales, of its blocks' first halves and of their second ones, are theirs.
    blocks: [[i32; LANES]; CHUNK / LANES],
}

/// How bytes become numbers, which are to be multiplied by a factor yet.
#[derive(Clone, Copy)]
enum Meaning {
    E4m3,
    E5m2,
    /// `byte - zero`; of those that are signed the highest bit is flipped.
    Whole {
        signed: bool,
        zero: i32,
    },
}

impl Meaning {
    /// The factor. It is a power of two, so that multiplying scales by it changes no bit of a value; a scale of `e4m3` above
    /// 2^120, of which 256 is more than f32 holds, would be infinite.
    fn factor(self, kind: CodeKind) -> f32 {
        match (self, kind) {
            (Meaning::E4m3, _) => 256.0,
            (_, CodeKind::E2m1) => 0.5,
            _ => 1.0,
        }
    }
}

impl<'a> Values<'a> {
    /// `order` are the columns of a chunk's codes.
    ///
    /// # Safety
    /// The CPU has AVX2, FMA and F16C.
    pub(in super::super) unsafe fn new(w: &Codes<'a>, order: &[u8; CHUNK]) -> Values<'a> {
        let is_bytes = w.packing.planes.iter().any(|plane| plane.bits == 8);
        let site = (!is_bytes).then(|| Site::new(w));
        let whole = |signed, zero| Meaning::Whole { signed, zero };
        let zero = w.packing.zero as i32;
        let meaning = match (w.kind, &site) {
            (CodeKind::E4m3, _) => Meaning::E4m3,
            (CodeKind::E5m2, _) => Meaning::E5m2,
            (_, Some(site)) if site.parts & LOOKUP != 0 => whole(false, i32::from(E2M1_ZERO)),
            (_, Some(site)) => whole(site.parts & HIGHS != 0, zero),
            (_, None) => whole(false, zero),
        };
        let block = |i: usize| {
            let (column, halves) = (usize::from(order[i]), w.halves());
            (column / 32 + if halves && column % 32 >= 16 { 4 } else { 0 }) as i32
        };
        let blocks =
            std::array::from_fn(|eight| std::array::from_fn(|lane| block(eight * LANES + lane)));
        Values { w: *w, site, meaning, factor: meaning.factor(w.kind), blocks }
    }

    /// The values of a row's chunk, in its order.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(in super::super) fn chunk(
        &self,
        factors: &Factors,
        unit: &[u8],
        (row, chunk): (usize, usize),
        out: &mut [f32; CHUNK],
    ) {
        let mut codes = [0u8; CHUNK];
        match &self.site {
            // SAFETY: as the module says.
            Some(site) => unsafe { site.bytes(unit, chunk, row, &mut codes) },
            None => self.w.bytes_of(unit, row, chunk, &mut codes),
        }
        let scales = halves(factors.scales(row, chunk));
        let scales = _mm256_mul_ps(scales, _mm256_set1_ps(self.factor));
        let minimums = match factors.minimums(row, chunk) {
            Some(minimums) => halves(minimums),
            // A number less nothing is itself.
            None => _mm256_setzero_ps(),
        };
        macro_rules! each {
            ($sixteen:ident => $numbers:expr) => {
                for (i, codes) in codes.as_chunks::<16>().0.iter().enumerate() {
                    // SAFETY: 16 bytes are read; twice eight numbers are written, of 128.
                    let $sixteen = unsafe { _mm_loadu_si128(codes.as_ptr().cast()) };
                    for (eight, numbers) in $numbers.into_iter().enumerate() {
                        let at = 2 * i + eight;
                        unsafe {
                            let blocks = _mm256_loadu_si256(self.blocks[at].as_ptr().cast());
                            let scale = _mm256_permutevar8x32_ps(scales, blocks);
                            let minimum = _mm256_permutevar8x32_ps(minimums, blocks);
                            let values = _mm256_sub_ps(_mm256_mul_ps(numbers, scale), minimum);
                            _mm256_storeu_ps(out.as_mut_ptr().add(at * LANES), values);
                        }
                    }
                }
            };
        }
        match self.meaning {
            Meaning::E5m2 => each!(sixteen => {
                // The upper byte of an f16.
                f16s(_mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(sixteen)))
            }),
            Meaning::E4m3 => {
                let mut most = _mm_setzero_si128();
                each!(sixteen => {
                    most = _mm_max_epu8(most, _mm_and_si128(sixteen, _mm_set1_epi8(0x7f)));
                    // An f16 has one bit more of exponent, whose bias is 8 larger; the sign is extended over it.
                    let wide = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(sixteen));
                    f16s(_mm256_and_si256(wide, _mm256_set1_epi16(0xbf80u16 as i16)))
                });
                if _mm_movemask_epi8(_mm_cmpeq_epi8(most, _mm_set1_epi8(0x7f))) != 0 {
                    no_numbers(&codes, out);
                }
            }
            Meaning::Whole { signed, zero } => {
                let flip = _mm_set1_epi8(if signed { 0x80u8 as i8 } else { 0 });
                let zero = _mm256_set1_epi32(zero);
                each!(sixteen => {
                    let codes = _mm_xor_si128(sixteen, flip);
                    let low = _mm256_cvtepu8_epi32(codes);
                    let high = _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(codes));
                    [
                        _mm256_cvtepi32_ps(_mm256_sub_epi32(low, zero)),
                        _mm256_cvtepi32_ps(_mm256_sub_epi32(high, zero)),
                    ]
                });
            }
        }
    }
}

/// All ones are no number in `e4m3`.
#[cold]
fn no_numbers(codes: &[u8; CHUNK], out: &mut [f32; CHUNK]) {
    for (code, out) in codes.iter().zip(out) {
        if code & 0x7f == 0x7f {
            *out = f32::NAN;
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn f16s(bits: __m256i) -> [__m256; 2] {
    let [low, high] = [_mm256_castsi256_si128(bits), _mm256_extracti128_si256::<1>(bits)];
    [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)]
}

/// The four numbers of a chunk's blocks' first halves, and those of their second ones, which may be the same.
#[inline]
#[target_feature(enable = "avx2")]
fn halves(numbers: &[f32]) -> __m256 {
    let (first, second) = (&numbers[..4], &numbers[numbers.len() - 4..]);
    // SAFETY: there are four numbers in each.
    unsafe { _mm256_set_m128(_mm_loadu_ps(second.as_ptr()), _mm_loadu_ps(first.as_ptr())) }
}
