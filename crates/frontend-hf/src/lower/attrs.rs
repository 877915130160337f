//! Arguments of a call to attributes of its op.

use infernum_ir::expr::{BinaryOp, Expr, Value};
use infernum_ir::{Attr, AttrDef, AttrKind, DType, Dim, Op, SourceError, Sym};

use super::scope::{Scope, at, at_arg};
use crate::spec::{Arg, Argument, Source};

/// The value of attribute `def` from the argument written for it.
pub(super) fn attr(
    source: &Source,
    scope: &Scope<'_>,
    op: Op,
    def: &AttrDef,
    key: &str,
    argument: &Argument<'_>,
) -> Result<Attr, SourceError> {
    let arg = match (argument, def.kind) {
        (Argument::List(items), AttrKind::Dims) => {
            let dims: Result<Vec<Dim>, _> =
                items.iter().map(|a| dim(source, scope, key, *a)).collect();
            return Ok(Attr::Dims(dims?));
        }
        (Argument::List(_), kind) => {
            return Err(at(source, key, format!("expected {kind}, found a list")));
        }
        (Argument::One(arg), _) => *arg,
    };
    if let (Arg::Text(text), AttrKind::Expr) = (arg, def.kind) {
        // A table ranges over `i`, a pointwise op over its operands.
        let free: Vec<&str> = match op.operands {
            [] => vec!["i"],
            operands => operands.iter().map(|o| o.name).collect(),
        };
        return Ok(Attr::Expr(scope.fold(source, text, &free)?));
    }
    if let Arg::Text(text) = arg
        && let Some(literal) = literal(def.kind, text)
    {
        return Ok(literal);
    }
    let value = scope.eval(source, key, arg)?;
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
    attr.ok_or_else(|| {
        let message = format!("attribute `{}`: expected {}, found {value}", def.name, def.kind);
        at_arg(source, arg, key, message)
    })
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
pub(super) fn dim(
    source: &Source,
    scope: &Scope<'_>,
    key: &str,
    arg: Arg<'_>,
) -> Result<Dim, SourceError> {
    let Arg::Text(text) = arg else {
        return scope.eval_int(source, key, arg).map(Dim::Const);
    };
    let names: Vec<&str> = Sym::ALL.iter().map(|s| s.name()).collect();
    let expr = scope.fold(source, text, &names)?;
    as_dim(&expr).ok_or_else(|| {
        at(
            source,
            text,
            format!("expected a dimension (a whole number, or T, B or S times one), found {expr}"),
        )
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
