//! The vector type that kernels are generic over, and its portable implementation.

use half::{bf16, f16};

/// A vector of f32 lanes. Pointers are bytes and need no alignment; 16-bit elements are
/// little-endian and widen exactly on load, and round to nearest even on store.
///
/// # Safety
/// Every method needs the CPU to have the implementation's instructions; loads and stores need
/// `LANES` elements at the pointer.
pub(super) trait Simd: Copy {
    type V: Copy;
    const LANES: usize;
    /// Tokens in a register tile of four weight rows, by the number of registers.
    const TOKENS: usize;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `if a > b { a } else { b }`: `b` where either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// Nearest integer, ties to even; lanes below 2^22 in magnitude.
    unsafe fn round(a: Self::V) -> Self::V;
    /// `2^n` for integral lanes in -126..=127.
    unsafe fn pow2(n: Self::V) -> Self::V;
    /// Lanes of `v`, but zero where `x < limit`.
    unsafe fn zero_below(v: Self::V, x: Self::V, limit: Self::V) -> Self::V;
    unsafe fn sum(v: Self::V) -> f32;

    /// Whether [`Simd::dot_bf16`] exists.
    const DOT_BF16: bool = false;
    /// `acc + a · b` where `a` and `b` hold the bits of `2 * LANES` bf16 (as `load_f32` loads
    /// them) and each lane sums its own pair. Subnormal numbers count as zero.
    unsafe fn dot_bf16(_a: Self::V, _b: Self::V, _acc: Self::V) -> Self::V {
        unreachable!("guarded by DOT_BF16")
    }
    /// Hints that the cache line at `p`, which may be no memory at all, is read soon.
    #[inline(always)]
    unsafe fn prefetch(_p: *const u8) {}

    unsafe fn load_f32(p: *const u8) -> Self::V;
    unsafe fn load_bf16(p: *const u8) -> Self::V;
    unsafe fn load_f16(p: *const u8) -> Self::V;
    unsafe fn store_f32(p: *mut u8, v: Self::V);
    unsafe fn store_bf16(p: *mut u8, v: Self::V);
    unsafe fn store_f16(p: *mut u8, v: Self::V);

    /// Sums of four vectors, together because shuffles can be shared.
    #[inline(always)]
    unsafe fn sum4(v: [Self::V; 4]) -> [f32; 4] {
        // SAFETY: as the caller's.
        unsafe { [Self::sum(v[0]), Self::sum(v[1]), Self::sum(v[2]), Self::sum(v[3])] }
    }

    /// `e^x` for `x <= 0`, within 2 ulp; exactly 0 below the smallest normal number.
    ///
    /// Range reduction and polynomial of Cephes `expf`.
    #[inline(always)]
    unsafe fn exp_nonpositive(x: Self::V) -> Self::V {
        const SMALLEST: f32 = -87.336_54;
        const POLY: [f32; 6] =
            [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1];
        // SAFETY: as the caller's.
        unsafe {
            let limit = Self::splat(SMALLEST);
            let clamped = Self::max(limit, x);
            let n = Self::round(Self::mul(clamped, Self::splat(std::f32::consts::LOG2_E)));
            // ln 2 in two parts, the first exact when multiplied by n.
            let r = Self::fma(n, Self::splat(-0.693_359_4), clamped);
            let r = Self::fma(n, Self::splat(2.121_944_4e-4), r);
            let mut p = Self::splat(POLY[0]);
            for c in &POLY[1..] {
                p = Self::fma(p, r, Self::splat(*c));
            }
            let e = Self::add(Self::fma(Self::mul(r, r), p, r), Self::splat(1.0));
            Self::zero_below(Self::mul(e, Self::pow2(n)), x, limit)
        }
    }
}

/// Eight lanes in an array, for the compiler to vectorise as it can.
#[derive(Clone, Copy)]
pub(super) struct Portable;

const LANES: usize = 8;

#[inline(always)]
fn zip(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

#[inline(always)]
unsafe fn load_u16(p: *const u8) -> [u16; LANES] {
    // SAFETY: the caller has LANES elements at p; the read is unaligned.
    let raw = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
    raw.map(u16::from_le)
}

#[inline(always)]
unsafe fn store_u16(p: *mut u8, v: [u16; LANES]) {
    // SAFETY: the caller has room for LANES elements at p; the write is unaligned.
    unsafe { p.cast::<[u16; LANES]>().write_unaligned(v.map(u16::to_le)) }
}

impl Simd for Portable {
    type V = [f32; LANES];
    const LANES: usize = LANES;
    const TOKENS: usize = 1;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Not `mul_add`: without the instruction that is a slow library call.
        zip(zip(a, b, |a, b| a * b), c, |ab, c| ab + c)
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        // Adding 1.5 * 2^23 leaves no fraction bits, and the addition rounds to even.
        const MAGIC: f32 = 12_582_912.0;
        a.map(|a| (a + MAGIC) - MAGIC)
    }
    #[inline(always)]
    unsafe fn pow2(n: Self::V) -> Self::V {
        n.map(|n| f32::from_bits(((n as i32 + 127) << 23) as u32))
    }
    #[inline(always)]
    unsafe fn zero_below(v: Self::V, x: Self::V, limit: Self::V) -> Self::V {
        std::array::from_fn(|i| if x[i] < limit[i] { 0.0 } else { v[i] })
    }
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]))
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const u8) -> Self::V {
        // SAFETY: the caller has LANES elements at p; the read is unaligned.
        let raw = unsafe { p.cast::<[u32; LANES]>().read_unaligned() };
        raw.map(|bits| f32::from_bits(u32::from_le(bits)))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::V {
        // SAFETY: as the caller's.
        unsafe { load_u16(p) }.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self::V {
        // SAFETY: as the caller's.
        unsafe { load_u16(p) }.map(|bits| f16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f32(p: *mut u8, v: Self::V) {
        // SAFETY: the caller has room for LANES elements at p; the write is unaligned.
        unsafe { p.cast::<[u32; LANES]>().write_unaligned(v.map(|x| x.to_bits().to_le())) }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u8, v: Self::V) {
        // SAFETY: as the caller's.
        unsafe { store_u16(p, v.map(|x| bf16::from_f32(x).to_bits())) }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u8, v: Self::V) {
        // SAFETY: as the caller's.
        unsafe { store_u16(p, v.map(|x| f16::from_f32(x).to_bits())) }
    }
}
