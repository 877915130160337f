//! Products of codes with activations of 8 bits, by AVX2.
//!
//! Codes are bytes, in four vectors of eight lanes of four, as [`Chunk`] has activations. Products of bytes are added
//! in pairs to 16 bits (`maddubs`), and such sums to one another as often as 16 bits have the room; then to 32.
//!
//! SAFETY, for every block here: [`band`] is told that there are AVX2, FMA and F16C and sees to it that there are as many chunks as are
//! read, and that planes end within units; every load and store is an unaligned one.

#![allow(clippy::wildcard_imports, reason = "thirty names, all with the prefix _mm")]
#![allow(clippy::needless_range_loop, reason = "indices of several arrays of vectors at once")]

mod spread;
mod values;

use std::arch::x86_64::*;

use infernum_ir::encoding::CodeKind;

use spread::Spread;
pub(super) use values::Values;

use super::activations::{Chunk, by_halves};
use super::factors::LANES;
use super::{AHEAD, CHUNK, Codes, E2M1, Lanes, ROWS};

/// What codes are made of, as bits of a constant: planes of 1, 2 and 4 bits, a second one of 4; and whether they are looked up.
const ONES: u8 = 1;
const TWOS: u8 = 2;
const FOURS: u8 = 4;
const HIGHS: u8 = 8;
const LOOKUP: u8 = 16;

/// Hands what codes of each packing are made of to a macro, which makes a function's arms of it.
macro_rules! of_all_parts {
    ($each:ident) => {
        $each!(
            ONES,
            TWOS,
            TWOS | ONES,
            FOURS,
            FOURS | ONES,
            FOURS | TWOS,
            FOURS | TWOS | ONES,
            FOURS | HIGHS,
            FOURS | LOOKUP
        )
    };
}

/// A weight, what its codes are made of, and where in its units planes begin, in the order of the constants.
struct Site<'a> {
    w: Codes<'a>,
    parts: u8,
    planes: [usize; 4],
}

/// Adds a band's products with the chunks of `x`, a token's `stride` apart, to its lanes.
///
/// # Safety
/// The CPU has AVX2, FMA and F16C.
///
/// # Panics
/// Where `x` has fewer chunks than the tokens that there are lanes for.
pub(super) unsafe fn band(
    w: &Codes<'_>,
    band: usize,
    (x, stride): (&[Chunk], usize),
    lanes: &mut [Lanes],
) {
    let last = w.chunks().saturating_sub(1) * stride + lanes.len();
    assert!(last <= x.len() && lanes.len() <= stride, "x has {} chunks", x.len());
    let site = Site::new(w);
    macro_rules! run {
        ($($parts:expr),+) => {
            match (site.parts, w.halves(), w.packing.minimum.is_some()) {
                $(
                    (p, false, false) if p == const { $parts } => unsafe {
                        site.run::<{ $parts }, 1, false>(band, x, stride, lanes);
                    },
                    (p, false, true) if p == const { $parts } => unsafe {
                        site.run::<{ $parts }, 1, true>(band, x, stride, lanes);
                    },
                    (p, true, false) if p == const { $parts } => unsafe {
                        site.run::<{ $parts }, 2, false>(band, x, stride, lanes);
                    },
                    (p, true, true) if p == const { $parts } => unsafe {
                        site.run::<{ $parts }, 2, true>(band, x, stride, lanes);
                    },
                )+
                _ => unreachable!("planes that no packing has: {}", site.parts),
            }
        };
    }
    of_all_parts!(run);
}

/// Bits of a code.
const fn bits(parts: u8) -> u32 {
    match parts {
        // Looked up, they go up to 24.
        p if p & LOOKUP != 0 => 5,
        p if p & HIGHS != 0 => 8,
        p => (p & 7) as u32,
    }
}

/// How many sums of two products fit 16 bits together.
const fn room(bits: u32) -> usize {
    if bits <= 5 { 4 } else { 1 << 7u32.saturating_sub(bits) }
}

