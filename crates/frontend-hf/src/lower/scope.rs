//! Names and expressions: config keys, parameters, and places for errors.

use std::cell::Cell;

use infernum_ir::expr::{Expr, ExprError, Value};
use infernum_ir::{Loc, SourceError, nearest};

use super::Request;
use crate::spec::{Arg, Entries, Source};

/// What a spec may make us hold, in bytes: so much, and so much more for each byte of its text.
/// Blocks that call blocks multiply, and an expression repeats the values it names.
const BUDGET: (usize, usize) = (4 << 20, 16);
/// Bytes of values that one expression may pull in.
const MAX_OPERANDS: usize = 64 << 10;

type Result<T> = std::result::Result<T, SourceError>;

/// What every step of lowering shares.
pub(super) struct Context<'a> {
    pub(super) request: &'a Request<'a>,
    /// The texts that everything parsed borrows from; the family's own comes first.
    sources: Vec<&'a Source>,
    /// Values for keys that the config leaves out.
    pub(super) defaults: Vec<(&'a str, Value)>,
    /// The family's parameters.
    pub(super) params: Vec<&'a str>,
    /// Bytes that may still be spent.
    budget: Cell<usize>,
}

impl<'a> Context<'a> {
    pub(super) fn new(request: &'a Request<'a>, sources: Vec<&'a Source>) -> Context<'a> {
        let text: usize = sources.iter().map(|s| s.text.len()).sum();
        let budget = Cell::new(BUDGET.0 + BUDGET.1 * text);
        Context { request, sources, defaults: Vec::new(), params: Vec::new(), budget }
    }

    /// The source that `slice` is a piece of, and its offset there.
    pub(super) fn place(&self, slice: &str) -> Option<(&'a Source, usize)> {
        self.sources.iter().find_map(|source| source.find(slice).map(|at| (*source, at)))
    }

    /// An error at `slice`, a piece of one of the sources.
    pub(super) fn at(&self, slice: &str, message: impl Into<String>) -> SourceError {
        match self.place(slice) {
            Some((s, at)) => {
                SourceError::new(&s.file, &s.text, at..at + slice.len().max(1), message)
            }
            None => SourceError::new("", "", 0..0, message),
        }
    }

    /// An error at an argument, or at its key when it is no text.
    pub(super) fn at_arg(
        &self,
        arg: Arg<'_>,
        key: &str,
        message: impl Into<String>,
    ) -> SourceError {
        match arg {
            Arg::Text(text) => self.at(text, message),
            _ => self.at(key, message),
        }
    }

    /// An error at a call by its line and column; `None` where its file is none of the sources.
    pub(super) fn at_loc(&self, loc: &Loc, message: String) -> Option<SourceError> {
        let source = self.sources.iter().find(|s| *s.file == *loc.file)?;
        let start = SourceError::offset(&source.text, loc.line as usize, loc.col as usize);
        let rest = &source.text[start..];
        let letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let len = rest.find(|c| !letter(c)).unwrap_or(rest.len());
        Some(SourceError::new(&source.file, &source.text, start..start + len.max(1), message))
    }

    /// Counts `bytes` that are about to be held; `place` is what asks for them.
    pub(super) fn spend(&self, place: &str, bytes: usize) -> Result<()> {
        let left = self.budget.get().checked_sub(bytes).ok_or_else(|| {
            self.at(
                place,
                "this spec unfolds to far more than its text can mean: \
                 do blocks call blocks, or do expressions repeat long values?",
            )
        })?;
        self.budget.set(left);
        Ok(())
    }

    /// A config key; null where neither config nor defaults have it.
    fn config(&self, name: &str) -> Value {
        let default = || self.defaults.iter().find(|(n, _)| *n == name).map(|(_, v)| v.clone());
        (self.request.config)(name).or_else(default).unwrap_or(Value::Null)
    }

    /// Whether config.json has a key, or the family a default for it.
    fn is_config_key(&self, name: &str) -> bool {
        self.request.config_keys.contains(&name) || self.defaults.iter().any(|(n, _)| *n == name)
    }

    fn parse(&self, text: &str) -> Result<Expr> {
        text.parse().map_err(|e: ExprError| {
            let rest = text.get(e.at..).unwrap_or_default();
            let token = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            let first = rest.chars().next().map_or(0, char::len_utf8);
            self.at(&rest[..token.max(first)], e.message)
        })
    }
}

/// A parameter.
struct Param<'a> {
    name: &'a str,
    value: Value,
    /// Its definition, to trace an error to the config.
    from: Option<&'a str>,
}

