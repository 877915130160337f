//! Text to [`Recurrence`].

use std::str::FromStr;

use super::{MAX_INPUTS, Named, Recurrence, Statement};
use crate::expr::{Expr, ExprError};

/// Axes of a state, and statements, at most.
const MAX_AXES: usize = 4;
const MAX_STATEMENTS: usize = 32;

impl FromStr for Recurrence {
    type Err = ExprError;

    fn from_str(text: &str) -> Result<Recurrence, ExprError> {
        let mut parser = Parser { text, at: 0, axes: Vec::new() };
        let state = parser.state()?;
        let mut inputs: Vec<Named> = Vec::new();
        while parser.eat(",") {
            let at = parser.here();
            let input = parser.named()?;
            if input.name == state || inputs.iter().any(|i| i.name == input.name) {
                return Err(ExprError::new(at, format!("`{}` is named twice", input.name)));
            }
            inputs.push(input);
        }
        if !(1..=MAX_INPUTS).contains(&inputs.len()) {
            let found = inputs.len();
            let message = format!("expected 1 to {MAX_INPUTS} inputs, found {found}");
            return Err(ExprError::new(parser.at, message));
        }
        parser.want("->")?;
        let result_at = parser.here();
        let result = parser.named()?;
        parser.want(":")?;
        let axes = std::mem::take(&mut parser.axes);
        let mut made = Recurrence { axes, state, inputs, result, body: Vec::new() };
        parser.axes.clone_from(&made.axes);
        while !parser.rest().trim_start().is_empty() {
            if made.body.len() == MAX_STATEMENTS {
                let message = format!("expected at most {MAX_STATEMENTS} statements");
                return Err(ExprError::new(parser.at, message));
            }
            parser.statement(&mut made)?;
        }
        let ends = |name: &str| made.body.iter().rfind(|s| s.to.name == name);
        if ends(&made.state).is_none() {
            let message = format!("no statement makes the next `{}`", made.state);
            return Err(ExprError::new(0, message));
        }
        match ends(&made.result.name) {
            Some(s) if s.to.axes == made.result.axes => Ok(made),
            _ => {
                let message = format!("no statement makes `{}` of these axes", made.result.name);
                Err(ExprError::new(result_at, message))
            }
        }
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    /// Those of the state, once it is read.
    axes: Vec<String>,
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// Where the next word begins.
    fn here(&mut self) -> usize {
        self.at += self.rest().len() - self.rest().trim_start().len();
        self.at
    }

    fn expected(&mut self, what: &str) -> ExprError {
        let at = self.here();
        let found = self.rest().chars().next();
        let found = found.map_or_else(|| "the end".to_owned(), |c| format!("`{c}`"));
        ExprError::new(at, format!("expected {what}, found {found}"))
    }

    fn eat(&mut self, token: &str) -> bool {
        self.here();
        let hit = self.rest().starts_with(token);
        self.at += if hit { token.len() } else { 0 };
        hit
    }

    fn want(&mut self, token: &str) -> Result<(), ExprError> {
        if self.eat(token) { Ok(()) } else { Err(self.expected(&format!("`{token}`"))) }
    }

    fn word(&mut self, what: &str) -> Result<&'a str, ExprError> {
        self.here();
        let rest = self.rest();
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        let word = &rest[..end.unwrap_or(rest.len())];
        // It becomes a name in C, where some are taken.
        if !word.starts_with(|c: char| c.is_ascii_alphabetic()) || word.len() > 32 {
            return Err(self.expected(&format!("{what}, of letters, digits and `_`")));
        }
        self.at += word.len();
        Ok(word)
    }

    /// `[a, b]`, as they are written, with their places.
    fn list(&mut self) -> Result<Vec<(usize, &'a str)>, ExprError> {
        self.want("[")?;
        let mut axes: Vec<(usize, &str)> = Vec::new();
        while !self.eat("]") {
            if !axes.is_empty() {
                self.want(",")?;
            }
            let (at, axis) = (self.here(), self.word("an axis")?);
            if axes.iter().any(|(_, a)| *a == axis) {
                return Err(ExprError::new(at, format!("axis `{axis}` is named twice")));
            }
            if axes.len() == MAX_AXES {
                return Err(ExprError::new(at, format!("expected at most {MAX_AXES} axes")));
            }
            axes.push((at, axis));
        }
        Ok(axes)
    }

    fn state(&mut self) -> Result<String, ExprError> {
        let name = self.word("the state's name")?.to_owned();
        let axes = self.list()?;
        if axes.is_empty() {
            return Err(self.expected("an axis of the state at least"));
        }
        self.axes = axes.into_iter().map(|(_, a)| a.to_owned()).collect();
        Ok(name)
    }

    fn named(&mut self) -> Result<Named, ExprError> {
        let name = self.word("a name")?.to_owned();
        let mut axes = Vec::new();
        for (at, axis) in self.list()? {
            let found = self.axes.iter().position(|a| a == axis);
            axes.push(found.ok_or_else(|| {
                let known = self.axes.join(", ");
                ExprError::new(at, format!("`{axis}` is no axis of the state, which has {known}"))
            })?);
        }
        Ok(Named { name, axes })
    }

    fn statement(&mut self, made: &mut Recurrence) -> Result<(), ExprError> {
        let at = self.here();
        let to = self.named()?;
        let is_input = made.inputs.iter().any(|i| i.name == to.name);
        if is_input || made.body.iter().any(|s| s.to.name == to.name) {
            return Err(ExprError::new(at, format!("`{}` is made twice", to.name)));
        }
        if to.name == made.state && !to.axes.iter().copied().eq(0..made.axes.len()) {
            let message = format!("expected all axes of the state, {}", made.axes.join(", "));
            return Err(ExprError::new(at, message));
        }
        self.want("=")?;
        let start = self.here();
        let end = self.rest().find(';').map_or(self.text.len(), |n| start + n);
        let written = self.text[start..end].trim_end();
        self.at = (end + 1).min(self.text.len());
        let inner = written.strip_prefix("sum").map(str::trim_start);
        let inner = inner.and_then(|s| s.strip_prefix('(')?.strip_suffix(')'));
        let sum = inner.is_some();
        let text = inner.unwrap_or(written);
        let from = start + written.find(text).unwrap_or(0);
        let placed = |e: ExprError| ExprError { at: from + e.at, ..e };
        let value: Expr = text.parse().map_err(placed)?;
        if to.name != made.state {
            let mut early = None;
            value.names(&mut |name| early = (name == to.name).then_some(()).or(early));
            if early.is_some() {
                return Err(ExprError::new(from, format!("`{}` is made of itself", to.name)));
            }
        }
        let of = made.axes_of(&value);
        let beyond: Vec<usize> = of.into_iter().filter(|a| !to.axes.contains(a)).collect();
        match (sum, &beyond[..]) {
            (false, []) | (true, [_]) => {}
            (false, [a, ..]) => {
                let (axis, name) = (&made.axes[*a], &to.name);
                let message = format!("it has axis `{axis}`, which `{name}` lacks: sum over it");
                return Err(ExprError::new(from, message));
            }
            (true, _) => {
                let found = beyond.len();
                let message = format!("expected a sum over one axis, found {found}");
                return Err(ExprError::new(from, message));
            }
        }
        made.body.push(Statement { to, sum, value });
        if made.body.iter().filter(|s| s.sum).any(|s| {
            let axes = made.axes_of(&s.value);
            axes.into_iter().find(|a| !s.to.axes.contains(a)) != made.summed()
        }) {
            return Err(ExprError::new(from, "all sums are over one and the same axis"));
        }
        Ok(())
    }
}
