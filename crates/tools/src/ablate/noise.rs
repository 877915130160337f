//! Differences between paired measurements, and whether they are any.

use serde::Serialize;

use crate::steps::median;

/// How much longer something takes than what it was measured beside, as a fraction: 0.1 is 10 % more.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Difference {
    /// The median over pairs.
    pub(super) median: f64,
    /// The median is known to within this, either way (about 95 %).
    pub(super) spread: f64,
    /// Whether it is larger than its spread, and than that of a plan measured beside itself.
    pub(super) significant: bool,
}

impl Difference {
    /// Of two plans that are the same.
    pub(super) const NONE: Difference = Difference { median: 0.0, spread: 0.0, significant: false };

    /// From the times of each pair: with the choice, and of the reference right beside it. `noise` is
    /// how far a plan is from itself.
    pub(super) fn of(pairs: &[(f64, f64)], noise: f64) -> Difference {
        let ratios: Vec<f64> = pairs.iter().map(|(a, b)| a / b - 1.0).collect();
        let middle = median(ratios.iter().copied());
        // The median deviation outlives an outlier; 1.4826 makes it a standard deviation, and a
        // median's error is 1.2533 times a mean's.
        let deviation = 1.4826 * median(ratios.iter().map(|r| (r - middle).abs()));
        let spread = 2.0 * 1.2533 * deviation / (ratios.len().max(1) as f64).sqrt();
        let significant = middle.abs() > spread.max(noise);
        Difference { median: middle, spread, significant }
    }

    /// How far from nothing this may be: what a plan measured beside itself says of the noise.
    pub(super) fn reach(self) -> f64 {
        self.median.abs() + self.spread
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_below_the_noise_is_no_difference() {
        let slower = [(1.21, 1.0), (1.2, 1.0), (2.4, 2.0), (9.0, 1.0), (1.19, 1.0)];
        let found = Difference::of(&slower, 0.05);
        assert!((found.median - 0.2).abs() < 1e-9 && found.significant, "{found:?}");
        assert!(!Difference::of(&slower, 0.3).significant, "the noise is larger");
        let either = [(1.2, 1.0), (0.8, 1.0), (1.1, 1.0), (0.9, 1.0), (1.01, 1.0)];
        assert!(!Difference::of(&either, 0.0).significant);
    }
}
