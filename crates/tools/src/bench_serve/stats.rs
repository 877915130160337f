//! Figures of samples, all from the samples themselves.

use serde::Serialize;

/// A distribution in short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Summary {
    pub(super) samples: usize,
    pub(super) mean: f64,
    pub(super) p50: f64,
    pub(super) p95: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
}

impl Summary {
    /// Of samples in any order; nothing when there are none.
    pub(super) fn of(mut samples: Vec<f64>) -> Option<Summary> {
        samples.sort_unstable_by(f64::total_cmp);
        let max = *samples.last()?;
        Some(Summary {
            samples: samples.len(),
            mean: samples.iter().sum::<f64>() / samples.len() as f64,
            p50: percentile(&samples, 0.50),
            p95: percentile(&samples, 0.95),
            p99: percentile(&samples, 0.99),
            max,
        })
    }
}

/// The sample below which a fraction lies, between its two neighbours where it falls between two
/// (NumPy's default). `sorted` holds at least one.
pub(super) fn percentile(sorted: &[f64], fraction: f64) -> f64 {
    let at = fraction.clamp(0.0, 1.0) * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

/// A figure that was measured several times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) least: f64,
    pub(super) most: f64,
}

impl Spread {
    /// Of measurements in any order; nothing when there are none.
    pub(super) fn of(mut values: Vec<f64>) -> Option<Spread> {
        values.sort_unstable_by(f64::total_cmp);
        let (least, most) = (*values.first()?, *values.last()?);
        Some(Spread { median: percentile(&values, 0.5), least, most })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn percentiles_are_numpys() {
        // numpy.percentile([1, 2, 4, 8, 16], [50, 95, 99])
        let s = Summary::of(vec![8.0, 1.0, 16.0, 4.0, 2.0]).expect("samples");
        let expected = [6.2, 4.0, 14.4, 15.68, 16.0];
        for (found, expected) in [s.mean, s.p50, s.p95, s.p99, s.max].into_iter().zip(expected) {
            assert!((found - expected).abs() < 1e-12, "{found} {expected}");
        }
        assert_eq!(Summary::of(Vec::new()), None);
    }

    #[test]
    fn a_spread_has_its_median_between_its_ends() {
        let spread = Spread::of(vec![3.0, 1.0, 2.0, 10.0]);
        assert_eq!(spread, Some(Spread { median: 2.5, least: 1.0, most: 10.0 }));
    }

    proptest! {
        #[test]
        fn a_percentile_has_its_fraction_of_samples_at_or_below(
            samples in prop::collection::vec(-1e6f64..1e6, 1..200),
            fraction in 0.0f64..=1.0,
        ) {
            let mut sorted = samples;
            sorted.sort_unstable_by(f64::total_cmp);
            let found = percentile(&sorted, fraction);
            let below = sorted.iter().filter(|s| **s <= found).count() as f64;
            let above = sorted.iter().filter(|s| **s >= found).count() as f64;
            let steps = (sorted.len() - 1) as f64;
            prop_assert!(below >= (fraction * steps).floor() && above >= ((1.0 - fraction) * steps).floor());
            prop_assert!(sorted[0] <= found && found <= sorted[sorted.len() - 1]);
        }
    }
}