impl<'a> Site<'a> {
    /// # Panics
    /// Where planes end behind their unit, or are of bytes.
    fn new(w: &Codes<'a>) -> Site<'a> {
        let (mut planes, mut parts) = ([0; 4], 0);
        for plane in &w.packing.planes {
            let part = match plane.bits {
                1 => ONES,
                2 => TWOS,
                4 if parts & FOURS == 0 => FOURS,
                4 => HIGHS,
                bits => unreachable!("a plane of {bits} bits"),
            };
            let end = plane.at + w.packing.columns * ROWS as u64 * u64::from(plane.bits) / 8;
            assert!(end <= w.packing.bytes, "a plane ends behind its unit");
            planes[part.trailing_zeros() as usize] = plane.at as usize;
            parts |= part;
        }
        if w.kind == CodeKind::E2m1 {
            parts |= LOOKUP;
        }
        Site { w: *w, parts, planes }
    }

    /// As [`Self::codes`], as bytes.
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn bytes(&self, unit: &[u8], chunk: usize, row: usize, out: &mut [u8; CHUNK]) {
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

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run<const PARTS: u8, const HALVES: usize, const MINIMUMS: bool>(
        &self,
        band: usize,
        x: &[Chunk],
        stride: usize,
        lanes: &mut [Lanes],
    ) {
        let mut scales = Spread::new(&self.w, &self.w.packing.scale);
        // Where there are no minimums, nothing reads what stands for them.
        let minimum = self.w.packing.minimum.as_ref().unwrap_or(&self.w.packing.scale);
        let mut minimums = Spread::new(&self.w, minimum);
        let chunks = self.w.packing.columns as usize / CHUNK;
        // Of a unit's bytes, for each two rows of a chunk: whole cache lines.
        let share =
            (self.w.packing.bytes as usize).div_ceil(chunks * ROWS / 2).next_multiple_of(64);
        for (i, unit) in self.w.band(band).enumerate() {
            unsafe { scales.read(unit) };
            if MINIMUMS {
                unsafe { minimums.read(unit) };
            }
            for chunk in 0..chunks {
                let x = &x[(i * chunks + chunk) * stride..];
                // Two rows share what is read of activations.
                for row in (0..ROWS).step_by(2) {
                    prefetch(unit, (chunk * (ROWS / 2) + row / 2) * share, share);
                    unsafe {
                        let codes = [
                            self.codes::<PARTS, HALVES>(unit, chunk, row),
                            self.codes::<PARTS, HALVES>(unit, chunk, row + 1),
                        ];
                        let scales =
                            [scales.of::<HALVES>(chunk, row), scales.of::<HALVES>(chunk, row + 1)];
                        let mut least = [[_mm256_setzero_ps(); HALVES]; 2];
                        if MINIMUMS {
                            least[0] = minimums.of::<HALVES>(chunk, row);
                            least[1] = minimums.of::<HALVES>(chunk, row + 1);
                        }
                        for (c, lanes) in lanes.iter_mut().enumerate() {
                            let x = x.get_unchecked(c);
                            let lanes = lanes.as_mut_ptr().add(row).cast::<[[f32; LANES]; 2]>();
                            add::<PARTS, HALVES, MINIMUMS>(&codes, x, &scales, &least, &mut *lanes);
                        }
                    }
                }
            }
        }
    }

    /// The codes of a row, in the order of activations; those of 8 bits as signed numbers.
    #[inline(always)]
    unsafe fn codes<const PARTS: u8, const HALVES: usize>(
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
                    let v = _mm256_loadu_si256(p.add(32 * h).cast());
                    codes[2 * h] = _mm256_and_si256(v, low);
                    codes[2 * h + 1] = _mm256_and_si256(_mm256_srli_epi16::<4>(v), low);
                }
            }
            if PARTS & HIGHS != 0 {
                // Bit 7 is flipped: what stands for 128 is then zero.
                let (p, high) = (plane(HIGHS, 4), _mm256_set1_epi8(0xf0u8 as i8));
                let sign = _mm256_set1_epi8(0x80u8 as i8);
                for h in 0..2 {
                    let v = _mm256_loadu_si256(p.add(32 * h).cast());
                    let even = _mm256_and_si256(_mm256_slli_epi16::<4>(v), high);
                    let odd = _mm256_and_si256(v, high);
                    codes[2 * h] = _mm256_xor_si256(_mm256_or_si256(codes[2 * h], even), sign);
                    codes[2 * h + 1] =
                        _mm256_xor_si256(_mm256_or_si256(codes[2 * h + 1], odd), sign);
                }
            }
            if PARTS & TWOS != 0 {
                let p = plane(TWOS, 2);
                for h in 0..2 {
                    let part = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.add(16 * h).cast()));
                    let v = _mm256_shuffle_epi8(part, table(&TWOS_FROM));
                    let [even, odd] = if PARTS & FOURS != 0 { twos_at_4(v) } else { twos_at_0(v) };
                    codes[2 * h] = _mm256_or_si256(codes[2 * h], even);
                    codes[2 * h + 1] = _mm256_or_si256(codes[2 * h + 1], odd);
                }
            }
            if PARTS & ONES != 0 {
                let (p, to) = (plane(ONES, 1), _mm256_set1_epi8(1 << (PARTS & (TWOS | FOURS))));
                for h in 0..2 {
                    let part = _mm256_set1_epi64x(p.add(8 * h).cast::<i64>().read_unaligned());
                    let v = _mm256_shuffle_epi8(part, table(&ONES_FROM));
                    for s in 0..2 {
                        let bit = table(&ONES_BIT[s]);
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
            if HALVES == 2 {
                for v in &mut codes {
                    *v = _mm256_shuffle_epi8(*v, table(&BY_HALVES));
                }
            }
            codes
        }
    }
}

