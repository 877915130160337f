//! Every instruction set against f64 references.

use std::panic::AssertUnwindSafe;

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;

const FLOATS: [Float; 3] = [Float::F32, Float::Bf16, Float::F16];

/// Values of one type, with the numbers that they stand for.
struct Tensor {
    f32: Vec<f32>,
    bf16: Vec<bf16>,
    f16: Vec<f16>,
    dtype: Float,
}

impl Tensor {
    fn new(dtype: Float, values: &[f32]) -> Self {
        let bf16: Vec<_> = values.iter().map(|&x| bf16::from_f32(x)).collect();
        let f16: Vec<_> = values.iter().map(|&x| f16::from_f32(x)).collect();
        let f32 = match dtype {
            Float::F32 => values.to_vec(),
            Float::Bf16 => bf16.iter().map(|x| x.to_f32()).collect(),
            Float::F16 => f16.iter().map(|x| x.to_f32()).collect(),
        };
        Tensor { f32, bf16, f16, dtype }
    }

    /// Sum-free noise in ±1, different for each seed.
    fn random(dtype: Float, len: usize, seed: u32) -> Self {
        let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
        let values: Vec<f32> = (0..len)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect();
        Tensor::new(dtype, &values)
    }

    fn act(&self) -> Act<'_> {
        match self.dtype {
            Float::F32 => Act::F32(&self.f32),
            Float::Bf16 => Act::Bf16(&self.bf16),
            Float::F16 => Act::F16(&self.f16),
        }
    }

    /// The bytes, `shift` bytes off alignment.
    fn shifted(&self, shift: usize) -> Vec<u8> {
        [vec![0xff; shift], self.act().as_bytes().to_vec()].concat()
    }
}

/// A case of `linear`.
#[derive(Clone, Copy, Debug)]
struct Case {
    t: usize,
    n: usize,
    k: usize,
    x: Float,
    w: Float,
    bias: Option<Float>,
    shift: usize,
}

impl Case {
    /// The output in f32, after rounding to `y`, computed with `isa` and weights in two segments
    /// split after `split` rows.
    fn run(self, isa: Isa, y: Float, split: usize) -> Vec<f32> {
        let (x, w, b) = self.data();
        let bytes = w.shifted(self.shift);
        let (first, second) = bytes[self.shift..].split_at(split * self.k * self.w.size());
        let segments = [first, &[], second];
        let w = Weights::new(self.w, self.k, &segments).unwrap();
        let bias_bytes = b.shifted(1);
        let bias_segments = [&bias_bytes[1..]];
        let bias = self.bias.map(|dtype| Weights::new(dtype, 1, &bias_segments).unwrap());
        // The output lies between sentinels.
        let len = self.t * self.n;
        let mut out = Tensor::new(y, &vec![7.0; len + 2]);
        let view = match y {
            Float::F32 => ActMut::F32(&mut out.f32[1..=len]),
            Float::Bf16 => ActMut::Bf16(&mut out.bf16[1..=len]),
            Float::F16 => ActMut::F16(&mut out.f16[1..=len]),
        };
        linear(isa, x.act(), self.t, &w, bias.as_ref(), view);
        let mut values = vec![0.0; len + 2];
        widen(Isa::PORTABLE, out.act(), &mut values);
        assert_eq!((values[0], values[len + 1]), (7.0, 7.0), "written outside");
        values[1..=len].to_vec()
    }

    fn data(self) -> (Tensor, Tensor, Tensor) {
        (
            Tensor::random(self.x, self.t * self.k, 1),
            Tensor::random(self.w, self.n * self.k, 2),
            Tensor::random(self.bias.unwrap_or(Float::F32), self.n, 3),
        )
    }

