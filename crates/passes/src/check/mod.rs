//! Checks rules by trying them.
//!
//! A trial plants a rule's left side: random sizes for the dimensions of `vars`, random attributes,
//! random operands of several magnitudes. Both sides must then have the same types and, in `f64`,
//! the same values. Conditions under `requires` choose the trials, and each must be needed: where
//! it does not hold, the rule must fail somewhere.

mod cache;
mod call;
mod sample;
mod side;
#[cfg(test)]
mod tests;

use std::fmt;

use infernum_ir::Loc;
use serde::Serialize;

use crate::data::{Kernels, Numerics, Rule};
use sample::{Rng, Trial};
use side::Failure;

pub use cache::Cache;
pub use call::{CallModule, calls};

/// Largest difference allowed, in units of the value's norm.
pub const TOLERANCE: f64 = 1e-10;

/// The same of a rule that rounds to fewer bits: large enough for sums whose terms nearly cancel, and too small for
/// another formula.
pub const LOSSY: f64 = 0.25;

/// What checking one rule has shown.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    /// The rule.
    pub rule: String,
    /// Its place, as `file:line:col`.
    pub place: String,
    /// Trials in which the left side was well typed and `requires` held.
    pub planted: usize,
    /// What they showed.
    pub outcome: Outcome,
    /// Doubts that are no failures: a condition that is not needed, too few trials,
    /// `exact` where it is not.
    pub warnings: Vec<String>,
    /// Whether it was reached before, and only looked up.
    pub cached: bool,
}

/// What the trials of a rule showed.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Both sides agreed every time.
    Ok,
    /// The sides are the same calls once fused ops are written out: the rule says what an op means,
    /// which is true whatever it says. What remains is to hold each kernel against that meaning.
    Definition,
    /// Both sides have values, and they differ.
    Wrong(Box<Counterexample>),
    /// The right side has no type, or another, or could not be computed where the left could.
    Untypable(Box<Counterexample>),
    /// No trial could be planted; why the last attempts failed.
    Unplanted(String),
}

/// The trial in which a rule failed that shows most: a difference that can be seen in the digits before
/// one that cannot, then the fewest elements, then the largest difference.
#[derive(Clone, Debug, Serialize)]
pub struct Counterexample {
    /// What differed.
    pub message: String,
    /// The difference in units of the value's norm.
    pub error: Option<f64>,
    /// The element that differs most.
    pub at: Option<Element>,
    /// What both sides were computed from, where they could be.
    pub operands: Vec<Operand>,
    /// Type of each variable; `left out` for an operand that is not there.
    pub values: Vec<(String, String)>,
    /// Each attribute.
    pub attrs: Vec<(String, String)>,
    /// The step: (tokens, context rows) of each sequence.
    pub step: Vec<(usize, usize)>,
    /// Elements of all operands, by which it is the smallest.
    pub elements: usize,
}

/// An element of a value that the sides disagree on.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Element {
    /// Its place in row-major order.
    pub index: usize,
    /// What the left side has there.
    pub left: f64,
    /// What the right side has there.
    pub right: f64,
}

/// The values of a variable, as many as are shown.
#[derive(Clone, Debug, Serialize)]
pub struct Operand {
    /// The variable.
    pub name: String,
    /// How many elements it has.
    pub elements: usize,
    /// The first of them, in row-major order.
    pub first: Vec<f64>,
}

impl Counterexample {
    /// A difference from which on it is clear to who reads the numbers, in units of the norm.
    const CLEAR: f64 = 0.01;

    fn shows_more_than(&self, other: &Counterexample) -> bool {
        // One that is no number is as clear as any.
        let error = |c: &Counterexample| {
            c.error.map_or(0.0, |e| if e.is_nan() { f64::INFINITY } else { e })
        };
        let (mine, others) = (error(self), error(other));
        let clear = |e: f64| e >= Counterexample::CLEAR;
        if clear(mine) != clear(others) {
            return clear(mine);
        }
        (self.elements, others) < (other.elements, mine)
    }
}

impl Verdict {
    /// Whether the rule may be used.
    pub fn passed(&self) -> bool {
        matches!(self.outcome, Outcome::Ok | Outcome::Definition)
    }
}

/// Tries every rule `trials` times; the same `seed` gives the same verdicts.
pub fn check(kernels: &Kernels, seed: u64, trials: usize) -> Vec<Verdict> {
    kernels.rules.iter().map(|rule| check_rule(rule, seed, trials)).collect()
}

