//! Products of codes with activations of 8 bits, by AVX2.
//!
//! Codes are bytes, in four vectors of eight lanes of four ([`unpack`]), as [`Chunk`] has activations; how they are
//! multiplied depends on how much 16 bits hold of their sums ([`products`]).
//!
//! SAFETY, for every block here: [`band`] is told that there are AVX2, FMA and F16C and sees to it that there are as many chunks as are
//! read, and that planes end within units; every load and store is an unaligned one.

#![allow(clippy::wildcard_imports, reason = "thirty names, all with the prefix _mm")]
#![allow(clippy::needless_range_loop, reason = "indices of several arrays of vectors at once")]

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

mod products;
mod spread;
mod unpack;
mod values;

use std::arch::x86_64::*;

use infernum_ir::encoding::{CodeKind, Element};

use products::{Row, Way};
use spread::Spread;
pub(super) use values::Values;

use super::activations::Chunk;
use super::factors::LANES;
use super::{AHEAD, CHUNK, Codes, Lanes, ROWS};

/// What codes are made of, as bits of a constant: planes of 1, 2 and 4 bits, a second one of 4; and whether they are looked up.
const ONES: u8 = 1;
const TWOS: u8 = 2;
const FOURS: u8 = 4;
const HIGHS: u8 = 8;
const LOOKUP: u8 = 16;

/// A weight, what its codes are made of, and where in its units planes begin, in the order of the constants.
struct Site<'a> {
    w: Codes<'a>,
    parts: u8,
    planes: [usize; 4],
}

/// A band and what it is multiplied with: the chunks of activations, a token's `stride` apart, and the lanes to add to.
struct Job<'a> {
    band: usize,
    x: &'a [Chunk],
    stride: usize,
    lanes: &'a mut [Lanes],
}

/// The bands of a weight, one after another.
pub(super) struct Bands<'a> {
    site: Site<'a>,
    way: Way,
    scales: Spread,
    minimums: Spread,
}

impl<'a> Bands<'a> {
    pub(super) fn new(w: &Codes<'a>) -> Bands<'a> {
        let site = Site::new(w);
        let scale = &w.packing.scale;
        // Where there are no minimums, nothing reads what stands for them.
        let minimums = Spread::new(w, w.packing.minimum.as_ref().unwrap_or(scale));
        Bands { way: site.way(), scales: Spread::new(w, scale), minimums, site }
    }

    /// Adds a band's products with the chunks of `x`, a token's `stride` apart, to its lanes.
    ///
    /// # Safety
    /// The CPU has AVX2, FMA and F16C.
    ///
    /// # Panics
    /// Where `x` has fewer chunks than the tokens that there are lanes for.
    pub(super) unsafe fn multiply(
        &mut self,
        band: usize,
        (x, stride): (&[Chunk], usize),
        lanes: &mut [Lanes],
    ) {
        let last = self.site.w.chunks().saturating_sub(1) * stride + lanes.len();
        assert!(last <= x.len() && lanes.len() <= stride, "x has {} chunks", x.len());
        let job = Job { band, x, stride, lanes };
        macro_rules! run {
            ($($parts:expr),+) => {
                match self.site.parts {
                    $(p if p == const { $parts } => unsafe { self.run_parts::<{ $parts }>(job) },)+
                    parts => unreachable!("planes that no packing has: {parts}"),
                }
            };
        }
        of_all_parts!(run);
    }
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

    /// How its codes are multiplied.
    fn way(&self) -> Way {
        let zero = super::eight::zero(&self.w);
        let most = (1 << bits(self.parts)) - 1;
        if self.parts & HIGHS != 0 || zero.max(most - zero) > products::MOST {
            Way::Wide
        } else if matches!(self.w.packing.scale.element, Element::U8 | Element::I8) {
            Way::Scaled
        } else {
            Way::Narrow
        }
    }
}

impl Bands<'_> {
    unsafe fn run_parts<const PARTS: u8>(&mut self, job: Job<'_>) {
        unsafe {
            match (self.site.w.halves(), self.site.w.packing.minimum.is_some()) {
                (false, false) => self.run_ways::<PARTS, 1, false>(job),
                (false, true) => self.run_ways::<PARTS, 1, true>(job),
                (true, false) => self.run_ways::<PARTS, 2, false>(job),
                (true, true) => self.run_ways::<PARTS, 2, true>(job),
            }
        }
    }

    unsafe fn run_ways<const PARTS: u8, const HALVES: usize, const MINIMUMS: bool>(
        &mut self,
        job: Job<'_>,
    ) {
        unsafe {
            match self.way {
                Way::Wide => self.run::<PARTS, HALVES, MINIMUMS, { Way::WIDE }>(job),
                Way::Narrow => self.run::<PARTS, HALVES, MINIMUMS, { Way::NARROW }>(job),
                Way::Scaled => self.run::<PARTS, HALVES, MINIMUMS, { Way::SCALED }>(job),
            }
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run<const PARTS: u8, const HALVES: usize, const MINIMUMS: bool, const WAY: u8>(
        &mut self,
        job: Job<'_>,
    ) {
        let Bands { site, scales, minimums, .. } = self;
        let Job { band, x: activations, stride, lanes } = job;
        let packing = site.w.packing;
        let chunks = packing.columns as usize / CHUNK;
        // Of a unit's bytes, for each two rows of a chunk: whole cache lines.
        let share = (packing.bytes as usize).div_ceil(chunks * ROWS / 2).next_multiple_of(64);
        for (i, unit) in site.w.band(band).enumerate() {
            unsafe {
                if WAY == Way::SCALED {
                    scales.read_outer(unit);
                } else {
                    scales.read(unit);
                }
                if MINIMUMS {
                    minimums.read(unit);
                }
            }
            for chunk in 0..chunks {
                let x = &activations[(i * chunks + chunk) * stride..];
                // Two rows share what is read of activations.
                for row in (0..ROWS).step_by(2) {
                    prefetch(unit, (chunk * (ROWS / 2) + row / 2) * share, share);
                    let of_row = |row: usize| unsafe {
                        Row::<HALVES> {
                            codes: site.codes::<PARTS, HALVES>(unit, chunk, row),
                            minimums: if MINIMUMS {
                                minimums.of::<HALVES>(chunk, row)
                            } else {
                                [_mm256_setzero_ps(); HALVES]
                            },
                            scales: if WAY == Way::SCALED {
                                [scales.outer(row); HALVES]
                            } else {
                                scales.of::<HALVES>(chunk, row)
                            },
                            whole: if WAY == Way::SCALED {
                                scales.whole(unit, chunk, row)
                            } else {
                                _mm256_setzero_si256()
                            },
                        }
                    };
                    let rows = [of_row(row), of_row(row + 1)];
                    for (c, lanes) in lanes.iter_mut().enumerate() {
                        unsafe {
                            let x = x.get_unchecked(c);
                            let lanes = lanes.as_mut_ptr().add(row).cast::<[[f32; LANES]; 2]>();
                            products::add::<PARTS, HALVES, MINIMUMS, WAY>(&rows, x, &mut *lanes);
                        }
                    }
                }
            }
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
