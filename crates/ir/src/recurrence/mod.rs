//! Recurrences: what one token does to the state of its sequence, as text.
//!
//! ```text
//! recurrence := state (',' input)* '->' result ':' statement (';' statement)* ';'?
//! state, input, result := name '[' axis,* ']'
//! statement := name '[' axis,* ']' '=' (expr | 'sum' '(' expr ')')
//! ```
//!
//! Gated delta rule (Yang, Kautz and Hatamizadeh 2024), say:
//!
//! ```text
//! s[h, k, v], q[h, k], key[h, k], value[h, v], decay[h], beta[h] -> out[h, v]:
//! kept[h, k, v] = s * exp(decay);
//! seen[h, v] = sum(kept * key);
//! delta[h, v] = (value - seen) * beta;
//! s[h, k, v] = kept + key * delta;
//! out[h, v] = sum(s * q)
//! ```
//!
//! Expressions are those of [`expr`](crate::expr), over the state, the inputs and what statements before have
//! made; each name is spread over the axes that it lacks. A `sum` adds over the axes that its statement lacks. All axes are the
//! state's. One that no statement sums over is *independent*: the state falls into parts along it that know nothing
//! of each other, which is what kernels share among threads.

mod parse;
mod pattern;
mod program;

use std::fmt;

use crate::expr::{Expr, ExprError, Value};

pub use program::{InputShape, Loop, Program, Stride, Term};

/// What one token does to the state of its sequence.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Recurrence {
    /// The state's axes by name, the outermost first.
    axes: Vec<String>,
    /// What the state is called.
    state: String,
    inputs: Vec<Named>,
    result: Named,
    body: Vec<Statement>,
}

/// A name and its axes, as places among the state's.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Named {
    /// The name.
    pub name: String,
    /// Its axes, the outermost first.
    pub axes: Vec<usize>,
}

/// `to = value`, or `to = sum(value)`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Statement {
    /// What is made.
    pub to: Named,
    /// Whether values are added up.
    pub sum: bool,
    /// What it is made of.
    pub value: Expr,
}

/// Inputs of a recurrence at most.
pub const MAX_INPUTS: usize = 9;

impl Recurrence {
    /// The state's axes by name, the outermost first.
    pub fn axes(&self) -> &[String] {
        &self.axes
    }

    /// What a token brings, in the order of operands.
    pub fn inputs(&self) -> &[Named] {
        &self.inputs
    }

    /// What a token yields.
    pub fn result(&self) -> &Named {
        &self.result
    }

    /// What is computed for a token, in order.
    pub fn body(&self) -> &[Statement] {
        &self.body
    }

    /// The axis that is summed over, if one is.
    pub fn summed(&self) -> Option<usize> {
        self.body.iter().filter(|s| s.sum).find_map(|s| {
            let axes = self.axes_of(&s.value);
            axes.into_iter().find(|a| !s.to.axes.contains(a))
        })
    }

    /// Names of no value: parameters, which must become numbers before it can be typed.
    pub fn free(&self) -> Vec<&str> {
        let mut free = Vec::new();
        for statement in &self.body {
            statement.value.names(&mut |name| {
                if self.named(name).is_none() && !free.contains(&name) {
                    free.push(name);
                }
            });
        }
        free
    }

    /// Replaces each name for which `lookup` has a value, and computes what can be.
    pub fn fold(&self, lookup: &dyn Fn(&str) -> Option<Value>) -> Result<Recurrence, ExprError> {
        let mut folded = self.clone();
        for statement in &mut folded.body {
            statement.value = statement.value.fold(&|name| match self.named(name) {
                Some(_) => None,
                None => lookup(name),
            })?;
        }
        Ok(folded)
    }

    /// The axes of what has this name.
    fn named(&self, name: &str) -> Option<Vec<usize>> {
        if name == self.state {
            return Some((0..self.axes.len()).collect());
        }
        let made = self.body.iter().map(|s| &s.to);
        self.inputs.iter().chain(made).find(|n| n.name == name).map(|n| n.axes.clone())
    }

    /// The axes of what an expression names, in the order of the state's.
    fn axes_of(&self, value: &Expr) -> Vec<usize> {
        let mut axes = Vec::new();
        value.names(&mut |name| axes.extend(self.named(name).unwrap_or_default()));
        axes.sort_unstable();
        axes.dedup();
        axes
    }
}

impl fmt::Display for Recurrence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes = |axes: &[usize]| {
            axes.iter().map(|a| self.axes[*a].as_str()).collect::<Vec<_>>().join(", ")
        };
        write!(f, "{}[{}]", self.state, self.axes.join(", "))?;
        for input in &self.inputs {
            write!(f, ", {}[{}]", input.name, axes(&input.axes))?;
        }
        write!(f, " -> {}[{}]:", self.result.name, axes(&self.result.axes))?;
        for (i, Statement { to, sum, value }) in self.body.iter().enumerate() {
            let end = if i + 1 < self.body.len() { ";" } else { "" };
            let value = if *sum { format!("sum({value})") } else { value.to_string() };
            write!(f, " {}[{}] = {value}{end}", to.name, axes(&to.axes))?;
        }
        Ok(())
    }
}

impl serde::Serialize for Recurrence {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Recurrence {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Recurrence, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(from)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}