    /// The output in f64, and `Σ |x·w|`, which rounding errors are relative to.
    fn reference(self) -> Vec<(f64, f64)> {
        let (x, w, b) = self.data();
        let mut out = Vec::new();
        for x in x.f32.chunks(self.k) {
            for (n, w) in w.f32.chunks(self.k).enumerate() {
                let bias = if self.bias.is_some() { f64::from(b.f32[n]) } else { 0.0 };
                let products = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
                let sum: f64 = products.clone().sum();
                out.push((sum + bias, products.map(f64::abs).sum::<f64>() + bias.abs()));
            }
        }
        out
    }

    fn check(self, isa: Isa, split: usize) {
        let got = self.run(isa, Float::F32, split);
        let expected = self.reference();
        assert_eq!(got.len(), expected.len());
        for (i, (got, (want, size))) in got.iter().zip(&expected).enumerate() {
            // Each product passes K / 16 + 8 additions at most; random signs keep well below.
            let bound = 1e-6 * size + 1e-30;
            let error = (f64::from(*got) - want).abs();
            assert!(error <= bound, "{self:?} {isa:?} [{i}]: {got} for {want}, {error} > {bound}");
        }
        // Ten times and more below the parity bound; few outputs may all be small by cancellation.
        let error: f64 =
            got.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b.0).powi(2)).sum();
        let norm: f64 = expected.iter().map(|b| b.0.powi(2)).sum();
        let small = got.len() < 64 || error <= 1e-11 * norm;
        assert!(small, "{self:?} {isa:?}: NMSE {}", error / norm);
        // Rounded once: what is stored is the f32 result, rounded.
        for y in [Float::Bf16, Float::F16] {
            let rounded = Tensor::new(y, &got);
            assert_eq!(self.run(isa, y, split), rounded.f32, "{self:?} {isa:?} to {y:?}");
        }
    }
}

#[test]
fn linear_agrees_with_f64_on_every_isa_dtype_and_shape() {
    for isa in Isa::available() {
        for k in [1, 3, 17, 64, 97, 2053] {
            for (t, n) in [(1, 1), (1, 37), (2, 5), (5, 64), (33, 19)] {
                for (i, x) in FLOATS.into_iter().enumerate() {
                    for (j, w) in FLOATS.into_iter().enumerate() {
                        let bias = [None, Some(w), Some(Float::F32)][(i + t) % 3];
                        let case = Case { t, n, k, x, w, bias, shift: (i + j + k) % 4 };
                        case.check(isa, n / 3);
                    }
                }
            }
        }
    }
}

#[test]
fn linear_agrees_over_several_blocks_of_rows_and_tokens() {
    for isa in Isa::available() {
        for (x, w) in [(Float::Bf16, Float::Bf16), (Float::F32, Float::F16)] {
            Case { t: 300, n: 601, k: 70, x, w, bias: Some(w), shift: 1 }.check(isa, 258);
            Case { t: 7, n: 131, k: 5632, x, w, bias: None, shift: 0 }.check(isa, 1);
        }
    }
}

