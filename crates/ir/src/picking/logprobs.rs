//! Log-probabilities of tokens.

use serde::{Deserialize, Serialize};

use super::sane;

/// How likely a token was, and which were the likeliest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Logprobs {
    /// The token.
    pub token: u32,
    /// Its natural log-probability.
    pub logprob: f32,
    /// How many tokens are likelier, and 1.
    pub rank: u32,
    /// The likeliest tokens, the likeliest first; of equals, the lower first.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    /// Of `token`, and of the `top` likeliest, under the softmax of a row of logits; NaN counts as
    /// never, and what is infinite as the largest number. A token outside the row is one that never comes.
    pub fn new(logits: &[f32], token: u32, top: usize) -> Logprobs {
        let max = sane(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        // Single precision is enough for each of so many, and takes 0.6 of the time; for their sum it is not.
        let weight = |l: &f32| if l.is_nan() { 0.0 } else { f64::from((sane(*l) - max).exp()) };
        let log_sum = logits.iter().map(weight).sum::<f64>().ln() + f64::from(max);
        let logprob = |l: f32| {
            let value = (f64::from(sane(l)) - log_sum) as f32;
            if value.is_nan() { f32::NEG_INFINITY } else { value }
        };
        let mut best: Vec<(u32, f32)> = Vec::with_capacity(top + 1);
        for (token, &logit) in (0u32..).zip(logits) {
            if top == 0 || logit.is_nan() {
                continue;
            }
            if best.len() == top && best.last().is_some_and(|(_, worst)| *worst >= logit) {
                continue;
            }
            let at = best.partition_point(|(_, l)| *l >= logit);
            best.insert(at, (token, logit));
            best.truncate(top);
        }
        best.iter_mut().for_each(|(_, l)| *l = logprob(*l));
        let own = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let rank = 1 + logits.iter().filter(|l| **l > own).count() as u32;
        Logprobs { token, logprob: logprob(own), rank, top: best }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_the_softmaxs_and_sorted() {
        let logits = [1.0, f32::NAN, 3.0, 3.0, -2.0];
        let found = Logprobs::new(&logits, 0, 3);
        let sum: f64 = [1.0f64, 3.0, 3.0, -2.0].iter().map(|l| l.exp()).sum();
        let expected = |l: f64| (l - sum.ln()) as f32;
        assert_eq!(found.logprob, expected(1.0));
        assert_eq!(found.top, [(2, expected(3.0)), (3, expected(3.0)), (0, expected(1.0))]);
        assert_eq!(found.rank, 3);
        assert_eq!(Logprobs::new(&logits, 1, 0).logprob, f32::NEG_INFINITY);
        assert_eq!(Logprobs::new(&logits, 99, 0).logprob, f32::NEG_INFINITY);
        assert_eq!(Logprobs::new(&logits, 0, 9).top.len(), 4);
        let infinite = Logprobs::new(&[f32::INFINITY, 0.0], 0, 2);
        assert_eq!(infinite.top, [(0, 0.0), (1, f32::MIN)]);
    }
}
