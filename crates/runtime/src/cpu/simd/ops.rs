//! Vector operations that attention and norms are made of.

use super::element::{Act, ActMut, Element, Float, with_element};
use super::isa::{Isa, Kernel};
use super::vector::Simd;

/// Converts to f32, exactly.
///
/// # Panics
/// If the lengths differ.
pub fn widen(isa: Isa, x: Act<'_>, out: &mut [f32]) {
    widen_bytes(isa, x.dtype(), x.as_bytes(), out);
}

/// [`widen`] of little-endian bytes of any alignment, such as an embedding's row.
///
/// # Panics
/// If `bytes` is not `out.len()` elements long.
pub fn widen_bytes(isa: Isa, dtype: Float, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len() * dtype.size(), "lengths differ");
    isa.run(WidenBytes { dtype, bytes, out });
}

/// Rounds from f32, to nearest even.
///
/// # Panics
/// If the lengths differ.
pub fn narrow(isa: Isa, x: &[f32], mut out: ActMut<'_>) {
    assert_eq!(x.len(), out.len(), "lengths differ");
    isa.run(Narrow { x, dtype: out.dtype(), out: out.as_bytes_mut() });
}

/// `q · k`, summed in f32.
///
/// # Panics
/// If the lengths differ.
pub fn dot(isa: Isa, q: &[f32], k: Act<'_>) -> f32 {
    assert_eq!(q.len(), k.len(), "lengths differ");
    let mut out = [0.0];
    dot_rows(isa, q, k, q.len(), &mut out);
    out[0]
}

/// `out[i] = q · k[i, :]` for rows of `q.len()` that begin every `stride` elements of `k`.
///
/// # Panics
/// If `k` ends before the last row does.
pub fn dot_rows(isa: Isa, q: &[f32], k: Act<'_>, stride: usize, out: &mut [f32]) {
    check_rows(out.len(), stride, q.len(), k.len());
    isa.run(DotRows { q, k, stride, out });
}

/// `acc += a * v`.
///
/// # Panics
/// If the lengths differ.
pub fn axpy(isa: Isa, acc: &mut [f32], a: f32, v: Act<'_>) {
    assert_eq!(acc.len(), v.len(), "lengths differ");
    let stride = acc.len();
    axpy_rows(isa, acc, &[a], v, stride);
}

/// `acc += Σ_i a[i] * v[i, :]` for rows of `acc.len()` that begin every `stride` elements of `v`.
///
/// # Panics
/// If `v` ends before the last row does.
pub fn axpy_rows(isa: Isa, acc: &mut [f32], a: &[f32], v: Act<'_>, stride: usize) {
    check_rows(a.len(), stride, acc.len(), v.len());
    isa.run(AxpyRows { acc, a, v, stride });
}

fn check_rows(rows: usize, stride: usize, row: usize, len: usize) {
    let end = if rows == 0 { 0 } else { ((rows - 1).saturating_mul(stride)).saturating_add(row) };
    assert!(end <= len, "{rows} rows of {row}, {stride} apart, need {end} elements, not {len}");
}

/// `Σ x²` in f32.
pub fn sum_squares(isa: Isa, x: Act<'_>) -> f32 {
    isa.run(SumSquares(x))
}

/// The largest element, NaN ignored; -∞ of none.
pub fn max(isa: Isa, x: &[f32]) -> f32 {
    isa.run(Max(x))
}

/// `x *= a`.
pub fn scale(isa: Isa, x: &mut [f32], a: f32) {
    isa.run(Scale { x, a });
}

/// `x = e^(x - max)` in place, and its sum. `max` must be no less than any element.
///
/// The parts of a softmax that attention sinks or blocks of a long row need apart.
pub fn exp_sum(isa: Isa, x: &mut [f32], max: f32) -> f32 {
    isa.run(ExpSum { x, max })
}

/// Softmax in place. Elements of -∞ become exactly 0; if all are -∞, all become 0.
pub fn softmax(isa: Isa, x: &mut [f32]) {
    let max = max(isa, x);
    if max == f32::NEG_INFINITY && !x.iter().any(|x| x.is_nan()) {
        return x.fill(0.0);
    }
    let sum = exp_sum(isa, x, max);
    scale(isa, x, 1.0 / sum);
}

