//! What sampling can be told: one table. The fields of requests with their checks and their
//! description, the flags of commands, and the defaults of `generation_config.json` all follow it, so
//! a new option is an entry here and its use in the [sampler](crate::Sampler).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

macro_rules! sampling_options {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident: $type:ty = $default:literal, $range:expr $(, file $key:literal)?;
    )+) => {
        /// How a request's tokens are picked. The default is greedy.
        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct SamplingParams {
            $($(#[doc = $doc])+ pub $name: $type,)+
        }

        impl SamplingParams {
            /// The likeliest token, always.
            pub const GREEDY: SamplingParams = SamplingParams { $($name: $default),+ };

            /// All options, in the order of the fields.
            pub const OPTIONS: &[SamplingOption] = &[$(
                SamplingOption {
                    name: stringify!($name),
                    lines: &[$($doc),+],
                    key: concat!("" $(, $key)?),
                    range: $range,
                    whole: <$type as Value>::WHOLE,
                    get: |params| params.$name.number(),
                    set: |params, number| params.$name = Value::of(number),
                },
            )+];
        }
    };
}

sampling_options! {
    /// Logits are divided by it; 0 picks the likeliest token.
    temperature: f32 = 0.0, Range::closed(0.0, 2.0), file "temperature";
    /// Only so many of the likeliest tokens compete; 0 and -1 for all.
    top_k: u32 = 0, Range::closed(-1.0, U32), file "top_k";
    /// Only the smallest set of most likely tokens with at least this probability competes
    /// (Holtzman et al. 2019).
    top_p: f32 = 1.0, Range::above(0.0, 1.0), file "top_p";
    /// Only tokens at least this likely, relative to the likeliest, compete (Nguyen et al. 2024).
    min_p: f32 = 0.0, Range::closed(0.0, 1.0), file "min_p";
    /// Logits of tokens seen in prompt or output are divided by it when positive, multiplied when
    /// negative (Keskar et al. 2019).
    repetition_penalty: f32 = 1.0, Range::closed(0.01, 100.0), file "repetition_penalty";
    /// Subtracted from a token's logit for each time it was generated.
    frequency_penalty: f32 = 0.0, Range::closed(-2.0, 2.0);
    /// Subtracted from a token's logit if it was generated at all.
    presence_penalty: f32 = 0.0, Range::closed(-2.0, 2.0);
    /// No end token and no stop string ends the text before so many tokens were generated.
    min_tokens: u32 = 0, Range::closed(0.0, U32), file "min_new_tokens";
    /// Fixes the random choices.
    seed: u64 = 0, Range::closed(-9_223_372_036_854_775_808.0, 18_446_744_073_709_551_615.0);
}

const U32: f64 = u32::MAX as f64;

/// One of [`SamplingParams::OPTIONS`].
#[derive(Clone, Copy, Debug)]
pub struct SamplingOption {
    /// Its name, in requests and, with `-` for `_`, as a flag.
    pub name: &'static str,
    /// What it may be.
    pub range: Range,
    /// Whether it is a whole number.
    pub whole: bool,
    lines: &'static [&'static str],
    key: &'static str,
    get: fn(&SamplingParams) -> Number,
    set: fn(&mut SamplingParams, Number),
}

impl SamplingOption {
    /// What it does, in a sentence or two.
    pub fn doc(&self) -> String {
        self.lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
    }

    /// The key of `generation_config.json` that gives its default, if one does.
    pub fn generation_key(&self) -> Option<&'static str> {
        Some(self.key).filter(|key| !key.is_empty())
    }

    /// Its value.
    pub fn get(&self, params: &SamplingParams) -> Number {
        (self.get)(params)
    }

    /// Changes it, unless `value` is outside its range.
    pub fn set(&self, params: &mut SamplingParams, value: Number) -> Result<(), SamplingError> {
        self.check(value)?;
        (self.set)(params, value);
        Ok(())
    }

    fn check(&self, found: Number) -> Result<(), SamplingError> {
        let Range { low, high, open } = self.range;
        let holds = if self.whole {
            found.whole().is_some_and(|n| (low as i128..=high as i128).contains(&n))
        } else {
            // As the sampler has it: 0.01 rounds to an f32 below itself.
            let x = f32::of(found);
            (low as f32..=high as f32).contains(&x) && !(open && x <= low as f32)
        };
        let error = SamplingError { name: self.name, whole: self.whole, range: self.range, found };
        if holds { Ok(()) } else { Err(error) }
    }
}

/// Which values an option takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// The lowest.
    pub low: f64,
    /// The highest.
    pub high: f64,
    /// Whether `low` itself is outside.
    pub open: bool,
}

impl Range {
    const fn closed(low: f64, high: f64) -> Range {
        Range { low, high, open: false }
    }

    const fn above(low: f64, high: f64) -> Range {
        Range { low, high, open: true }
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Range { low, high, open } = self;
        if *open {
            write!(f, "above {low} and at most {high}")
        } else {
            write!(f, "{low} to {high}")
        }
    }
}

/// A parameter is outside its range.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("`{name}`: expected {}{range}, found {found}", if *.whole { "a whole number, " } else { "" })]
pub struct SamplingError {
    /// The parameter.
    pub name: &'static str,
    whole: bool,
    range: Range,
    found: Number,
}

/// A number as a request, a flag or a file gives it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// Written as a whole number.
    Whole(i128),
    /// Any other; 2.0 as well.
    Real(f64),
}

