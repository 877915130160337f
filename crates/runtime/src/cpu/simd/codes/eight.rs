//! Products of codes with activations of 8 bits.

use infernum_ir::encoding::CodeKind;

use super::super::isa::{Isa, Level};
use super::activations::{Chunk, by_halves};
use super::factors::{Factors, LANES};
use super::{CHUNK, Codes, E2M1, E2M1_ZERO, Lanes, ROWS};

/// What is subtracted from codes as they are multiplied. Those of 8 bits are multiplied as signed numbers, from which
/// 128 is subtracted already.
pub(super) fn zero(w: &Codes<'_>) -> i32 {
    match w.kind {
        CodeKind::E2m1 => i32::from(E2M1_ZERO),
        _ if is_wide(w) => w.packing.zero as i32 - 128,
        _ => w.packing.zero as i32,
    }
}

/// Whether codes take all bits of a byte.
fn is_wide(w: &Codes<'_>) -> bool {
    w.packing.planes.iter().map(|p| p.bits).sum::<u32>() == 8
}

/// Sums `[tokens, stride]` of a band's rows, of their lanes.
pub(super) fn sum(lanes: &[Lanes], sums: &mut [f32], stride: usize) {
    for (lanes, sums) in lanes.iter().zip(sums.chunks_mut(stride)) {
        for (lanes, sum) in lanes.iter().zip(sums) {
            let [a, b, c, d, e, f, g, h] = *lanes;
            *sum = ((a + e) + (b + f)) + ((c + g) + (d + h));
        }
    }
}

/// What multiplies the bands of a weight, one after another.
pub(super) enum Bands<'a> {
    #[cfg(target_arch = "x86_64")]
    Vectors(Box<super::x86::Bands<'a>>),
    Portable(Codes<'a>, Factors),
}

impl<'a> Bands<'a> {
    pub(super) fn new(isa: Isa, w: &Codes<'a>) -> Bands<'a> {
        #[cfg(target_arch = "x86_64")]
        if isa.level() >= Level::Avx2 {
            return Bands::Vectors(Box::new(super::x86::Bands::new(w)));
        }
        Bands::Portable(*w, Factors::new(w))
    }

    /// Adds a band's products with the chunks of `x`, a token's `stride` apart, to its lanes.
    pub(super) fn multiply(
        &mut self,
        isa: Isa,
        band: usize,
        (x, stride): (&[Chunk], usize),
        lanes: &mut [Lanes],
    ) {
        let (w, factors) = match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: there are such where the level says that there are AVX2, FMA and F16C.
            Bands::Vectors(bands) => return unsafe { bands.multiply(band, (x, stride), lanes) },
            Bands::Portable(w, factors) => (w, factors),
        };
        for (i, unit) in w.band(band).enumerate() {
            factors.read(isa, w, unit);
            for chunk in 0..factors.chunks() {
                let x = &x[(i * factors.chunks() + chunk) * stride..];
                portable(w, factors, (unit, chunk), x, lanes);
            }
        }
    }
}

/// Adds a chunk's products.
fn portable(
    w: &Codes<'_>,
    factors: &Factors,
    (unit, chunk): (&[u8], usize),
    x: &[Chunk],
    lanes: &mut [Lanes],
) {
    let (mut codes, halves) = ([0; CHUNK], 1 + usize::from(w.halves()));
    for row in 0..ROWS {
        w.bytes_of(unit, row, chunk, &mut codes);
        let codes: [i32; CHUNK] = codes.map(|code| match w.kind {
            CodeKind::E2m1 => i32::from(E2M1[usize::from(code & 15)]),
            _ if is_wide(w) => i32::from(code) - 128,
            _ => i32::from(code),
        });
        let (scales, minimums) = (factors.scales(row, chunk), factors.minimums(row, chunk));
        for (lanes, x) in lanes.iter_mut().zip(x) {
            for (i, (scales, half)) in scales.chunks_exact(LANES).zip(&x.halves).enumerate() {
                let mut sums = half.zeros.map(|zero| -zero);
                for (n, code) in codes.iter().enumerate().skip(i).step_by(halves) {
                    let at = if halves == 2 { by_halves(n) } else { n };
                    sums[n / 4 % LANES] += code * i32::from(x.codes[at]);
                }
                for l in 0..LANES {
                    lanes[row][l] += sums[l] as f32 * (scales[l] * x.scales[l]);
                    if let Some(minimums) = minimums {
                        lanes[row][l] -= minimums[i * LANES + l] * half.sums[l];
                    }
                }
            }
        }
    }
}
