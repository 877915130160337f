//! What a kernel computed against what it should have: over the whole of a result, and element by element.
//!
//! Let `y` be a result in `f64`, `x` what was found, and `a` the error that the op's tolerance allows
//! ([`allowed`]). Two things must hold:
//!
//! - **As a whole**, `sqrt(sum (x - y)^2 / sum y^2) <= a`: the normalised root-mean-square error. It is
//!   what a tolerance is defined by, and tells a kernel that is a little wrong everywhere. Among a million
//!   elements it does not see one that is wrong by a thousandth.
//! - **Of each element**, `|x_i - y_i| <= 8 a max(|y_i|, s_i)`, where `s_i` is the root mean square of the
//!   row that the element is in. The first operand is what rounding the result costs. The second is the
//!   magnitude of the terms that an element is made of, which cancel: in a product of independent factors
//!   around zero, `y_i` is a sum whose variance is the sum of its squared terms, so the row's mean square
//!   estimates that sum, and the error of summing in floating point grows with its root (Higham and Mary,
//!   A new approach to probabilistic rounding error analysis, 2019). Errors of root mean square `a s` that
//!   are about normally distributed stay below `6.5 a s` in ten billion elements; the rest of the 8 is the
//!   scatter of `s`, estimated from a row.
//!
//! A row is the smallest number of innermost dimensions that hold [`ROW`] elements, so that `s` is known to
//! about a sixth, and yet rows of other magnitudes (the mean of many values against one of few) have their
//! own. Of three dimensions and more it is two at least: elements of one head may share a factor that
//! cancels, as those of a recurrence do, `y = (c . b) x`, and are then small together, while their errors
//! are not.
//!
//! A tolerance of zero asks for equality. What is infinite in `y` must be so in `x`; any other infinity, a
//! NaN on either side, a missing element and no element at all are failures.

use infernum_ir::{DType, Tolerance};

/// Elements of a row at least.
const ROW: usize = 16;

/// Root-mean-square errors that one element may have.
const DEVIATIONS: f64 = 8.0;

/// The error that a tolerance allows.
pub fn allowed(tolerance: Tolerance, dtype: DType) -> f64 {
    let rounded = match dtype {
        DType::Bf16 => tolerance.ulps16 / 256.0,
        DType::F16 => tolerance.ulps16 / 2048.0,
        _ => tolerance.f32,
    };
    // Where nothing before is rounded, codes are the same.
    if rounded > 0.0 { rounded.max(tolerance.code) } else { 0.0 }
}

/// How far results are from what they should be; the worst of all that were added.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Elements that were compared.
    pub elements: u64,
    /// The normalised root-mean-square error of a result.
    pub error: f64,
    /// The largest part of what it may be that an element's error is: above 1, it is wrong.
    pub of_bound: f64,
    /// The element of which that is so.
    pub worst: Option<Element>,
    /// A hash of what was found, in order: equal where all bits are.
    pub bits: u64,
}

/// One element of a result.
#[derive(Clone, Debug, PartialEq)]
pub struct Element {
    /// The result's name.
    pub result: String,
    /// Where it is, row-major.
    pub index: usize,
    /// What was computed.
    pub found: f64,
    /// What should have been.
    pub expected: f64,
}

impl Comparison {
    /// Adds one result of a shape. Fails where there is nothing to compare by: see the module.
    pub fn add(
        &mut self,
        name: &str,
        shape: &[usize],
        (found, expected): (&[f64], &[f64]),
        allowed: f64,
    ) -> Result<(), String> {
        if found.len() != expected.len() {
            let (found, expected) = (found.len(), expected.len());
            return Err(format!("{name}: {found} element(s), expected {expected}"));
        }
        let (mut error, mut norm, mut start) = (0.0, 0.0, 0);
        for row in expected.chunks(row(shape, expected.len())) {
            let square: f64 = row.iter().filter(|y| y.is_finite()).map(|y| y * y).sum();
            let scale = (square / row.len() as f64).sqrt();
            for (index, &y) in (start..).zip(row) {
                let x = found[index];
                self.bits =
                    (self.bits.rotate_left(7) ^ x.to_bits()).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                if y.is_nan() || (x != y && !(x - y).is_finite()) {
                    return Err(format!("{name}: element {index} is {x}, expected {y}"));
                }
                let difference = if x == y { 0.0 } else { (x - y).abs() };
                error += difference * difference;
                self.element(difference, allowed * y.abs().max(scale), || Element {
                    result: name.to_owned(),
                    index,
                    found: x,
                    expected: y,
                });
            }
            norm += square;
            start += row.len();
        }
        if error > 0.0 {
            self.error = self.error.max((error / norm).sqrt());
        }
        self.elements += expected.len() as u64;
        Ok(())
    }

    /// Takes an element's error, of which `allowed` is what is allowed of the mean.
    fn element(&mut self, difference: f64, allowed: f64, which: impl FnOnce() -> Element) {
        // No error is none of nothing, too.
        let of_bound = if difference > 0.0 { difference / (DEVIATIONS * allowed) } else { 0.0 };
        if of_bound > self.of_bound {
            (self.of_bound, self.worst) = (of_bound, Some(which()));
        }
    }