/// Tries one rule.
pub fn check_rule(rule: &Rule, seed: u64, trials: usize) -> Verdict {
    // Each rule has numbers of its own, so that adding one leaves the others' trials as they were.
    let name =
        rule.name.bytes().fold(seed, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    let mut rng = Rng::new(name);
    let mut tally = Tally::default();
    for _ in 0..trials.saturating_mul(ATTEMPTS) {
        if tally.planted >= trials {
            break;
        }
        tally.attempt(rule, &mut rng);
    }
    let mut warnings = Vec::new();
    if tally.planted < trials && tally.planted > 0 {
        let message = format!("only {} of {trials} trials could be planted", tally.planted);
        warnings.push(message);
    }
    if rule.numerics == Numerics::Exact && tally.error > 0.0 {
        let message = "the rule says `exact`, but values differ in their last digits: `reassoc`?";
        warnings.push(message.to_owned());
    }
    if tally.failure.is_none() && tally.planted > 0 {
        let needless = (0..rule.requires.len()).filter_map(|i| needless(rule, i, &mut rng, trials));
        warnings.extend(needless);
    }
    Verdict {
        rule: rule.name.clone(),
        place: place(&rule.loc),
        planted: tally.planted,
        outcome: tally.outcome(),
        warnings,
        cached: false,
    }
}

/// Attempts made for each trial wanted: most fail on a shape or a condition.
const ATTEMPTS: usize = 200;

#[derive(Default)]
struct Tally {
    planted: usize,
    /// Trials in which the sides were not the same calls.
    distinct: usize,
    /// The largest difference where the sides agree.
    error: f64,
    failure: Option<(bool, Counterexample)>,
    refused: Option<String>,
}

impl Tally {
    fn attempt(&mut self, rule: &Rule, rng: &mut Rng) {
        let planted = Trial::sample(rule, rng).and_then(|trial| {
            let planted = side::plant(rule, &trial)?;
            match rule.requires.iter().position(|(_, e)| !planted.holds(e)) {
                Some(i) => Err(format!("`{}` does not hold", rule.requires[i].0)),
                None => Ok((trial, planted)),
            }
        });
        let (trial, planted) = match planted {
            Ok(found) => found,
            Err(e) => {
                self.refused = Some(e);
                return;
            }
        };
        match planted.compare(rule, &trial, rng) {
            Ok(found) => {
                self.planted += 1;
                self.distinct += usize::from(!found.same_calls);
                self.error = self.error.max(found.error);
            }
            // Operands that the left side cannot take are no trial.
            Err(Failure::Left(e)) => self.refused = Some(e),
            Err(Failure::Untypable(message)) => {
                self.planted += 1;
                self.keep(false, trial.counterexample(rule, message, None));
            }
            Err(Failure::Differs(message, difference)) => {
                self.planted += 1;
                self.keep(true, trial.counterexample(rule, message, Some(difference)));
            }
        }
    }

    /// Keeps the failure that shows most; a difference says more than a missing type.
    fn keep(&mut self, wrong: bool, found: Counterexample) {
        let better = match &self.failure {
            None => true,
            Some((w, kept)) => (wrong && !w) || (wrong == *w && found.shows_more_than(kept)),
        };
        if better {
            self.failure = Some((wrong, found));
        }
    }

    fn outcome(self) -> Outcome {
        match self.failure {
            Some((true, found)) => Outcome::Wrong(Box::new(found)),
            Some((false, found)) => Outcome::Untypable(Box::new(found)),
            None if self.planted == 0 => Outcome::Unplanted(self.refused.unwrap_or_default()),
            None if self.distinct == 0 => Outcome::Definition,
            None => Outcome::Ok,
        }
    }
}

/// Whether the rule holds where condition `i` does not: then the condition is not needed, says the
/// warning.
fn needless(rule: &Rule, i: usize, rng: &mut Rng, trials: usize) -> Option<String> {
    let text = &rule.requires[i].0;
    let mut tried = 0;
    for _ in 0..trials.saturating_mul(ATTEMPTS) {
        if tried >= trials {
            break;
        }
        let Ok(trial) = Trial::sample(rule, rng) else { continue };
        let Ok(planted) = side::plant(rule, &trial) else { continue };
        let wanted = |(j, (_, e)): (usize, &(String, _))| planted.holds(e) == (i != j);
        if !rule.requires.iter().enumerate().all(wanted) {
            continue;
        }
        match planted.compare(rule, &trial, rng) {
            Ok(_) => tried += 1,
            Err(Failure::Left(_)) => {}
            Err(_) => return None,
        }
    }
    Some(match tried {
        0 => format!("`{text}` was never false while the other conditions held"),
        _ => format!("`{text}` is not needed: the rule held in {tried} trials without it"),
    })
}

fn place(loc: &Loc) -> String {
    format!("{}:{}:{}", loc.file, loc.line, loc.col)
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Verdict { rule, place, planted, .. } = self;
        match &self.outcome {
            Outcome::Ok => write!(f, "{rule}: ok, {planted} trials")?,
            Outcome::Definition => write!(f, "{rule}: definition, {planted} trials")?,
            Outcome::Wrong(c) => write!(f, "{place}: {rule}: wrong: {c}")?,
            Outcome::Untypable(c) => write!(f, "{place}: {rule}: right side: {c}")?,
            Outcome::Unplanted(why) => {
                write!(f, "{place}: {rule}: no left side could be made: {why}")?;
            }
        }
        self.warnings.iter().try_for_each(|w| write!(f, "\n  warning: {w}"))
    }
}

impl fmt::Display for Counterexample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.message)?;
        if let Some(error) = self.error {
            write!(f, " by {error:.1e} of its norm")?;
        }
        if let Some(Element { index, left, right }) = self.at {
            let (left, right) = (Short(left), Short(right));
            write!(f, "\n  element {index} is {left} on the left, {right} on the right")?;
        }
        for (name, value) in self.values.iter().chain(&self.attrs) {
            write!(f, "\n  {name} = {value}")?;
            if let Some(operand) = self.operands.iter().find(|o| o.name == *name) {
                let shown: Vec<String> =
                    operand.first.iter().map(|v| Short(*v).to_string()).collect();
                let more = if operand.elements > shown.len() { ", .." } else { "" };
                write!(f, ": {}{more}", shown.join(", "))?;
            }
        }
        let seqs = self.step.iter().map(|(new, context)| format!("{new} of {context}"));
        write!(f, "\n  step: {}", seqs.collect::<Vec<_>>().join(", "))
    }
}

/// A number in a few digits.
struct Short(f64);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Short(v) = *self;
        if v == 0.0 || !v.is_finite() || v.fract() == 0.0 && v.abs() < 1e6 {
            write!(f, "{v}")
        } else if (1e-2..1e4).contains(&v.abs()) {
            write!(f, "{v:.4}")
        } else {
            write!(f, "{v:.3e}")
        }
    }
}