pub(super) struct WidenBytes<'a> {
    pub(super) dtype: Float,
    pub(super) bytes: &'a [u8],
    /// As many elements as `bytes` has.
    pub(super) out: &'a mut [f32],
}

impl Kernel for WidenBytes<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (x, y, n) = (self.bytes.as_ptr(), self.out.as_mut_ptr(), self.out.len());
        // SAFETY: both hold n elements.
        with_element!(self.dtype, E => unsafe { convert::<S, E, f32>(x, y.cast(), n) });
    }
}

struct Narrow<'a> {
    x: &'a [f32],
    dtype: Float,
    out: &'a mut [u8],
}

impl Kernel for Narrow<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (x, y) = (self.x.as_ptr().cast(), self.out.as_mut_ptr());
        // SAFETY: both hold x.len() elements.
        with_element!(self.dtype, E => unsafe { convert::<S, f32, E>(x, y, self.x.len()) });
    }
}

#[inline(always)]
unsafe fn convert<S: Simd, A: Element, B: Element>(x: *const u8, y: *mut u8, n: usize) {
    let mut i = 0;
    // SAFETY: n elements at both by contract.
    unsafe {
        while i + S::LANES <= n {
            B::store::<S>(y.add(i * B::SIZE), A::load::<S>(x.add(i * A::SIZE)));
            i += S::LANES;
        }
        if i < n {
            let v = A::load_tail::<S>(x.add(i * A::SIZE), n - i);
            B::store_tail::<S>(y.add(i * B::SIZE), v, n - i);
        }
    }
}

struct DotRows<'a> {
    q: &'a [f32],
    k: Act<'a>,
    stride: usize,
    out: &'a mut [f32],
}

impl Kernel for DotRows<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (q, n) = (self.q.as_ptr().cast(), self.q.len());
        let k = self.k.as_bytes().as_ptr();
        with_element!(self.k.dtype(), E => {
            for (i, out) in self.out.iter_mut().enumerate() {
                // SAFETY: `check_rows` has seen row i end within k.
                *out = unsafe { product::<S, f32, E>(q, k.add(i * self.stride * E::SIZE), n) };
            }
        });
    }
}

struct SumSquares<'a>(Act<'a>);

impl Kernel for SumSquares<'_> {
    type Out = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        let x = self.0.as_bytes().as_ptr();
        // SAFETY: x has as many elements.
        with_element!(self.0.dtype(), E => unsafe { product::<S, E, E>(x, x, self.0.len()) })
    }
}

/// Σ a·b, in four vectors to hide the latency of addition.
#[inline(always)]
unsafe fn product<S: Simd, A: Element, B: Element>(a: *const u8, b: *const u8, n: usize) -> f32 {
    let mut i = 0;
    // SAFETY: n elements at both by contract.
    unsafe {
        let mut acc = [S::splat(0.0); 4];
        while i + 4 * S::LANES <= n {
            for (j, acc) in acc.iter_mut().enumerate() {
                let at = i + j * S::LANES;
                let (a, b) = (a.add(at * A::SIZE), b.add(at * B::SIZE));
                *acc = S::fma(A::load::<S>(a), B::load::<S>(b), *acc);
            }
            i += 4 * S::LANES;
        }
        while i < n {
            let (a, b, left) = (a.add(i * A::SIZE), b.add(i * B::SIZE), n - i);
            let (a, b) = if left >= S::LANES {
                (A::load::<S>(a), B::load::<S>(b))
            } else {
                (A::load_tail::<S>(a, left), B::load_tail::<S>(b, left))
            };
            acc[0] = S::fma(a, b, acc[0]);
            i += S::LANES;
        }
        S::sum(S::add(S::add(acc[0], acc[1]), S::add(acc[2], acc[3])))
    }
}

struct AxpyRows<'a> {
    acc: &'a mut [f32],
    a: &'a [f32],
    v: Act<'a>,
    stride: usize,
}

