//! Register tiles: dot products of a few weight rows with a few tokens.
//!
//! Both operands lie along K in memory, so that vectors run along K and nothing is packed: a
//! tile of `R` rows and `C` tokens makes `R * C` products of `R + C` loads. 4 × 6 fills the 32
//! registers of AVX-512 and keeps it bound by arithmetic, not by loads.

#![allow(clippy::needless_range_loop, reason = "indices of several arrays and pointers at once")]

use std::marker::PhantomData;

use super::element::Element;
use super::vector::Simd;

/// Weight rows of a full tile.
const ROWS: usize = 4;

/// Bytes of K that one pass over a block takes of a token at most, so that a tile's tokens stay
/// in the first-level cache (6 tokens × 5,632 bytes = 33 KB).
const DEPTH: usize = 4096;

/// Multiply-accumulate of vectors of weights and activations.
///
/// # Safety
/// As [`Simd`]; `load_*` need `STEP` elements, or `n <= STEP` in the `_tail` forms.
pub(super) trait Mac {
    type S: Simd;
    /// Elements of K in a vector.
    const STEP: usize;
    const W_SIZE: usize;
    const X_SIZE: usize;

    unsafe fn load_w(p: *const u8) -> <Self::S as Simd>::V;
    unsafe fn load_x(p: *const u8) -> <Self::S as Simd>::V;
    unsafe fn load_w_tail(p: *const u8, n: usize) -> <Self::S as Simd>::V;
    unsafe fn load_x_tail(p: *const u8, n: usize) -> <Self::S as Simd>::V;
    unsafe fn mac(
        w: <Self::S as Simd>::V,
        x: <Self::S as Simd>::V,
        acc: <Self::S as Simd>::V,
    ) -> <Self::S as Simd>::V;
}

/// f32 activations; weights widened as they are loaded.
pub(super) struct Wide<S, W>(PhantomData<(S, W)>);

impl<S: Simd, W: Element> Mac for Wide<S, W> {
    type S = S;
    const STEP: usize = S::LANES;
    const W_SIZE: usize = W::SIZE;
    const X_SIZE: usize = 4;

    #[inline(always)]
    unsafe fn load_w(p: *const u8) -> S::V {
        // SAFETY: as the caller's.
        unsafe { W::load::<S>(p) }
    }
    #[inline(always)]
    unsafe fn load_x(p: *const u8) -> S::V {
        // SAFETY: as the caller's.
        unsafe { S::load_f32(p) }
    }
    #[inline(always)]
    unsafe fn load_w_tail(p: *const u8, n: usize) -> S::V {
        // SAFETY: as the caller's.
        unsafe { W::load_tail::<S>(p, n) }
    }
    #[inline(always)]
    unsafe fn load_x_tail(p: *const u8, n: usize) -> S::V {
        // SAFETY: as the caller's.
        unsafe { f32::load_tail::<S>(p, n) }
    }
    #[inline(always)]
    unsafe fn mac(w: S::V, x: S::V, acc: S::V) -> S::V {
        // SAFETY: as the caller's.
        unsafe { S::fma(w, x, acc) }
    }
}

/// bf16 activations and weights, multiplied in pairs.
pub(super) struct Pairs<S>(PhantomData<S>);

impl<S: Simd> Pairs<S> {
    #[inline(always)]
    unsafe fn load_tail(p: *const u8, n: usize) -> S::V {
        let mut buffer = [0_u16; 64];
        // SAFETY: n <= STEP = 2 * LANES elements at p by contract, which fit.
        unsafe {
            std::ptr::copy_nonoverlapping(p, buffer.as_mut_ptr().cast(), n * 2);
            S::load_f32(buffer.as_ptr().cast())
        }
    }
}

impl<S: Simd> Mac for Pairs<S> {
    type S = S;
    const STEP: usize = 2 * S::LANES;
    const W_SIZE: usize = 2;
    const X_SIZE: usize = 2;

    #[inline(always)]
    unsafe fn load_w(p: *const u8) -> S::V {
        // SAFETY: as the caller's.
        unsafe { S::load_f32(p) }
    }
    #[inline(always)]
    unsafe fn load_x(p: *const u8) -> S::V {
        // SAFETY: as the caller's.
        unsafe { S::load_f32(p) }
    }
    #[inline(always)]
    unsafe fn load_w_tail(p: *const u8, n: usize) -> S::V {
        // SAFETY: as the caller's.
        unsafe { Self::load_tail(p, n) }
    }
    #[inline(always)]
    unsafe fn load_x_tail(p: *const u8, n: usize) -> S::V {
        // SAFETY: as the caller's.
        unsafe { Self::load_tail(p, n) }
    }
    #[inline(always)]
    unsafe fn mac(w: S::V, x: S::V, acc: S::V) -> S::V {
        // SAFETY: as the caller's.
        unsafe { S::dot_bf16(w, x, acc) }
    }
}

#[inline(always)]
unsafe fn sums<S: Simd, const R: usize>(v: [S::V; R]) -> [f32; R] {
    let mut out = [0.0; R];
    // SAFETY: as the caller's.
    unsafe {
        if R == 4 {
            out.copy_from_slice(&S::sum4([v[0], v[1 % R], v[2 % R], v[3 % R]])[..R]);
        } else {
            for r in 0..R {
                out[r] = S::sum(v[r]);
            }
        }
    }
    out
}

