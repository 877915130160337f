//! The kinds of steps that are compiled by themselves.

use std::fmt;
use std::str::FromStr;

use infernum_ir::Dims;
use infernum_ir::expr::Value;
use serde::{Deserialize, Serialize};

/// A kind of steps: those of a number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Bucket {
    /// The fewest tokens; at least 1.
    pub min: u64,
    /// The most.
    pub max: u64,
    /// Only steps in which every sequence has one new token.
    pub decode: bool,
}

impl Bucket {
    /// Every step.
    pub const ALL: Bucket = Bucket { min: 1, max: u64::MAX, decode: false };

    /// Whether a step of `tokens` is one of these; `decode` where every sequence has one token.
    pub fn holds(&self, tokens: u64, decode: bool) -> bool {
        (self.min..=self.max).contains(&tokens) && (decode || !self.decode)
    }

    /// Its interval, as conditions see it: `tokens.min` and `tokens.max`.
    pub(crate) fn tokens(&self) -> Value {
        let bounds = [("min", self.min), ("max", self.max)];
        Value::Map(bounds.map(|(name, n)| (name.to_owned(), Value::Num(n as f64))).into())
    }

    /// Orders the buckets that hold a step: less is more specific.
    pub fn width(&self) -> (bool, u64) {
        (!self.decode, self.max.saturating_sub(self.min))
    }

    /// The step that stands for the bucket: the geometric mean of its token counts, `context` rows a
    /// sequence. A step that is not decode-only is taken to be one sequence.
    pub fn dims(&self, context: u64) -> Dims {
        let t = ((self.min.max(1) as f64) * (self.max.max(1) as f64)).sqrt().round() as u64;
        let (b, rows) = if self.decode { (t, context.max(1)) } else { (1, context.max(t)) };
        Dims { t, b, s: b.saturating_mul(rows), pairs: t.saturating_mul(rows), seqs: b }
    }
}

impl fmt::Display for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.decode { " (decode)" } else { "" };
        match *self {
            Bucket { min: 1, max: u64::MAX, .. } => write!(f, "any T{kind}"),
            Bucket { min, max: u64::MAX, .. } => write!(f, "T >= {min}{kind}"),
            Bucket { min, max, .. } if min == max => write!(f, "T = {min}{kind}"),
            Bucket { min, max, .. } => write!(f, "T = {min}..{max}{kind}"),
        }
    }
}

/// A text is no bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected steps such as `T = 1`, `T = 17..64`, `T >= 129` or `any T`, with ` (decode)` or without"
)]
pub struct BucketError;

/// Reads what is displayed.
impl FromStr for Bucket {
    type Err = BucketError;

    fn from_str(text: &str) -> Result<Bucket, BucketError> {
        let (tokens, decode) = match text.strip_suffix(" (decode)") {
            Some(tokens) => (tokens, true),
            None => (text, false),
        };
        let number = |n: &str| n.parse::<u64>().map_err(|_| BucketError);
        let (min, max) = if tokens == "any T" {
            (1, u64::MAX)
        } else if let Some(min) = tokens.strip_prefix("T >= ") {
            (number(min)?, u64::MAX)
        } else {
            let tokens = tokens.strip_prefix("T = ").ok_or(BucketError)?;
            let (min, max) = tokens.split_once("..").unwrap_or((tokens, tokens));
            (number(min)?, number(max)?)
        };
        if min == 0 || min > max { Err(BucketError) } else { Ok(Bucket { min, max, decode }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_displayed_is_read() {
        for (min, max) in [(1, 1), (1, u64::MAX), (17, 64), (129, u64::MAX), (9, 9)] {
            for decode in [false, true] {
                let bucket = Bucket { min, max, decode };
                assert_eq!(bucket.to_string().parse(), Ok(bucket), "{bucket}");
            }
        }
        for wrong in
            ["", "T", "T = ", "T = 0", "T = 9..8", "T = 1..2..3", "T >= x", "any T (prompt)"]
        {
            assert_eq!(wrong.parse::<Bucket>(), Err(BucketError), "{wrong}");
        }
    }
}
