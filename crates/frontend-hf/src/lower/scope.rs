//! Names and expressions: config keys, parameters, and places for errors.

use std::collections::HashMap;

use infernum_ir::expr::{Expr, ExprError, Value};
use infernum_ir::{SourceError, nearest};

use super::Request;
use crate::spec::{Arg, Entries, Source, Text};

/// An error at `slice`, a piece of the source's text.
pub(super) fn at(source: &Source, slice: &str, message: impl Into<String>) -> SourceError {
    let start = offset(source, slice);
    SourceError::new(&source.file, &source.text, start..start + slice.len().max(1), message)
}

/// Byte offset of `slice`, which was borrowed from the source's text.
fn offset(source: &Source, slice: &str) -> usize {
    (slice.as_ptr() as usize).wrapping_sub(source.text.as_ptr() as usize).min(source.text.len())
}

/// An error at an argument, or at its key when it is a bare number.
pub(super) fn at_arg(
    source: &Source,
    arg: Arg<'_>,
    key: &str,
    message: impl Into<String>,
) -> SourceError {
    match arg {
        Arg::Text(text) => at(source, text, message),
        _ => at(source, key, message),
    }
}

/// The names an expression may use.
pub(super) struct Scope<'a> {
    request: &'a Request<'a>,
    /// Values for keys that the config leaves out.
    pub(super) defaults: HashMap<String, Value>,
    /// Parameters, later ones hiding earlier ones.
    pub(super) params: Vec<(String, Value)>,
}

impl<'a> Scope<'a> {
    /// A scope with the engine's own names.
    pub(super) fn new(request: &'a Request<'a>) -> Scope<'a> {
        let mut scope = Scope::empty(request);
        scope.params = vec![
            ("dtype".to_owned(), Value::Str(request.dtype.name().to_owned())),
            ("max_length".to_owned(), Value::Num(request.max_length as f64)),
        ];
        scope
    }

    /// A scope without names.
    pub(super) fn empty(request: &'a Request<'a>) -> Scope<'a> {
        Scope { request, defaults: HashMap::new(), params: Vec::new() }
    }

    /// A copy to which more names may be added.
    pub(super) fn child(&self) -> Scope<'a> {
        Scope {
            request: self.request,
            defaults: self.defaults.clone(),
            params: self.params.clone(),
        }
    }

    fn param(&self, name: &str) -> Option<Value> {
        self.params.iter().rev().find(|(n, _)| n == name).map(|(_, v)| v.clone())
    }

    /// A config key; null where neither config nor defaults have it.
    fn config(&self, name: &str) -> Value {
        (self.request.config)(name)
            .or_else(|| self.defaults.get(name).cloned())
            .unwrap_or(Value::Null)
    }

    /// Parses the text of an expression.
    pub(super) fn parse(source: &Source, text: &str) -> Result<Expr, SourceError> {
        text.parse().map_err(|e: ExprError| {
            let start = offset(source, text) + e.at.min(text.len());
            SourceError::new(&source.file, &source.text, start..start + 1, e.message)
        })
    }

    /// Evaluates over parameters; an unknown name is an error.
    pub(super) fn eval(
        &self,
        source: &Source,
        key: &str,
        arg: Arg<'_>,
    ) -> Result<Value, SourceError> {
        let text = match arg {
            Arg::Text(text) => text,
            Arg::Num(n) => return Ok(Value::Num(n)),
            Arg::Bool(b) => return Ok(Value::Bool(b)),
            Arg::Null => return Ok(Value::Null),
        };
        let expr = Scope::parse(source, text)?;
        self.known(source, key, text, &expr, &[])?;
        expr.eval(&|n| self.param(n)).map_err(|e| at(source, text, e.message))
    }

    /// Substitutes parameters for all names but `free`.
    pub(super) fn fold(
        &self,
        source: &Source,
        text: &str,
        free: &[&str],
    ) -> Result<Expr, SourceError> {
        let expr = Scope::parse(source, text)?;
        self.known(source, text, text, &expr, free)?;
        let lookup = |n: &str| if free.contains(&n) { None } else { self.param(n) };
        expr.fold(&lookup).map_err(|e| at(source, text, e.message))
    }

    fn known(
        &self,
        source: &Source,
        _key: &str,
        text: &str,
        expr: &Expr,
        free: &[&str],
    ) -> Result<(), SourceError> {
        let mut unknown = None;
        expr.names(&mut |n| {
            if unknown.is_none() && !free.contains(&n) && self.param(n).is_none() {
                unknown = Some(n.to_owned());
            }
        });
        let Some(name) = unknown else { return Ok(()) };
        let known = self.params.iter().map(|(n, _)| n.as_str()).chain(free.iter().copied());
        // Point at the name itself.
        let start = text.find(&name).unwrap_or(0);
        let slice = &text[start..(start + name.len()).min(text.len())];
        Err(at(source, slice, format!("unknown parameter `{name}`{}", nearest(&name, known))))
    }

    /// Evaluates a parameter's definition: over the parameters before it and config keys.
    pub(super) fn eval_param(
        &self,
        source: &Source,
        key: &str,
        arg: Arg<'_>,
    ) -> Result<Value, SourceError> {
        let Arg::Text(text) = arg else { return self.eval(source, key, arg) };
        let expr = Scope::parse(source, text)?;
        expr.eval(&|n| Some(self.param(n).unwrap_or_else(|| self.config(n)))).map_err(|e| {
            // A null usually comes from a key that the config lacks: say which.
            let mut absent = Vec::new();
            expr.names(&mut |n| {
                if self.param(n).is_none() && self.config(n) == Value::Null {
                    let known = self.request.config_keys.iter().copied();
                    let known = known.chain(self.params.iter().map(|(n, _)| n.as_str()));
                    absent.push(format!("; config.json has no `{n}`{}", nearest(n, known)));
                }
            });
            absent.dedup();
            at(source, text, e.message + &absent.concat())
        })
    }

    /// Evaluates to a whole number that is not negative.
    pub(super) fn eval_int(
        &self,
        source: &Source,
        key: &str,
        arg: Arg<'_>,
    ) -> Result<u64, SourceError> {
        match self.eval(source, key, arg)? {
            // 2^53: beyond it not every integer is a float.
            Value::Num(n) if n >= 0.0 && n.fract() == 0.0 && n <= 9_007_199_254_740_992.0 => {
                Ok(n as u64)
            }
            v => {
                Err(at_arg(source, arg, key, format!("expected a non-negative integer, found {v}")))
            }
        }
    }

    /// Evaluates to true or false.
    pub(super) fn eval_bool(
        &self,
        source: &Source,
        key: &str,
        arg: Arg<'_>,
    ) -> Result<bool, SourceError> {
        match self.eval(source, key, arg)? {
            Value::Bool(b) => Ok(b),
            v => Err(at_arg(source, arg, key, format!("expected true or false, found {v}"))),
        }
    }

    /// An optional condition: true when it is not written.
    pub(super) fn holds(
        &self,
        source: &Source,
        key: &str,
        when: Option<Text<'_>>,
    ) -> Result<bool, SourceError> {
        when.map_or(Ok(true), |w| self.eval_bool(source, key, w.0))
    }

    /// Refuses a config for which one of the checks is false.
    pub(super) fn check(
        &self,
        source: &Source,
        checks: &Entries<'_, Arg<'_>>,
    ) -> Result<(), SourceError> {
        for (message, arg) in checks.iter() {
            if !self.eval_bool(source, message, *arg)? {
                return Err(at_arg(source, *arg, message, format!("not supported: {message}")));
            }
        }
        Ok(())
    }
}
