//! The sizes that calls are tried at.

use std::fmt;

use super::cases::Case;

/// `[H, G, D, E]`.
pub(super) const HEADS: [[usize; 4]; 4] =
    [[6, 3, 6, 5], [4, 4, 14, 14], [5, 1, 2, 3], [8, 2, 64, 64]];

/// The sizes of a case: see the prelude of [`super::cases`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Sizes {
    pub(super) heads: [usize; 4],
    /// `N` and `K`.
    pub(super) channels: [usize; 2],
}

impl Sizes {
    /// Of `[H, G, D, E]`: as many channels as the queries and the keys have.
    pub(super) const fn heads(heads: [usize; 4]) -> Sizes {
        let [h, g, d, _] = heads;
        Sizes { heads, channels: [h * d, g * d] }
    }

    /// Rows of `n` elements.
    pub(super) const fn rows(n: usize) -> Sizes {
        Sizes { heads: [6, 3, 6, 5], channels: [n, 18] }
    }

    /// A product from `inputs` channels to those of queries, keys and values of `H`, `G` heads of `D`.
    pub(super) fn product(case: &Case, inputs: usize, [h, g, d]: [usize; 3]) -> Sizes {
        let outputs = (h + 2 * g) * d;
        let call = case.call();
        let channels = if call.contains("%wr,") {
            [inputs, outputs]
        } else if call.contains("%w2,") {
            [outputs / 2, inputs]
        } else {
            [outputs, inputs]
        };
        Sizes { heads: [h, g, d, d], channels }
    }

    pub(super) fn fill(self, text: &str, packed: usize) -> String {
        let ([h, g, d, e], [n, k]) = (self.heads, self.channels);
        let p = (h * d + g * d + g * e).next_multiple_of(packed);
        let values = [
            ("$N2", 2 * n),
            ("$N3", 3 * n),
            ("$K3", 3 * k),
            ("$NK", n + k),
            ("$N64", n / 64),
            ("$K64", (k / 64).max(1)),
            ("$HG", h + g),
            ("$HE", h * e),
            ("$N", n),
            ("$K", k),
            ("$M", h * d),
            ("$V", g * e),
            ("$P", p),
            ("$F", p / 2),
            ("$R", d / 2),
            ("$H", h),
            ("$G", g),
            ("$D", d),
            ("$E", e),
        ];
        values.iter().fold(text.to_owned(), |t, (name, n)| t.replace(name, &n.to_string()))
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "H, G, D, E = {:?}", self.heads)?;
        if *self == Sizes::heads(self.heads) {
            Ok(())
        } else {
            write!(f, ", N, K = {:?}", self.channels)
        }
    }
}