/// Asks for what lies [`AHEAD`] of a part of a unit; there may be nothing. A unit is asked for part by part: of many
/// requests at once some would wait, and all that follows with them.
#[inline(always)]
fn prefetch(unit: &[u8], from: usize, len: usize) {
    for at in (from..from + len).step_by(64) {
        // SAFETY: no address is an error to ask for.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(unit.as_ptr().wrapping_add(at + AHEAD).cast()) }
    }
}

/// Adds two rows' products with a token's chunk to their sums, vectors of lanes; scales and minimums are the rows', one for
/// each half.
#[inline(always)]
unsafe fn add<const PARTS: u8, const HALVES: usize, const MINIMUMS: bool>(
    codes: &[[__m256i; 4]; 2],
    x: &Chunk,
    scales: &[[__m256; HALVES]; 2],
    minimums: &[[__m256; HALVES]; 2],
    sums: &mut [[f32; LANES]; 2],
) {
    unsafe {
        let mut acc = [_mm256_loadu_ps(sums[0].as_ptr()), _mm256_loadu_ps(sums[1].as_ptr())];
        let x_scale = _mm256_loadu_ps(x.scales.as_ptr());
        let whole = products::<PARTS, HALVES>(codes, &x.codes);
        for (h, half) in x.halves[..HALVES].iter().enumerate() {
            let zeros = _mm256_loadu_si256(half.zeros.as_ptr().cast());
            for r in 0..2 {
                let whole = _mm256_cvtepi32_ps(_mm256_sub_epi32(whole[r][h], zeros));
                acc[r] = _mm256_fmadd_ps(whole, _mm256_mul_ps(scales[r][h], x_scale), acc[r]);
            }
            if MINIMUMS {
                let x_sums = _mm256_loadu_ps(half.sums.as_ptr());
                for r in 0..2 {
                    acc[r] = _mm256_fnmadd_ps(minimums[r][h], x_sums, acc[r]);
                }
            }
        }
        for r in 0..2 {
            _mm256_storeu_ps(sums[r].as_mut_ptr(), acc[r]);
        }
    }
}

