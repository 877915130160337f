//! How far two tensors are from one another.

use serde::Serialize;

use super::dump::Theirs;

/// Figures of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Figures {
    /// Mean squared error over the mean square of theirs; infinite where one has a NaN or an infinity that the other
    /// has not.
    pub(crate) nmse: f64,
    /// The largest difference.
    pub(crate) max_abs: f64,
    /// Of the angle between them.
    pub(crate) cosine: f64,
    /// Elements that are 0 in one of them alone: `[ours, theirs]`. Of probabilities, what only one of them hides.
    pub(crate) zeros: [usize; 2],
}

/// What values are like.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) rms: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    /// Elements that are no number.
    pub(crate) nans: usize,
}

impl Figures {
    /// Of two tensors of as many elements.
    fn of(ours: &[f64], theirs: impl Iterator<Item = f64>) -> Figures {
        let (mut error, mut square, mut own, mut dot) = (0.0, 0.0, 0.0, 0.0);
        let (mut max_abs, mut zeros, mut broken) = (0f64, [0, 0], false);
        for (&a, b) in ours.iter().zip(theirs) {
            if !(a.is_finite() && b.is_finite()) {
                // The same infinity on both sides is no difference.
                broken |= a.partial_cmp(&b) != Some(std::cmp::Ordering::Equal);
                continue;
            }
            error += (a - b).powi(2);
            square += b * b;
            own += a * a;
            dot += a * b;
            max_abs = max_abs.max((a - b).abs());
            zeros[0] += usize::from(a == 0.0 && b != 0.0);
            zeros[1] += usize::from(b == 0.0 && a != 0.0);
        }
        let nmse = match (broken, error == 0.0) {
            (true, _) => f64::INFINITY,
            (_, true) => 0.0,
            _ => error / square,
        };
        let length = (own * square).sqrt();
        let cosine = if length == 0.0 { f64::from(u8::from(own == square)) } else { dot / length };
        Figures { nmse, max_abs, cosine, zeros }
    }
}

impl Figures {
    /// Whether they are further apart than that; what is no number is.
    pub(crate) fn departs(&self, tolerance: f64) -> bool {
        self.nmse.is_nan() || self.nmse > tolerance
    }
}

impl Spread {
    pub(crate) fn of(values: &[f64]) -> Spread {
        let numbers = || values.iter().copied().filter(|v| !v.is_nan());
        // Masks hide with an infinity, which says nothing of the rest.
        let finite = || numbers().filter(|v| v.is_finite());
        let (square, count) = finite().fold((0.0, 0usize), |(s, n), v| (s + v * v, n + 1));
        Spread {
            rms: (square / count.max(1) as f64).sqrt(),
            min: numbers().fold(f64::INFINITY, f64::min),
            max: numbers().fold(f64::NEG_INFINITY, f64::max),
            nans: values.iter().filter(|v| v.is_nan()).count(),
        }
    }
}

/// Compares a value of ours with theirs of as many elements. `[T, H, D]` and `[H, T, D]` are told apart by their sizes,
/// or, where these are equal, by which of the two is nearer.
pub(crate) fn compare(ours: (&[u64], &[f64]), theirs: &Theirs) -> Figures {
    let (shape, data) = ours;
    let straight = || Figures::of(data, theirs.data.iter().copied());
    match (shape, &theirs.shape[..]) {
        (&[t, h, d], &[a, b, c]) if (a, b, c) == (h, t, d) => {
            let (t, h, d) = (t as usize, h as usize, d as usize);
            let at = |i: usize| theirs.data[((i / d % h) * t + i / d / h) * d + i % d];
            let turned = Figures::of(data, (0..data.len()).map(at));
            if t != h {
                return turned;
            }
            let straight = straight();
            if straight.nmse <= turned.nmse { straight } else { turned }
        }
        _ => straight(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn theirs(shape: &[u64], data: &[f64]) -> Theirs {
        Theirs { shape: shape.to_vec(), data: data.to_vec() }
    }

    #[test]
    fn figures_are_what_they_are_called() {
        let found = compare((&[2, 2], &[1.0, 2.0, 3.0, 0.0]), &theirs(&[4], &[1.0, 2.0, 3.0, 1.0]));
        assert_eq!(found.nmse, 1.0 / 15.0);
        assert_eq!((found.max_abs, found.zeros), (1.0, [1, 0]));
        assert!((found.cosine - 14.0 / (14.0f64 * 15.0).sqrt()).abs() < 1e-15);
        let same =
            compare((&[2], &[f64::NEG_INFINITY, 0.0]), &theirs(&[2], &[f64::NEG_INFINITY, 0.0]));
        assert_eq!((same.nmse, same.cosine), (0.0, 1.0));
        for wrong in [f64::NAN, f64::INFINITY] {
            let found = compare((&[2], &[wrong, 1.0]), &theirs(&[2], &[1.0, 1.0]));
            assert_eq!(found.nmse, f64::INFINITY);
        }
    }

    #[test]
    fn heads_may_come_first() {
        let ours = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0];
        // [3, 2, 2] as [2, 3, 2].
        let turned = [0.0, 1.0, 4.0, 5.0, 8.0, 9.0, 2.0, 3.0, 6.0, 7.0, 10.0, 11.0];
        assert_eq!(compare((&[3, 2, 2], &ours), &theirs(&[2, 3, 2], &turned)).nmse, 0.0);
        assert_eq!(compare((&[2, 2, 3], &ours), &theirs(&[2, 2, 3], &ours)).nmse, 0.0);
    }
}