impl Number {
    /// A whole number, 2.0 included: JSON has one kind of number.
    fn whole(self) -> Option<i128> {
        match self {
            Number::Whole(n) => Some(n),
            Number::Real(x) => (x.fract() == 0.0).then_some(x as i128),
        }
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Number::Whole(n) => n.fmt(f),
            // Not in full: 1e300 has 300 zeros.
            Number::Real(x) if x.abs() >= 1e15 || (*x != 0.0 && x.abs() < 1e-5) => {
                write!(f, "{x:e}")
            }
            Number::Real(x) => x.fmt(f),
        }
    }
}

impl FromStr for Number {
    type Err = String;

    fn from_str(text: &str) -> Result<Number, String> {
        let whole = text.parse().map(Number::Whole);
        whole
            .or_else(|_| text.parse().map(Number::Real))
            .map_err(|_| "expected a number".to_owned())
    }
}

/// What a field may be.
trait Value: Copy {
    const WHOLE: bool;

    fn number(self) -> Number;

    /// Of a number within the range.
    fn of(number: Number) -> Self;
}

impl Value for f32 {
    const WHOLE: bool = false;

    fn number(self) -> Number {
        Number::Real(f64::from(self))
    }

    fn of(number: Number) -> f32 {
        let x = match number {
            Number::Whole(n) => n as f64,
            Number::Real(x) => x,
        };
        // What is above 0 must not be rounded to it.
        if x > 0.0 { (x as f32).max(f32::MIN_POSITIVE) } else { x as f32 }
    }
}

impl Value for u32 {
    const WHOLE: bool = true;

    fn number(self) -> Number {
        Number::Whole(self.into())
    }

    fn of(number: Number) -> u32 {
        number.whole().unwrap_or(0).clamp(0, u32::MAX.into()) as u32
    }
}

impl Value for u64 {
    const WHOLE: bool = true;

    fn number(self) -> Number {
        Number::Whole(self.into())
    }

    fn of(number: Number) -> u64 {
        number.whole().unwrap_or(0) as u64 // seeds below 0 wrap
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams::GREEDY
    }
}

impl SamplingParams {
    /// An option by its name.
    pub fn option(name: &str) -> Option<&'static SamplingOption> {
        SamplingParams::OPTIONS.iter().find(|option| option.name == name)
    }

    /// Refuses parameters that mean nothing.
    pub fn check(&self) -> Result<(), SamplingError> {
        SamplingParams::OPTIONS.iter().try_for_each(|option| option.check(option.get(self)))
    }

    /// Whether the largest logit wins, as it is: no chance and no penalty.
    pub fn is_greedy(&self) -> bool {
        self.takes_largest() && !self.has_penalties()
    }

    /// Whether there is no chance in it.
    pub(crate) fn takes_largest(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1
    }

    pub(crate) fn has_penalties(&self) -> bool {
        let penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty);
        penalties != (1.0, 0.0, 0.0)
    }

    /// What takes a logit to log2 of a weight: log2(e) over the temperature; 0 if the largest wins.
    pub(crate) fn scale(&self) -> f32 {
        if self.takes_largest() {
            return 0.0;
        }
        // Bounded, so that it times a difference of 0 is 0.
        (std::f32::consts::LOG2_E / self.temperature).min(1e30)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(name: &str, value: &str) -> Result<SamplingParams, String> {
        let mut params = SamplingParams::default();
        let option = SamplingParams::option(name).expect("an option");
        option.set(&mut params, value.parse()?).map_err(|e| e.to_string())?;
        Ok(params)
    }

    #[test]
    fn options_take_what_is_in_their_range_and_name_what_is_not() {
        let fails = |name, value| set(name, value).expect_err(value);
        assert_eq!(fails("temperature", "2.1"), "`temperature`: expected 0 to 2, found 2.1");
        assert_eq!(fails("temperature", "NaN"), "`temperature`: expected 0 to 2, found NaN");
        assert_eq!(fails("top_p", "0"), "`top_p`: expected above 0 and at most 1, found 0");
        assert_eq!(
            fails("top_k", "1.5"),
            "`top_k`: expected a whole number, -1 to 4294967295, found 1.5"
        );
        assert_eq!(
            fails("min_tokens", "1e300"),
            "`min_tokens`: expected a whole number, 0 to 4294967295, found 1e300"
        );
        assert_eq!(fails("seed", "x"), "expected a number");
        assert!(set("repetition_penalty", "0").is_err());
        assert_eq!(set("top_k", "-1").map(|p| p.top_k), Ok(0));
        assert_eq!(set("top_k", "40.0").map(|p| p.top_k), Ok(40));
        assert_eq!(set("repetition_penalty", "0.01").map(|p| p.check()), Ok(Ok(())));
        // Not rounded to nothing.
        assert_eq!(set("top_p", "1e-300").map(|p| p.top_p), Ok(f32::MIN_POSITIVE));
        assert_eq!(set("seed", "18446744073709551615").map(|p| p.seed), Ok(u64::MAX));
        assert_eq!(set("seed", "-1").map(|p| p.seed), Ok(u64::MAX));
        assert!(set("seed", "18446744073709551616000").is_err());
    }

    #[test]
    fn the_table_agrees_with_the_fields() {
        assert_eq!(SamplingParams::default().check(), Ok(()));
        for option in SamplingParams::OPTIONS {
            assert!(
                option.doc().ends_with('.') && !option.doc().contains("  "),
                "{}",
                option.doc()
            );
            let mut params = SamplingParams::default();
            option.set(&mut params, Number::Whole(1)).expect("1 is in every range");
            assert_eq!(option.get(&params).whole(), Some(1));
        }
        let bad = SamplingParams { top_p: 0.0, ..SamplingParams::default() };
        assert_eq!(bad.check().map_err(|e| e.name), Err("top_p"));
    }
}
