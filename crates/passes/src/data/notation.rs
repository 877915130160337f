//! From calls as written to statements of a body.

use infernum_frontend_hf::spec::{Arg, Argument, Entries, Source, SpecCall};
use infernum_ir::body::{AttrSource, Stmt};
use infernum_ir::expr::{Expr, Value};
use infernum_ir::{Attr, AttrKind, DType, NUMBER, OpSet, Recurrence, SourceError, Sym, nearest};

/// An error at `slice`, a piece of the source's text.
pub(super) fn at(source: &Source, slice: &str, message: impl Into<String>) -> SourceError {
    source.at(slice, message)
}

/// Parses an expression where it is written.
pub(super) fn expression(source: &Source, text: &str) -> Result<Expr, SourceError> {
    source.expression(text)
}

/// Reads a body over the ops of `ops`.
pub(super) fn body(
    source: &Source,
    ops: &OpSet,
    calls: &Entries<'_, SpecCall<'_>>,
) -> Result<Vec<Stmt>, SourceError> {
    let mut body: Vec<Stmt> = Vec::new();
    for (names, call) in calls.iter() {
        let stmt = stmt(source, ops, names, call)?;
        for (i, name) in stmt.results.iter().enumerate() {
            if name.is_empty() {
                return Err(at(source, names, "expected a name for each result, with `,` between"));
            }
            let before = body.iter().any(|s| s.results.contains(name));
            if before || stmt.results[..i].contains(name) {
                return Err(at(source, names, format!("`{name}` is defined twice")));
            }
        }
        body.push(stmt);
    }
    Ok(body)
}

/// Where `name` is used in these calls: the text of the operand, attribute or condition.
pub(super) fn use_of<'a>(calls: &Entries<'a, SpecCall<'a>>, name: &str) -> Option<&'a str> {
    let texts = |argument: &Argument<'a>| -> Vec<&'a str> {
        let list = match argument {
            Argument::One(arg) => std::slice::from_ref(arg),
            Argument::List(list) => &list[..],
            Argument::Names(_) => &[],
        };
        list.iter().filter_map(|a| if let Arg::Text(t) = a { Some(*t) } else { None }).collect()
    };
    let all: Vec<&str> = calls
        .iter()
        .flat_map(|(_, call)| call.args.iter().flat_map(|(_, argument)| texts(argument)))
        .collect();
    let mentions = |text: &str| {
        let mut found = false;
        if let Ok(e) = text.parse::<Expr>() {
            e.names(&mut |n| found |= n == name);
        }
        found
    };
    all.iter().find(|t| **t == name).or_else(|| all.iter().find(|t| mentions(t))).copied()
}

fn stmt(
    source: &Source,
    ops: &OpSet,
    names: &str,
    call: &SpecCall<'_>,
) -> Result<Stmt, SourceError> {
    let op = ops.find(call.name).map_err(|e| at(source, call.name, e))?;
    let known = || {
        let operands = op.operands.iter().map(|o| o.name);
        operands.chain(op.attrs.iter().map(|a| a.name)).chain(["when"])
    };
    if let Some((key, _)) = call.args.iter().find(|(k, _)| !known().any(|n| n == *k)) {
        let list: Vec<&str> = known().collect();
        let hint = nearest(key, known());
        let takes = list.join(", ");
        let message = format!("`{}` has no argument `{key}`{hint}; it takes {takes}", op.name);
        return Err(at(source, key, message));
    }
    let mut operands = Vec::new();
    for def in op.operands {
        operands.push(match call.arg(def.name) {
            Some((_, Argument::One(Arg::Text(name)))) => Some((*name).to_owned()),
            None | Some((_, Argument::One(Arg::Null))) if def.optional => None,
            None => {
                let message = format!("`{}` needs operand `{}`", op.name, def.name);
                return Err(at(source, call.name, message));
            }
            Some((key, _)) => return Err(at(source, key, "expected the name of a value")),
        });
    }
    let mut attrs = Vec::new();
    for def in op.attrs {
        attrs.push(match call.arg(def.name) {
            Some((key, argument)) => {
                let free = || op.scalar_names(def.name).into_iter().map(str::to_owned).collect();
                let free: Vec<String> =
                    if def.kind == AttrKind::Expr { free() } else { Vec::new() };
                let value = attr(source, key, def.kind, argument, &free)?;
                if let AttrSource::Given(given) = &value {
                    def.check(given).map_err(|e| at(source, key, e))?;
                }
                value
            }
            None => AttrSource::Given(def.default_value().ok_or_else(|| {
                let message = format!("`{}` needs attribute `{}`, {}", op.name, def.name, def.kind);
                at(source, call.name, message)
            })?),
        });
    }
    let when = match call.arg("when") {
        Some((_, Argument::One(Arg::Text(text)))) => Some(expression(source, text)?),
        Some((key, _)) => return Err(at(source, key, "expected a condition")),
        None => None,
    };
    let results: Vec<String> = names.split(',').map(|n| n.trim().to_owned()).collect();
    if let Some(fused) = &op.fused
        && fused.results.len() != results.len()
    {
        let (want, found) = (fused.results.join(", "), results.len());
        let message = format!("`{}` yields `{want}`, found {found} name(s)", op.name);
        return Err(at(source, names, message));
    }
    Ok(Stmt { results, op, operands, attrs, when })
}