/// A product `out[t, r] = x[t, :] · w[r, :]` of densely packed rows.
#[derive(Clone, Copy)]
pub(super) struct Block {
    /// `[rows, k]`, any alignment.
    pub(super) w: *const u8,
    pub(super) rows: usize,
    /// `[tokens, k]`, any alignment.
    pub(super) x: *const u8,
    pub(super) tokens: usize,
    pub(super) k: usize,
    /// `[tokens, out_stride]`, of which the first `rows` columns are written.
    pub(super) out: *mut f32,
    pub(super) out_stride: usize,
}

impl Block {
    /// Computes the product.
    ///
    /// # Safety
    /// The pointers are valid for the shapes stated, and the CPU has `M::S`'s instructions.
    #[inline(always)]
    pub(super) unsafe fn run<M: Mac>(self) {
        let passes = (self.k * M::X_SIZE).div_ceil(DEPTH);
        let depth = self.k.div_ceil(passes).next_multiple_of(64);
        for k0 in (0..self.k).step_by(depth) {
            let depth = depth.min(self.k - k0);
            let mut t0 = 0;
            while t0 < self.tokens {
                // Even tiles: 7 tokens are 4 + 3, not 6 + 1.
                let left = self.tokens - t0;
                let c = left.div_ceil(left.div_ceil(M::S::TOKENS));
                // SAFETY: a part of this block.
                unsafe {
                    // The constants keep tiles that an instruction set never uses from being compiled.
                    match c {
                        6 if const { M::S::TOKENS >= 6 } => self.strip::<M, 6>(k0, depth, t0),
                        5 if const { M::S::TOKENS >= 5 } => self.strip::<M, 5>(k0, depth, t0),
                        4 if const { M::S::TOKENS >= 4 } => self.strip::<M, 4>(k0, depth, t0),
                        3 if const { M::S::TOKENS >= 3 } => self.strip::<M, 3>(k0, depth, t0),
                        2 if const { M::S::TOKENS >= 2 } => self.strip::<M, 2>(k0, depth, t0),
                        _ => self.strip::<M, 1>(k0, depth, t0),
                    }
                }
                t0 += c;
            }
        }
    }

    /// All rows for tokens `t0..t0 + C` and columns `k0..k0 + depth`.
    #[inline(always)]
    unsafe fn strip<M: Mac, const C: usize>(self, k0: usize, depth: usize, t0: usize) {
        let mut r = 0;
        // SAFETY: tiles within this block.
        unsafe {
            while r + ROWS <= self.rows {
                self.tile::<M, ROWS, C>(k0, depth, t0, r);
                r += ROWS;
            }
            while r < self.rows {
                self.tile::<M, 1, C>(k0, depth, t0, r);
                r += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn tile<M: Mac, const R: usize, const C: usize>(
        self,
        k0: usize,
        depth: usize,
        t0: usize,
        r0: usize,
    ) {
        let (w_stride, x_stride) = (self.k * M::W_SIZE, self.k * M::X_SIZE);
        // SAFETY: rows r0..r0 + R, tokens t0..t0 + C and columns k0..k0 + depth lie within the
        // block; `full` leaves at least one whole vector before the end of the columns.
        unsafe {
            let w = self.w.add(r0 * w_stride + k0 * M::W_SIZE);
            let x = self.x.add(t0 * x_stride + k0 * M::X_SIZE);
            let mut acc = [[M::S::splat(0.0); R]; C];
            // The first tokens bring a block in from memory, and rows lie apart: what the next
            // tile reads is hinted. Later tokens find it in the cache, and hint at nothing new.
            let ahead = if t0 == 0 { R * w_stride } else { 0 };
            let full = depth - depth % M::STEP;
            let mut k = 0;
            while k < full {
                let mut wv = [M::S::splat(0.0); R];
                for r in 0..R {
                    let p = w.add(r * w_stride + k * M::W_SIZE);
                    wv[r] = M::load_w(p);
                    M::S::prefetch(p.wrapping_add(ahead));
                }
                for c in 0..C {
                    let xv = M::load_x(x.add(c * x_stride + k * M::X_SIZE));
                    for r in 0..R {
                        acc[c][r] = M::mac(wv[r], xv, acc[c][r]);
                    }
                }
                k += M::STEP;
            }
            if full < depth {
                let n = depth - full;
                for r in 0..R {
                    let wv = M::load_w_tail(w.add(r * w_stride + full * M::W_SIZE), n);
                    for c in 0..C {
                        let xv = M::load_x_tail(x.add(c * x_stride + full * M::X_SIZE), n);
                        acc[c][r] = M::mac(wv, xv, acc[c][r]);
                    }
                }
            }
            for c in 0..C {
                let out = self.out.add((t0 + c) * self.out_stride + r0);
                let sums = sums::<M::S, R>(acc[c]);
                for r in 0..R {
                    let before = if k0 == 0 { 0.0 } else { *out.add(r) };
                    *out.add(r) = before + sums[r];
                }
            }
        }
    }
}
