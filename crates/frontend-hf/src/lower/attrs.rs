//! Arguments of a call to attributes of its op.

use infernum_ir::expr::{BinaryOp, Expr, Value};
use infernum_ir::{Attr, AttrDef, AttrKind, DType, Dim, Recurrence, SourceError, Sym, nearest};

use super::scope::{Scope, word};
use crate::spec::{Arg, Argument};

/// The value of attribute `def` from the argument written for it; a scalar expression may range
/// over the names `free`.
pub(super) fn attr(
    scope: &Scope<'_>,
    free: &[&str],
    def: &AttrDef,
    key: &str,
    argument: &Argument<'_>,
) -> Result<Attr, SourceError> {
    let arg = match argument {
        Argument::List(items) if def.kind == AttrKind::Dims => {
            let dims: Result<Vec<Dim>, _> = items.iter().map(|a| dim(scope, key, *a)).collect();
            return Ok(Attr::Dims(dims?));
        }
        Argument::List(_) => {
            let message = format!("attribute `{}`: expected {}, found a list", def.name, def.kind);
            return Err(scope.cx.at(key, message));
        }
        Argument::Names(_) => {
            let message = format!("attribute `{}`: expected {}, found a map", def.name, def.kind);
            return Err(scope.cx.at(key, message));
        }
        Argument::One(arg) => *arg,
    };
    if let (Arg::Text(text), AttrKind::Expr) = (arg, def.kind) {
        return Ok(Attr::Expr(scope.fold(text, free)?));
    }
    if let (Arg::Text(text), AttrKind::Recurrence) = (arg, def.kind) {
        return recurrence(scope, text).map(Attr::Recurrence);
    }
    if let Arg::Text(text) = arg
        && let Some(literal) = literal(def.kind, text)
    {
        return Ok(literal);
    }
    let expected = format!("{} for attribute `{}`", def.kind, def.name);
    let value = scope.eval(arg).map_err(|e| hinted(e, def.kind, arg))?;
    let attr = match (def.kind, &value) {
        (_, Value::Null) => Some(Attr::None),
        (AttrKind::Int, Value::Num(n)) if n.fract() == 0.0 && n.abs() < 1e15 => {
            Some(Attr::Int(*n as i64))
        }
        (AttrKind::Float, Value::Num(n)) => Some(Attr::Float(*n)),
        (AttrKind::Bool, Value::Bool(b)) => Some(Attr::Bool(*b)),
        (kind, Value::Str(s)) => literal(kind, s),
        _ => None,
    };
    let attr = attr.filter(|a| def.check(a).is_ok());
    attr.ok_or_else(|| scope.unexpected(key, arg, &expected, &value))
}

/// A recurrence, in which names of no value are parameters.
fn recurrence(scope: &Scope<'_>, text: &str) -> Result<Recurrence, SourceError> {
    let parsed: Result<Recurrence, _> = text.parse();
    let parsed = parsed.map_err(|e| {
        let rest = text.get(e.at..).unwrap_or_default();
        let first = rest.chars().next().map_or(0, char::len_utf8);
        scope.cx.at(&rest[..first], e.message)
    })?;
    let mut values = Vec::new();
    for name in parsed.free() {
        values.push((name.to_owned(), scope.eval(Arg::Text(word(text, name)))?));
    }
    let lookup = |name: &str| values.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    parsed.fold(&lookup).map_err(|e| scope.cx.at(text, e.message))
}

/// The element type that is written.
pub(super) fn dtype(scope: &Scope<'_>, key: &str, written: Arg<'_>) -> Result<DType, SourceError> {
    if let Arg::Text(text) = written
        && let Some(Attr::DType(dtype)) = literal(AttrKind::DType, text)
    {
        return Ok(dtype);
    }
    match scope.eval(written).map_err(|e| hinted(e, AttrKind::DType, written))? {
        Value::Str(name) if name.parse::<DType>().is_ok_and(DType::is_float) => {
            Ok(name.parse().unwrap_or(DType::F32))
        }
        found => Err(scope.unexpected(key, written, "an element type such as f32", &found)),
    }
}

/// A misspelt literal looks like an unknown parameter: say which literals there are.
fn hinted(mut e: SourceError, kind: AttrKind, arg: Arg<'_>) -> SourceError {
    if let (AttrKind::Enum(names), Arg::Text(text)) = (kind, arg) {
        e.message =
            format!("{}; expected {kind}{}", e.message, nearest(text, names.iter().copied()));
    } else if let (AttrKind::DType, Arg::Text(_)) = (kind, arg) {
        e.message = format!("{}; expected {kind} such as f32 or bf16", e.message);
    }
    e
}

/// A name that an enum or element-type attribute may be written as, without quotes of its own.
fn literal(kind: AttrKind, text: &str) -> Option<Attr> {
    match kind {
        AttrKind::Enum(names) if names.contains(&text) => Some(Attr::Enum(text.to_owned())),
        AttrKind::DType => text.parse::<DType>().ok().map(Attr::DType),
        _ => None,
    }
}

/// A dimension: a number, or a product of `T`, `B` or `S` with one.
fn dim(scope: &Scope<'_>, key: &str, arg: Arg<'_>) -> Result<Dim, SourceError> {
    let Arg::Text(text) = arg else {
        return scope.eval_int(key, arg).map(Dim::Const);
    };
    let expr = scope.fold(text, &Sym::ALL.map(Sym::name))?;
    as_dim(&expr).ok_or_else(|| {
        let expected = "a dimension (a whole number, or T, B or S times one)";
        match &expr {
            Expr::Lit(value) => scope.unexpected(key, arg, expected, value),
            rest => scope.cx.at(text, format!("expected {expected}, found {rest}")),
        }
    })
}

fn as_dim(expr: &Expr) -> Option<Dim> {
    match expr {
        Expr::Lit(Value::Num(n)) if *n >= 0.0 && n.fract() == 0.0 && *n < 1e15 => {
            Some(Dim::Const(*n as u64))
        }
        Expr::Var(name) => Sym::ALL.into_iter().find(|s| s.name() == name).map(Dim::sym),
        Expr::Binary(BinaryOp::Mul, a, b) => as_dim(a)?.product(as_dim(b)?),
        _ => None,
    }
}