fn attr(
    source: &Source,
    key: &str,
    kind: AttrKind,
    argument: &Argument<'_>,
    free: &[String],
) -> Result<AttrSource, SourceError> {
    let number = |arg: &Arg<'_>| match (kind, arg) {
        (_, Arg::Null) => Some(Attr::None),
        (AttrKind::Bool, Arg::Bool(b)) => Some(Attr::Bool(*b)),
        (AttrKind::Int, Arg::Num(n)) if n.fract() == 0.0 => Some(Attr::Int(*n as i64)),
        (AttrKind::Float, Arg::Num(n)) => Some(Attr::Float(*n)),
        _ => None,
    };
    match argument {
        Argument::List(items) if kind == AttrKind::Dims => {
            let dim = |arg: &Arg<'_>| match arg {
                Arg::Text(text) => expression(source, text),
                Arg::Num(n) => Ok(Expr::Lit(Value::Num(*n))),
                _ => Err(at(source, key, "expected dimensions")),
            };
            Ok(AttrSource::Dims(items.iter().map(dim).collect::<Result<_, _>>()?))
        }
        Argument::List(_) => Err(at(source, key, format!("expected {kind}, found a list"))),
        Argument::Names(_) => Err(at(source, key, format!("expected {kind}, found a map"))),
        Argument::One(Arg::Text(text)) => Ok(match kind {
            AttrKind::Enum(names) if names.contains(text) => {
                AttrSource::Given(Attr::Enum((*text).to_owned()))
            }
            AttrKind::DType if text.parse::<DType>().is_ok() => {
                AttrSource::Given(text.parse().map_or(Attr::None, Attr::DType))
            }
            AttrKind::Recurrence if text.contains("->") => {
                let parsed = text.parse::<Recurrence>();
                let parsed = parsed.map_err(|e| source.at_offset(text, e.at, e.message))?;
                let given = parsed.free().is_empty();
                if given {
                    AttrSource::Given(Attr::Recurrence(parsed))
                } else {
                    AttrSource::Recurrence(parsed)
                }
            }
            AttrKind::Expr => match expression(source, text)? {
                // A bare name passes an expression on.
                e @ Expr::Var(_) if !free.iter().any(|f| f == text) => AttrSource::Value(e),
                e => scalar(source, text, e, free)?,
            },
            _ => AttrSource::Value(expression(source, text)?),
        }),
        Argument::One(arg) => number(arg)
            .map(AttrSource::Given)
            .ok_or_else(|| at(source, key, format!("expected {kind}"))),
    }
}

/// What an op computes for each element: as it is written, where there is nothing to put in.
fn scalar(
    source: &Source,
    text: &str,
    e: Expr,
    free: &[String],
) -> Result<AttrSource, SourceError> {
    let mut given = true;
    e.names(&mut |n| given &= free.iter().any(|f| f == n));
    if !given {
        return Ok(AttrSource::Scalar(e, free.to_vec()));
    }
    let folded = e.fold(&|_| None).map_err(|e| at(source, text, e.to_string()))?;
    Ok(AttrSource::Given(Attr::Expr(folded)))
}

/// The names that a body takes from outside: values first, then attributes and what expressions
/// mention.
pub(super) fn free_names(body: &[Stmt]) -> (Vec<String>, Vec<String>) {
    let mut defined: Vec<&str> = Vec::new();
    let (mut values, mut attrs) = (Vec::<String>::new(), Vec::<String>::new());
    for stmt in body {
        for name in stmt.operands.iter().flatten() {
            if !defined.contains(&name.as_str()) && !values.contains(name) {
                values.push(name.clone());
            }
        }
        let mut mention = |e: &Expr, except: &[String]| {
            e.names(&mut |n| {
                let symbol = Sym::ALL.iter().any(|s| s.name() == n);
                if !symbol && !except.iter().any(|x| x == n) && !attrs.iter().any(|a| a == n) {
                    attrs.push(n.to_owned());
                }
            });
        };
        for source in &stmt.attrs {
            match source {
                AttrSource::Given(_) => {}
                AttrSource::Value(e) => mention(e, &[]),
                AttrSource::Dims(dims) => dims.iter().for_each(|e| mention(e, &[])),
                AttrSource::Scalar(e, free) => mention(e, free),
                AttrSource::Recurrence(body) => {
                    body.free().into_iter().for_each(|n| mention(&Expr::Var(n.to_owned()), &[]));
                }
            }
        }
        if let Some(e) = &stmt.when {
            mention(e, &[]);
        }
        defined.extend(stmt.results.iter().map(String::as_str));
    }
    attrs.retain(|a| !values.contains(a) && !defined.contains(&a.as_str()));
    (values, attrs)
}

/// For each attribute name, the kind and optionality of the op attribute that it is passed to; of one that stands in a
/// recurrence, those of a number.
pub(super) fn attr_uses(
    body: &[Stmt],
) -> impl Iterator<Item = (&str, &'static infernum_ir::AttrDef)> {
    body.iter().flat_map(|stmt| {
        let defs: &'static [infernum_ir::AttrDef] = stmt.op.attrs;
        defs.iter().zip(&stmt.attrs).flat_map(|(def, source)| match source {
            AttrSource::Value(Expr::Var(name)) => vec![(name.as_str(), def)],
            AttrSource::Recurrence(body) => body.free().into_iter().map(|n| (n, &NUMBER)).collect(),
            _ => Vec::new(),
        })
    })
}
