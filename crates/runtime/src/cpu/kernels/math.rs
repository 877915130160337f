//! Elementary functions in f32, free of branches so that loops over them vectorise.

/// `e^x` within 2 ulp; 0 below -86.6, where it would lose its precision. Range reduction and
/// polynomial of Cephes `expf`.
#[inline]
pub(super) fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    let c = if x > 88.73 { 88.73 } else { x };
    let c = if c < -86.6 { -86.6 } else { c };
    let t = c * std::f32::consts::LOG2_E + MAGIC;
    let n = t - MAGIC;
    let r = c - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let y = p * r * r + r + 1.0;
    // 2^(n - 1), because 2^128 is no number.
    let scale = f32::from_bits((t.to_bits() << 23).wrapping_add(126 << 23));
    let y = y * scale * 2.0;
    let y = if x > 88.722_84 { f32::INFINITY } else { y };
    if x < -86.6 { 0.0 } else { y }
}

/// The hyperbolic tangent within 3 ulp (Cephes `tanhf`).
#[inline]
pub(super) fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let z = x * x;
    let p = -5.704_988_7e-3;
    let p = p * z + 2.063_909e-2;
    let p = p * z - 5.373_971_6e-2;
    let p = p * z + 1.333_144_2e-1;
    let p = p * z - 3.333_328e-1;
    let small = p * z * x + x;
    let large = (1.0 - 2.0 / (exp(2.0 * a) + 1.0)).copysign(x);
    if a < 0.625 { small } else { large }
}

/// GELU in its tanh form.
#[inline]
pub(super) fn gelu_tanh(x: f32) -> f32 {
    0.5 * x * (1.0 + tanh(0.797_884_6 * (x + 0.044_715 * x * x * x)))
}

#[cfg(test)]
mod tests {
    fn worst(f: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64, from: f32, to: f32) -> f64 {
        let points = (0..200_000).map(|i| from + (to - from) * (i as f32 / 200_000.0));
        let error = |x: f32| {
            let y = exact(f64::from(x));
            if y == 0.0 { 0.0 } else { ((f64::from(f(x)) - y) / y).abs() }
        };
        points.map(error).fold(0.0, f64::max)
    }

    #[test]
    fn exp_is_accurate_and_whole() {
        assert!(worst(super::exp, f64::exp, -86.5, 88.7) < 2.5e-7);
        assert_eq!(super::exp(0.0), 1.0);
        assert_eq!(super::exp(100.0), f32::INFINITY);
        assert_eq!(super::exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(super::exp(f32::NEG_INFINITY), 0.0);
        assert!(super::exp(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_is_accurate_and_whole() {
        assert!(worst(super::tanh, f64::tanh, -12.0, 12.0) < 3e-7);
        assert!(worst(super::tanh, f64::tanh, -1e-3, 1e-3) < 2e-7);
        assert_eq!(super::tanh(f32::INFINITY), 1.0);
        assert_eq!(super::tanh(-50.0), -1.0);
        assert!(super::tanh(f32::NAN).is_nan());
    }
}