/// The names an expression may use: parameters, later ones hiding earlier ones and those of the
/// scope around it.
pub(super) struct Scope<'a> {
    pub(super) cx: &'a Context<'a>,
    outer: Option<&'a Scope<'a>>,
    params: Vec<Param<'a>>,
}

impl<'a> Scope<'a> {
    /// A scope without names.
    pub(super) fn empty(cx: &'a Context<'a>) -> Scope<'a> {
        Scope { cx, outer: None, params: Vec::new() }
    }

    /// A scope with the engine's own names.
    pub(super) fn engine(cx: &'a Context<'a>) -> Scope<'a> {
        let mut scope = Scope::empty(cx);
        scope.set("dtype", Value::Str(cx.request.dtype.name().to_owned()));
        scope.set("max_length", Value::Num(cx.request.max_length as f64));
        scope
    }

    /// A scope inside this one, to which names may be added.
    pub(super) fn child(&self) -> Scope<'_> {
        Scope { cx: self.cx, outer: Some(self), params: Vec::new() }
    }

    /// Adds a name of the engine's own.
    pub(super) fn set(&mut self, name: &'a str, value: Value) {
        self.params.push(Param { name, value, from: None });
    }

    /// Adds a parameter by its definition.
    pub(super) fn define(&mut self, name: &'a str, arg: Arg<'a>) -> Result<()> {
        let value = self.eval_param(arg)?;
        let from = if let Arg::Text(text) = arg { Some(text) } else { None };
        self.push(Param { name, value, from })
    }

    /// Adds a parameter whose value a caller gives.
    pub(super) fn give(&mut self, name: &'a str, value: Value) -> Result<()> {
        self.push(Param { name, value, from: None })
    }

    /// The values of parameters in one layer: each over `layer`, its number, and those before it. Who keeps
    /// them counts them.
    pub(super) fn layer_values(
        &self,
        params: &Entries<'a, Arg<'a>>,
        layer: u32,
    ) -> Result<Vec<Value>> {
        let mut inner = self.child();
        inner.set("layer", Value::Num(f64::from(layer)));
        for (name, arg) in params.iter() {
            let value = inner.eval_param(*arg)?;
            inner.set(name, value);
        }
        Ok(inner.params.into_iter().skip(1).map(|p| p.value).collect())
    }

    fn push(&mut self, param: Param<'a>) -> Result<()> {
        self.cx.spend(param.name, 64 + weight(&param.value))?;
        self.params.push(param);
        Ok(())
    }

    /// The value of a parameter.
    pub(super) fn param(&self, name: &str) -> Option<&Value> {
        let own = self.params.iter().rev().find(|p| p.name == name).map(|p| &p.value);
        own.or_else(|| self.outer?.param(name))
    }

    /// The names of all parameters.
    pub(super) fn names(&self) -> Vec<&str> {
        let outer = self.outer.map(Scope::names).unwrap_or_default();
        self.params.iter().map(|p| p.name).chain(outer).collect()
    }

    /// Evaluates over parameters; an unknown name is an error.
    pub(super) fn eval(&self, arg: Arg<'_>) -> Result<Value> {
        let text = match arg {
            Arg::Text(text) => text,
            Arg::Num(n) => return Ok(Value::Num(n)),
            Arg::Bool(b) => return Ok(Value::Bool(b)),
            Arg::Null => return Ok(Value::Null),
        };
        let expr = self.known(text, &[])?;
        expr.eval(&|n| self.param(n).cloned())
            .map_err(|e| self.cx.at(text, self.explained(&expr, e.message)))
    }

    /// Substitutes parameters for all names but `free`.
    pub(super) fn fold(&self, text: &str, free: &[&str]) -> Result<Expr> {
        let expr = self.known(text, free)?;
        let lookup = |n: &str| if free.contains(&n) { None } else { self.param(n).cloned() };
        let folded = expr.fold(&lookup);
        folded.map_err(|e| self.cx.at(text, self.explained(&expr, e.message)))
    }

    /// Evaluates a parameter's definition: over the parameters before it and config keys.
    fn eval_param(&self, arg: Arg<'_>) -> Result<Value> {
        let Arg::Text(text) = arg else { return self.eval(arg) };
        let expr = self.cx.parse(text)?;
        let lookup = |n: &str| self.param(n).cloned().unwrap_or_else(|| self.cx.config(n));
        self.afford(text, &expr, &|n| weight(&lookup(n)))?;
        expr.eval(&|n| Some(lookup(n)))
            .map_err(|e| self.cx.at(text, self.explained(&expr, e.message)))
    }

    /// Parses an expression all of whose names are parameters or `free`.
    fn known(&self, text: &str, free: &[&str]) -> Result<Expr> {
        let expr = self.cx.parse(text)?;
        let mut unknown = None;
        expr.names(&mut |n| {
            if unknown.is_none() && !free.contains(&n) && self.param(n).is_none() {
                unknown = Some(n);
            }
        });
        if let Some(name) = unknown {
            let known = self.names().into_iter().chain(free.iter().copied());
            let why = if self.cx.is_config_key(name) {
                format!(
                    ": it is a key of config.json; read it in `params`, `\"{name}\": \"{name}\"`"
                )
            } else {
                nearest(name, known)
            };
            let message = format!("unknown parameter `{name}`{why}");
            return Err(self.cx.at(word(text, name), message));
        }
        self.afford(text, &expr, &|n| self.param(n).map_or(0, weight))?;
        Ok(expr)
    }

    /// Refuses an expression whose names stand for too much to substitute.
    fn afford(&self, text: &str, expr: &Expr, size: &dyn Fn(&str) -> usize) -> Result<()> {
        let mut bytes = 0usize;
        expr.names(&mut |n| bytes = bytes.saturating_add(size(n)));
        if bytes <= MAX_OPERANDS {
            return Ok(());
        }
        Err(self.cx.at(text, "the values that this expression names are too long to work with"))
    }

    /// `message` with what the config holds for the names to blame: those that are null where a
    /// null was found, the others else.
    fn explained(&self, expr: &Expr, message: String) -> String {
        // The part of the expression that the message is about, where it says so.
        let part = message.split_once("from `").and_then(|(_, rest)| rest.split_once("`, found"));
        let part = part.and_then(|(part, _)| part.parse::<Expr>().ok());
        let expr = part.as_ref().unwrap_or(expr);
        let null = message.ends_with("found null");
        let mut notes = Vec::new();
        self.blame(expr, null, self.params.len(), 8, &mut notes);
        if notes.is_empty() {
            self.blame(expr, !null, self.params.len(), 8, &mut notes);
        }
        message + &notes.concat()
    }

    /// Follows names to config keys through the definitions of parameters before `end`.
    fn blame(&self, expr: &Expr, null: bool, end: usize, depth: usize, notes: &mut Vec<String>) {
        if depth == 0 || notes.len() > 4 {
            return;
        }
        expr.names(&mut |name| {
            if let Some(i) = self.params[..end].iter().rposition(|p| p.name == name) {
                let param = &self.params[i];
                if (param.value == Value::Null) == null
                    && let Some(Ok(expr)) = param.from.map(str::parse::<Expr>)
                {
                    self.blame(&expr, null, i, depth - 1, notes);
                }
            } else if let Some(outer) = self.outer {
                let var = Expr::Var(name.to_owned());
                outer.blame(&var, null, outer.params.len(), depth - 1, notes);
            } else if let value = self.cx.config(name)
                && (value == Value::Null) == null
            {
                let note = self.config_note(name, &value);
                if !notes.contains(&note) {
                    notes.push(note);
                }
            }
        });
    }

    fn config_note(&self, name: &str, value: &Value) -> String {
        let keys = self.cx.request.config_keys;
        match value {
            Value::Null if self.cx.params.contains(&name) => {
                format!(
                    "; parameter `{name}` is defined after it: one that replaces a base's keeps its place"
                )
            }
            Value::Null => {
                format!("; config.json has no `{name}`{}", nearest(name, keys.iter().copied()))
            }
            value if keys.contains(&name) => {
                format!("; config.json has `{name}`: {}", brief(value))
            }
            value => format!("; `{name}` defaults to {}", brief(value)),
        }
    }

    /// An error about the value of `arg`, traced to the config.
    pub(super) fn unexpected(
        &self,
        key: &str,
        arg: Arg<'_>,
        expected: &str,
        v: &Value,
    ) -> SourceError {
        self.traced(key, arg, format!("expected {expected}, found {}", brief(v)))
    }

    fn traced(&self, key: &str, arg: Arg<'_>, mut message: String) -> SourceError {
        if let Arg::Text(text) = arg
            && let Ok(expr) = text.parse::<Expr>()
        {
            message = self.explained(&expr, message);
        }
        self.cx.at_arg(arg, key, message)
    }

    /// Evaluates to a whole number that is not negative.
    pub(super) fn eval_int(&self, key: &str, arg: Arg<'_>) -> Result<u64> {
        match self.eval(arg)? {
            // 2^53: beyond it not every integer is a float.
            Value::Num(n) if n >= 0.0 && n.fract() == 0.0 && n <= 9_007_199_254_740_992.0 => {
                Ok(n as u64)
            }
            v => Err(self.unexpected(key, arg, "a whole number of at least 0", &v)),
        }
    }

    /// Evaluates to true or false.
    pub(super) fn eval_bool(&self, key: &str, arg: Arg<'_>) -> Result<bool> {
        match self.eval(arg)? {
            Value::Bool(b) => Ok(b),
            v => Err(self.unexpected(key, arg, "true or false", &v)),
        }
    }

    /// An optional condition: true when it is not written.
    pub(super) fn holds(&self, key: &str, when: Option<Arg<'_>>) -> Result<bool> {
        when.map_or(Ok(true), |w| self.eval_bool(key, w))
    }

    /// Refuses a config for which one of the checks is false.
    pub(super) fn check(&self, checks: &Entries<'_, Arg<'_>>) -> Result<()> {
        for (what, arg) in checks.iter() {
            if !self.eval_bool(what, *arg)? {
                return Err(self.traced(what, *arg, format!("not supported: {what}")));
            }
        }
        Ok(())
    }
}

/// The piece of `text` that is the name `name`, and not part of a longer one.
pub(super) fn word<'t>(text: &'t str, name: &str) -> &'t str {
    let part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let found = text.match_indices(name).find(|(i, _)| {
        !text[..*i].ends_with(|c| part(c) || c == '.') && !text[i + name.len()..].starts_with(part)
    });
    found.map_or(text, |(i, _)| &text[i..i + name.len()])
}

/// Bytes that a value takes.
pub(super) fn weight(value: &Value) -> usize {
    let inner = match value {
        Value::Str(s) => s.len(),
        Value::List(items) => items.iter().map(weight).sum(),
        Value::Map(entries) => entries.iter().map(|(k, v)| 32 + k.len() + weight(v)).sum(),
        Value::Null | Value::Bool(_) | Value::Num(_) => 0,
    };
    32 + inner
}

/// A value as it may stand in a message.
pub(super) fn brief(value: &Value) -> String {
    let text = match value {
        Value::Map(entries) => {
            let keys: Vec<&str> = entries.iter().map(|(k, _)| k.as_str()).collect();
            format!("an object of {}", keys.join(", "))
        }
        other => other.to_string(),
    };
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}.. ({})", &text[..end], value.kind()),
        None => text,
    }
}