fn any_float() -> impl Strategy<Value = Float> {
    prop::sample::select(FLOATS.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

    #[test]
    fn linear_agrees_with_f64_on_random_shapes(
        (t, n, k, split) in (1_usize..40, 1_usize..90, 1_usize..400)
            .prop_flat_map(|(t, n, k)| (Just(t), Just(n), Just(k), 0..=n)),
        (x, w, bias) in (any_float(), any_float(), prop::option::of(any_float())),
        shift in 0_usize..64,
    ) {
        for isa in Isa::available() {
            Case { t, n, k, x, w, bias, shift }.check(isa, split);
        }
    }
}

/// A token's output must not depend on which tokens share its step, nor on the thread count or
/// the segments: prefill, chunks and decode then agree to the bit.
#[test]
fn linear_does_not_depend_on_batch_threads_or_segments() {
    let case = Case { t: 29, n: 301, k: 2500, x: Float::F32, w: Float::Bf16, bias: None, shift: 0 };
    for isa in Isa::available() {
        for x in [Float::F32, Float::Bf16] {
            let case = Case { x, ..case };
            let whole = case.run(isa, Float::F32, 0);
            assert_eq!(whole, case.run(isa, Float::F32, 103), "segments, {isa:?}");
            let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
            assert_eq!(whole, pool.install(|| case.run(isa, Float::F32, 0)), "threads, {isa:?}");
            let (x, w, _) = case.data();
            let bytes = w.shifted(0);
            let segments = [&bytes[..]];
            let w = Weights::new(case.w, case.k, &segments).unwrap();
            for t in 0..case.t {
                let mut y = vec![0.0; case.n];
                let token = x.act().slice(t * case.k..(t + 1) * case.k);
                linear(isa, token, 1, &w, None, ActMut::F32(&mut y));
                assert_eq!(y, whole[t * case.n..(t + 1) * case.n], "token {t}, {isa:?}");
            }
        }
    }
}

#[test]
fn linear_of_nothing_is_nothing() {
    let w = Weights::new(Float::F32, 4, &[]).unwrap();
    linear(Isa::best(), Act::F32(&[1.0; 8]), 2, &w, None, ActMut::F32(&mut []));
    let segments = [&[0_u8; 16][..]];
    let w = Weights::new(Float::F32, 4, &segments).unwrap();
    linear(Isa::best(), Act::F32(&[]), 0, &w, None, ActMut::F32(&mut []));
}

#[test]
#[should_panic(expected = "y is not [2, 1]")]
fn linear_refuses_an_output_of_another_shape() {
    let segments = [&[0_u8; 16][..]];
    let w = Weights::new(Float::F32, 4, &segments).unwrap();
    linear(Isa::best(), Act::F32(&[0.0; 8]), 2, &w, None, ActMut::F32(&mut [0.0; 3]));
}

#[test]
fn weights_refuse_partial_rows_and_impossible_columns() {
    let error = Weights::new(Float::Bf16, 3, &[&[0; 12], &[0; 7]]).unwrap_err();
    assert_eq!(error, WeightError::PartialRow { segment: 1, bytes: 7, row_bytes: 6 });
    for columns in [0, usize::MAX] {
        let error = Weights::new(Float::Bf16, columns, &[&[0; 12]]).unwrap_err();
        assert_eq!(error, WeightError::Columns { columns });
    }
}

#[test]
fn widening_is_exact_for_every_16_bit_pattern() {
    let patterns: Vec<u16> = (0..=u16::MAX).collect();
    let bytes: Vec<u8> = patterns.iter().flat_map(|p| p.to_le_bytes()).collect();
    for isa in Isa::available() {
        let mut out = vec![0.0; patterns.len()];
        widen_bytes(isa, Float::Bf16, &bytes, &mut out);
        for (p, x) in patterns.iter().zip(&out) {
            assert_eq!(x.to_bits(), u32::from(*p) << 16, "{isa:?} bf16 {p:#x}");
        }
        widen_bytes(isa, Float::F16, &bytes, &mut out);
        for (p, x) in patterns.iter().zip(&out) {
            let want = f16::from_bits(*p).to_f32();
            assert!(x.to_bits() == want.to_bits() || (x.is_nan() && want.is_nan()), "f16 {p:#x}");
        }
    }
}

#[test]
fn narrowing_rounds_to_nearest_even() {
    // Around every 16-bit boundary: below, at and above a tie, of both parities.
    let mut x: Vec<f32> = Vec::new();
    for high in (0..=u16::MAX).step_by(7) {
        for low in [0, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff] {
            x.push(f32::from_bits(u32::from(high) << 16 | low));
        }
    }
    x.extend([f32::NAN, f32::from_bits(0x7f80_0001), f32::INFINITY, f32::MAX, -0.0, 65_520.0]);
    for isa in Isa::available() {
        let (mut b, mut h) = (vec![bf16::ZERO; x.len()], vec![f16::ZERO; x.len()]);
        narrow(isa, &x, ActMut::Bf16(&mut b));
        narrow(isa, &x, ActMut::F16(&mut h));
        for (i, &x) in x.iter().enumerate() {
            if x.is_nan() {
                assert!(b[i].is_nan() && h[i].is_nan(), "{isa:?} {x}");
            } else {
                assert_eq!(b[i].to_bits(), bf16::from_f32(x).to_bits(), "{isa:?} bf16 of {x}");
                assert_eq!(h[i].to_bits(), f16::from_f32(x).to_bits(), "{isa:?} f16 of {x}");
            }
        }
    }
}

const LENGTHS: [usize; 9] = [0, 1, 7, 8, 15, 33, 64, 128, 1031];

#[test]
fn dots_agree_with_f64() {
    let (rows, pad) = (3, 5);
    for isa in Isa::available() {
        for (len, dtype) in LENGTHS.into_iter().flat_map(|l| FLOATS.map(|f| (l, f))) {
            let q = Tensor::random(Float::F32, len, 1).f32;
            let k = Tensor::random(dtype, rows * (len + pad), 2);
            let mut out = [f32::NAN; 3];
            dot_rows(isa, &q, k.act(), len + pad, &mut out);
            for (row, got) in k.f32.chunks(len + pad).zip(out) {
                let products = q.iter().zip(row).map(|(a, b)| f64::from(*a) * f64::from(*b));
                let want: f64 = products.clone().sum();
                let bound = 1e-6 * products.map(f64::abs).sum::<f64>();
                assert!((f64::from(got) - want).abs() <= bound, "{isa:?} {dtype:?} {len}");
            }
            assert_eq!(dot(isa, &q, k.act().slice(0..len)), out[0]);
            let squares: f64 = k.f32.iter().map(|x| f64::from(*x).powi(2)).sum();
            let got = f64::from(sum_squares(isa, k.act()));
            assert!((got - squares).abs() <= 1e-6 * squares, "{isa:?} {dtype:?} {len}");
        }
    }
}

#[test]
fn axpy_agrees_with_f64() {
    let pad = 3;
    for isa in Isa::available() {
        for (len, dtype) in LENGTHS.into_iter().flat_map(|l| FLOATS.map(|f| (l, f))) {
            let a = [0.5, -2.0, 1.25];
            let v = Tensor::random(dtype, a.len() * (len + pad), 2);
            let start = Tensor::random(Float::F32, len, 3).f32;
            let mut acc = start.clone();
            axpy_rows(isa, &mut acc, &a, v.act(), len + pad);
            for i in 0..len {
                let terms = (0..3).map(|r| f64::from(a[r]) * f64::from(v.f32[r * (len + pad) + i]));
                let want = f64::from(start[i]) + terms.sum::<f64>();
                assert!((f64::from(acc[i]) - want).abs() <= 1e-6, "{isa:?} {dtype:?} {len} [{i}]");
            }
            let mut one = start.clone();
            axpy(isa, &mut one, 2.0, v.act().slice(0..len));
            let mut rows = start;
            axpy_rows(isa, &mut rows, &[2.0], v.act(), len + pad);
            assert_eq!(one, rows);
        }
    }
}

#[test]
#[should_panic(expected = "3 rows of 4, 5 apart, need 14 elements, not 13")]
fn rows_beyond_the_end_are_refused() {
    dot_rows(Isa::best(), &[0.0; 4], Act::F32(&[0.0; 13]), 5, &mut [0.0; 3]);
}

#[test]
fn max_ignores_nan_and_sees_every_place() {
    for isa in Isa::available() {
        for len in 1..70 {
            for at in 0..len {
                let mut x = vec![-3.0; len];
                x[at] = -1.0;
                x[(at + 1) % len] = if len > 1 { f32::NAN } else { -1.0 };
                assert_eq!(max(isa, &x), -1.0, "{isa:?} {at} of {len}");
            }
        }
        assert_eq!(max(isa, &[]), f32::NEG_INFINITY);
    }
}

#[test]
fn exp_is_within_two_ulp() {
    let x: Vec<f32> = (0..200_000).map(|i| -(i as f32) * 4.36e-4).chain([-0.0, -1e-30]).collect();
    for isa in Isa::available() {
        let mut e = x.clone();
        let sum = exp_sum(isa, &mut e, 0.0);
        for (x, e) in x.iter().zip(&e) {
            let want = f64::from(*x).exp();
            assert!((f64::from(*e) - want).abs() <= 2.4e-7 * want, "{isa:?} e^{x}: {e} for {want}");
        }
        let total: f64 = e.iter().map(|e| f64::from(*e)).sum();
        assert!((f64::from(sum) - total).abs() <= 1e-4 * total);
    }
}

#[test]
fn softmax_agrees_with_f64_and_masks_exactly() {
    for isa in Isa::available() {
        for len in 1..70 {
            let mut x: Vec<f32> = Tensor::random(Float::F32, len, 9).f32;
            scale(Isa::PORTABLE, &mut x, 30.0);
            x[len / 2] = f32::NEG_INFINITY;
            x[len - 1] = 88.0;
            // The difference is rounded to f32 by definition: x is f32, and so is the maximum.
            let sum: f64 = x.iter().map(|x| f64::from(x - 88.0).exp()).sum();
            let mut p = x.clone();
            softmax(isa, &mut p);
            for (x, p) in x.iter().zip(&p) {
                let want = f64::from(x - 88.0).exp() / sum;
                let error = (f64::from(*p) - want).abs();
                assert!(error <= 5e-7 * want + 2e-38, "{isa:?} {len}: {p} for {want}");
                assert!(x.is_finite() || *p == 0.0, "a masked element of {p}");
            }
        }
        let mut masked = [f32::NEG_INFINITY; 20];
        softmax(isa, &mut masked);
        assert_eq!(masked, [0.0; 20]);
        let mut poisoned = [0.0; 20];
        poisoned[19] = f32::NAN;
        softmax(isa, &mut poisoned);
        assert!(poisoned[0].is_nan(), "NaN must not be hidden");
    }
}

/// Runs 6 × 10 nested blocks in a pool, and says how often each ran.
fn nested_blocks(threads: usize, team: bool) -> Vec<usize> {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let runs: Vec<_> = (0..60).map(|_| AtomicUsize::new(0)).collect();
    let step = || {
        for_each_block(6, |i| {
            for_each_block(10, |j| _ = runs[i * 10 + j].fetch_add(1, Relaxed));
        });
    };
    pool.install(|| if team { with_team(|| (0..200).for_each(|_| step())) } else { step() });
    runs.into_iter().map(AtomicUsize::into_inner).collect()
}

#[test]
fn blocks_run_once_each_also_when_nested() {
    for threads in [1, 2, 5] {
        assert_eq!(nested_blocks(threads, false), [1; 60], "{threads} threads");
        assert_eq!(nested_blocks(threads, true), [200; 60], "a team of {threads}");
    }
}

#[test]
fn a_team_really_shares_work() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    // Both blocks wait for each other, which one thread alone could not do.
    let barrier = std::sync::Barrier::new(2);
    pool.install(|| with_team(|| for_each_block(2, |_| _ = barrier.wait())));
}

#[test]
fn a_panic_in_a_block_passes_through_and_leaves_the_pool_usable() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    for block in 0..50 {
        let step = || with_team(|| for_each_block(50, |i| assert_ne!(i, block)));
        let failed = std::panic::catch_unwind(AssertUnwindSafe(|| pool.install(step)));
        assert!(failed.is_err());
    }
    assert_eq!(pool.install(|| with_team(|| 7)), 7);
}