/// Sums of two rows' products in each lane, of all four vectors, and of each half.
#[inline(always)]
unsafe fn products<const PARTS: u8, const HALVES: usize>(
    codes: &[[__m256i; 4]; 2],
    x: &[i8; CHUNK],
) -> [[__m256i; HALVES]; 2] {
    let room = const { room(bits(PARTS)) };
    unsafe {
        // A lane's two sums of 16 bits are of one half each.
        let halves = [_mm256_set1_epi32(1), _mm256_set1_epi32(1 << 16)];
        let mut wide = [[_mm256_setzero_si256(); HALVES]; 2];
        let mut narrow = [_mm256_setzero_si256(); 2];
        for i in 0..4 {
            let x = _mm256_loadu_si256(x.as_ptr().add(32 * i).cast());
            for r in 0..2 {
                let pairs = if PARTS & HIGHS != 0 {
                    // Of two signed numbers, one gives its sign to the other.
                    let code = codes[r][i];
                    _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(x, code))
                } else {
                    _mm256_maddubs_epi16(codes[r][i], x)
                };
                narrow[r] = if i % room == 0 { pairs } else { _mm256_add_epi16(narrow[r], pairs) };
                if i % room == room - 1 {
                    for h in 0..HALVES {
                        let of = if HALVES == 2 { halves[h] } else { _mm256_set1_epi16(1) };
                        let sums = _mm256_madd_epi16(narrow[r], of);
                        wide[r][h] =
                            if i < room { sums } else { _mm256_add_epi32(wide[r][h], sums) };
                    }
                }
            }
        }
        wide
    }
}

/// The two bits of each code, of words of 16 bits that have the same byte twice: at bit 0, and those of the other
/// vector.
#[inline(always)]
unsafe fn twos_at_0(v: __m256i) -> [__m256i; 2] {
    unsafe {
        let (low, high) = (_mm256_set1_epi16(0x0003), _mm256_set1_epi16(0x0300));
        [
            pick(v, low, _mm256_srli_epi16::<4>(v), high),
            pick(_mm256_srli_epi16::<2>(v), low, _mm256_srli_epi16::<6>(v), high),
        ]
    }
}

/// As [`twos_at_0`], at bit 4.
#[inline(always)]
unsafe fn twos_at_4(v: __m256i) -> [__m256i; 2] {
    unsafe {
        let (low, high) = (_mm256_set1_epi16(0x0030), _mm256_set1_epi16(0x3000));
        [
            pick(_mm256_slli_epi16::<4>(v), low, v, high),
            pick(_mm256_slli_epi16::<2>(v), low, _mm256_srli_epi16::<2>(v), high),
        ]
    }
}

/// Bits of one and of another.
#[inline(always)]
unsafe fn pick(a: __m256i, of_a: __m256i, b: __m256i, of_b: __m256i) -> __m256i {
    unsafe { _mm256_or_si256(_mm256_and_si256(a, of_a), _mm256_and_si256(b, of_b)) }
}

#[inline(always)]
unsafe fn table(bytes: &[u8; 32]) -> __m256i {
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// Where each byte of a lane of 16 comes from when codes of one half become neighbours.
static BY_HALVES: [u8; 32] = by_halves_twice();

const fn by_halves_twice() -> [u8; 32] {
    let (mut bytes, mut i) = ([0; 32], 0);
    while i < 32 {
        bytes[i] = by_halves(i % 16) as u8;
        i += 1;
    }
    bytes
}

/// For each byte of a vector, the byte of a row's part of a plane of two bits, and of one, that its code's bits are in;
/// of the latter the bit, too.
static TWOS_FROM: [u8; 32] = from(2, 0);
static ONES_FROM: [u8; 32] = from(1, 0);
static ONES_BIT: [[u8; 32]; 2] = [bit(0), bit(32)];

const fn from(bits: usize, first: usize) -> [u8; 32] {
    let (mut bytes, mut i) = ([0; 32], 0);
    while i < 32 {
        bytes[i] = super::place(bits, first + i).0 as u8;
        i += 1;
    }
    bytes
}

const fn bit(first: usize) -> [u8; 32] {
    let (mut bytes, mut i) = ([0; 32], 0);
    while i < 32 {
        bytes[i] = 1 << super::place(1, first + i).1;
        i += 1;
    }
    bytes
}