impl Kernel for AxpyRows<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let n = self.acc.len();
        let acc: *mut u8 = self.acc.as_mut_ptr().cast();
        let v = self.v.as_bytes().as_ptr();
        // SAFETY: `check_rows` has seen the last row end within v; acc has n elements.
        with_element!(self.v.dtype(), E => unsafe {
            let mut i = 0;
            while i + 4 * S::LANES <= n {
                columns::<S, E, 4>(acc.add(i * 4), self.a, v.add(i * E::SIZE), self.stride);
                i += 4 * S::LANES;
            }
            while i + S::LANES <= n {
                columns::<S, E, 1>(acc.add(i * 4), self.a, v.add(i * E::SIZE), self.stride);
                i += S::LANES;
            }
            if i < n {
                let (acc, v, left) = (acc.add(i * 4), v.add(i * E::SIZE), n - i);
                let mut sum = f32::load_tail::<S>(acc, left);
                for (r, a) in self.a.iter().enumerate() {
                    let v = E::load_tail::<S>(v.add(r * self.stride * E::SIZE), left);
                    sum = S::fma(S::splat(*a), v, sum);
                }
                f32::store_tail::<S>(acc, sum, left);
            }
        });
    }
}

/// `C` vectors of columns of [`axpy_rows`], kept in registers over all rows.
#[inline(always)]
unsafe fn columns<S: Simd, E: Element, const C: usize>(
    acc: *mut u8,
    a: &[f32],
    v: *const u8,
    stride: usize,
) {
    // SAFETY: C vectors at acc and in every row at v, by contract.
    unsafe {
        let mut sum = [S::splat(0.0); C];
        for (c, sum) in sum.iter_mut().enumerate() {
            *sum = S::load_f32(acc.add(c * S::LANES * 4));
        }
        for (r, a) in a.iter().enumerate() {
            let a = S::splat(*a);
            let v = v.add(r * stride * E::SIZE);
            for (c, sum) in sum.iter_mut().enumerate() {
                *sum = S::fma(a, E::load::<S>(v.add(c * S::LANES * E::SIZE)), *sum);
            }
        }
        for (c, sum) in sum.iter().enumerate() {
            S::store_f32(acc.add(c * S::LANES * 4), *sum);
        }
    }
}

struct Max<'a>(&'a [f32]);

impl Kernel for Max<'_> {
    type Out = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; 16];
        let chunks = self.0.chunks_exact(S::LANES);
        let rest = chunks.remainder().iter();
        // SAFETY: each chunk is a vector, and 16 lanes hold the widest.
        unsafe {
            let mut acc = S::splat(f32::NEG_INFINITY);
            for chunk in chunks {
                acc = S::max(S::load_f32(chunk.as_ptr().cast()), acc);
            }
            S::store_f32(lanes.as_mut_ptr().cast(), acc);
        }
        lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, b| a.max(*b))
    }
}

struct Scale<'a> {
    x: &'a mut [f32],
    a: f32,
}

impl Kernel for Scale<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let mut chunks = self.x.chunks_exact_mut(S::LANES);
        for chunk in &mut chunks {
            let p: *mut u8 = chunk.as_mut_ptr().cast();
            // SAFETY: the chunk is a vector.
            unsafe { S::store_f32(p, S::mul(S::load_f32(p), S::splat(self.a))) }
        }
        for x in chunks.into_remainder() {
            *x *= self.a;
        }
    }
}

struct ExpSum<'a> {
    x: &'a mut [f32],
    max: f32,
}

impl Kernel for ExpSum<'_> {
    type Out = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        let mut chunks = self.x.chunks_exact_mut(S::LANES);
        // SAFETY: each chunk is a vector; the remainder is shorter than one, and what its tail
        // loads beyond the end (0) is not summed.
        unsafe {
            let max = S::splat(self.max);
            let mut sum = S::splat(0.0);
            for chunk in &mut chunks {
                let p: *mut u8 = chunk.as_mut_ptr().cast();
                let e = S::exp_nonpositive(S::sub(S::load_f32(p), max));
                S::store_f32(p, e);
                sum = S::add(sum, e);
            }
            let rest = chunks.into_remainder();
            let (p, n): (*mut u8, _) = (rest.as_mut_ptr().cast(), rest.len());
            let e = S::exp_nonpositive(S::sub(f32::load_tail::<S>(p, n), max));
            f32::store_tail::<S>(p, e, n);
            rest.iter().fold(S::sum(sum), |sum, e| sum + e)
        }
    }
}
