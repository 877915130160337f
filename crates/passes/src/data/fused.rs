//! A fused op's file.

use infernum_frontend_hf::spec::{Entries, Source, SpecCall};
use infernum_ir::{
    AttrDef, AttrDefault, AttrKind, Fused, FusedDef, Op, OpSet, SourceError, nearest,
};
use serde::Deserialize;

use super::notation::{at, attr_uses, body, free_names, use_of};
use super::signature::{self, Signature};

/// `Fused(..)`, as written.
#[derive(Deserialize)]
#[serde(rename = "Fused", deny_unknown_fields)]
pub(super) struct File<'a> {
    pub(super) name: &'a str,
    doc: &'a str,
    /// `"x"`, or `"x?"` for one that may be left out.
    #[serde(borrow)]
    operands: Vec<&'a str>,
    /// `"eps"`, whose kind is that of the op attribute it is passed to, or `"scale: float"`; kinds
    /// are int, float, bool, dtype, expr, with `?` where it may be absent.
    #[serde(default)]
    attrs: Vec<&'a str>,
    body: Entries<'a, SpecCall<'a>>,
    results: Vec<&'a str>,
    /// Stem of its CUDA template.
    #[serde(default)]
    template: Option<&'a str>,
    /// What its operands are, in the notation of rules; needed only where no rule makes it of variables.
    #[serde(default)]
    vars: Entries<'a, &'a str>,
    /// Of attributes, the values that its kernels are checked with.
    #[serde(default)]
    samples: Entries<'a, &'a str>,
    /// Sizes of the dimensions in `vars` that its kernels are checked at, besides small ones.
    #[serde(default)]
    sizes: Vec<Entries<'a, u64>>,
}

/// Defines the op of a file, and says what it is called with where the file does.
pub(super) fn define(
    source: &Source,
    file: &File<'_>,
    ops: &mut OpSet,
) -> Result<(Op, Option<Signature>), SourceError> {
    let body = body(source, ops, &file.body)?;
    let operands: Vec<(String, bool)> = file
        .operands
        .iter()
        .map(|o| (o.trim_end_matches('?').to_owned(), o.ends_with('?')))
        .collect();
    let attrs = file
        .attrs
        .iter()
        .map(|text| attr_def(source, text, &body))
        .collect::<Result<Vec<_>, _>>()?;
    let (values, names) = free_names(&body);
    if let Some(unknown) = values.iter().find(|v| !operands.iter().any(|(n, _)| n == *v)) {
        let hint = nearest(unknown, operands.iter().map(|(n, _)| n.as_str()));
        let message = format!("the body uses `{unknown}`, which is not an operand{hint}");
        return Err(at(source, use_of(&file.body, unknown).unwrap_or(file.name), message));
    }
    let known =
        |n: &String| attrs.iter().any(|a| a.name == n) || operands.iter().any(|(o, _)| o == n);
    if let Some(unknown) = names.iter().find(|n| !known(n)) {
        let message =
            format!("the body uses `{unknown}`, which is neither an attribute nor an operand");
        return Err(at(source, use_of(&file.body, unknown).unwrap_or(file.name), message));
    }
    let unused = |name: &&&str| {
        let name = name.trim_end_matches('?');
        !values.iter().chain(&names).any(|n| n == name)
    };
    if let Some(extra) = file.operands.iter().find(unused) {
        return Err(at(source, extra, "the body does not use this operand"));
    }
    let twice = file.operands.iter().enumerate().find(|(i, o)| {
        let name = o.trim_end_matches('?');
        file.operands[..*i].iter().any(|p| p.trim_end_matches('?') == name)
            || attrs.iter().any(|a| a.name == name)
            || body.iter().any(|s| s.results.iter().any(|r| r == name))
    });
    if let Some((_, name)) = twice {
        return Err(at(source, name, "another operand, an attribute or a value has this name"));
    }
    if file.results.is_empty() {
        return Err(at(source, file.name, "an op yields at least one of its body's values"));
    }
    let defined = |r: &&str| body.iter().any(|s| s.results.iter().any(|x| x == r));
    if let Some(unknown) = file.results.iter().find(|r| !defined(r)) {
        return Err(at(source, unknown, format!("the body does not define `{unknown}`")));
    }
    let results = file.results.iter().map(|r| (*r).to_owned()).collect();
    let op = ops.define(FusedDef {
        name: file.name.to_owned(),
        doc: file.doc.split_whitespace().collect::<Vec<_>>().join(" "),
        operands,
        attrs,
        fused: Fused { body, results },
        template: file.template.map(str::to_owned),
    });
    let op = op.map_err(|e| at(source, file.name, e))?;
    let signature = signature::declared(source, op, &file.vars, &file.samples, &file.sizes)?;
    Ok((op, signature))
}

fn attr_def(
    source: &Source,
    text: &str,
    body: &[infernum_ir::body::Stmt],
) -> Result<AttrDef, SourceError> {
    let leak = |s: &str| -> &'static str { Box::leak(s.to_owned().into_boxed_str()) };
    let (name, kind) = match text.split_once(':') {
        Some((name, kind)) => (name.trim(), Some(kind.trim())),
        None => (text, None),
    };
    let (kind, optional) = if let Some(kind) = kind {
        let named = match kind.trim_end_matches('?') {
            "int" => AttrKind::Int,
            "float" => AttrKind::Float,
            "bool" => AttrKind::Bool,
            "dtype" => AttrKind::DType,
            "expr" => AttrKind::Expr,
            other => {
                let message = format!("expected int, float, bool, dtype or expr, found `{other}`");
                return Err(at(source, kind, message));
            }
        };
        (named, kind.ends_with('?'))
    } else {
        let used = attr_uses(body).find(|(n, _)| *n == name).ok_or_else(|| {
                let message = format!(
                    "`{name}` is passed to no op's attribute as it is: say its kind, as in `{name}: float`"
                );
                at(source, text, message)
            })?;
        (used.1.kind, matches!(used.1.default, AttrDefault::Absent))
    };
    let default = if optional { AttrDefault::Absent } else { AttrDefault::Required };
    Ok(AttrDef { name: leak(name), kind, default, doc: "" })
}