    /// The worst of both; the bits are those of `self`.
    #[must_use]
    pub fn join(self, other: Comparison) -> Comparison {
        let bits = self.bits;
        let (worst, least) =
            if other.of_bound > self.of_bound { (other, self) } else { (self, other) };
        Comparison {
            elements: worst.elements + least.elements,
            error: worst.error.max(least.error),
            bits,
            ..worst
        }
    }

    /// Whether something was compared, and all of it, and each element, is within what is allowed.
    pub fn is_within(&self, allowed: f64) -> bool {
        self.elements > 0 && self.error <= allowed && self.of_bound <= 1.0
    }
}

/// Elements of a row; at least one.
fn row(shape: &[usize], elements: usize) -> usize {
    // The elements of a ragged value are fewer than its shape says.
    let ragged = shape.iter().product::<usize>() != elements;
    let inner = shape.iter().rev().scan(1, |product, size| {
        *product *= size;
        Some(*product)
    });
    let heads = usize::from(shape.len() > 2);
    let enough = inner.skip(heads).filter(|_| !ragged).find(|n| *n >= ROW);
    enough.unwrap_or(elements).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers in -1..1.
    fn numbers(n: usize) -> Vec<f64> {
        (0..n).map(|i| (i as f64 * 0.7).sin()).collect()
    }

    #[test]
    fn a_head_whose_elements_cancel_together_is_measured_with_the_others() {
        assert_eq!(row(&[5, 4, 32], 5 * 4 * 32), 4 * 32);
        assert_eq!(row(&[5, 32], 5 * 32), 32);
        assert_eq!(row(&[2, 5, 4, 32], 2 * 5 * 4 * 32), 4 * 32);
    }

    fn compared(shape: &[usize], found: &[f64], expected: &[f64], allowed: f64) -> Comparison {
        let mut comparison = Comparison::default();
        let added = comparison.add("r", shape, (found, expected), allowed);
        added.unwrap_or_else(|e| panic!("{e}"));
        comparison
    }

    #[test]
    fn one_wrong_element_among_a_million_is_caught() {
        let allowed = allowed(Tolerance::REDUCTION, DType::F32);
        let expected = numbers(1 << 20);
        let mut found = expected.clone();
        found[777_777] += 1e-3;
        let comparison = compared(&[1024, 1024], &found, &expected, allowed);
        assert!(comparison.error <= allowed, "over the whole it does not show: {comparison:?}");
        assert!(!comparison.is_within(allowed), "{comparison:?}");
        assert_eq!(comparison.worst.map(|w| w.index), Some(777_777));
    }

    #[test]
    fn rounding_is_within_the_bound() {
        let allowed = allowed(Tolerance::POINTWISE, DType::Bf16);
        let expected = numbers(1 << 16);
        let found: Vec<f64> = expected.iter().map(|y| half::bf16::from_f64(*y).to_f64()).collect();
        let comparison = compared(&[256, 256], &found, &expected, allowed);
        assert!(comparison.is_within(allowed) && comparison.error > 0.0, "{comparison:?}");
    }

    #[test]
    fn rows_of_small_numbers_have_small_bounds() {
        let expected: Vec<f64> =
            numbers(64).iter().zip(0..).map(|(y, i)| if i < 32 { *y } else { y / 1e3 }).collect();
        let mut found = expected.clone();
        found[40] += 1e-4;
        assert!(!compared(&[2, 32], &found, &expected, 1e-3).is_within(1e-3));
        found.swap(40, 0);
        found[0] = expected[0] + 1e-4;
        found[40] = expected[40];
        assert!(compared(&[2, 32], &found, &expected, 1e-3).is_within(1e-3));
    }

    #[test]
    fn rows_hold_enough_elements() {
        assert_eq!(row(&[7, 6, 5], 210), 30);
        assert_eq!(row(&[7, 64], 448), 64);
        assert_eq!(row(&[7, 1], 7), 7);
        assert_eq!(row(&[6, 7, 19], 500), 500, "ragged");
        assert_eq!(row(&[0, 6], 0), 1);
    }

    #[test]
    fn what_cannot_be_compared_fails() {
        let add = |found: &[f64], expected: &[f64]| {
            Comparison::default().add("r", &[expected.len()], (found, expected), 1.0)
        };
        let inf = f64::INFINITY;
        assert_eq!(add(&[-inf, 1.0], &[-inf, 1.0]), Ok(()), "masked");
        for (found, expected) in
            [([f64::NAN], [1.0]), ([inf], [1.0]), ([inf], [-inf]), ([0.0], [-inf])]
        {
            add(&found, &expected).expect_err("not finite");
        }
        add(&[f64::NAN], &[f64::NAN]).expect_err("no reference");
        add(&[1.0], &[1.0, 2.0]).expect_err("too few");
        assert!(!Comparison::default().is_within(1.0), "nothing was compared");
        assert!(!compared(&[1], &[1.0 + 1e-9], &[1.0], 0.0).is_within(0.0), "exact means equal");
        assert!(compared(&[1], &[1.0], &[1.0], 0.0).is_within(0.0));
    }
}
