//! A file of rewrite rules.

use infernum_frontend_hf::spec::{Arg, Call, Entries, Source};
use infernum_ir::body::Stmt;
use infernum_ir::expr::Expr;
use infernum_ir::{AttrDef, DType, Loc, OpSet, SourceError, nearest};
use serde::{Deserialize, Serialize};

use super::notation::{at, attr_uses, body, expression, free_names};

/// What a rewrite does to the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Numerics {
    /// The same operations in the same order.
    Exact,
    /// The same operations in another order.
    Reassoc,
    /// Rounds elsewhere, or less often.
    Rounds,
}

/// A rewrite: where `left` is found, its values may be computed as `right` says.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Its name, unique among all rules.
    pub name: String,
    /// Why it holds.
    pub doc: String,
    /// What it does to the numbers.
    pub numerics: Numerics,
    /// The pattern. Names that it does not define are variables; its last statement is the anchor,
    /// from which all others are reached through operands.
    pub left: Vec<Stmt>,
    /// What takes its place: each name that both sides define is the same value.
    pub right: Vec<Stmt>,
    /// Value variables, with a type each to try the rule on.
    pub values: Vec<(String, VarType)>,
    /// Attribute variables, with the op attribute each was matched from.
    pub attrs: Vec<(String, &'static AttrDef)>,
    /// The names that both sides define.
    pub roots: Vec<String>,
    /// Needed for the rule to hold.
    pub requires: Vec<(String, Expr)>,
    /// Needed for the rule to pay.
    pub when: Vec<(String, Expr)>,
    /// Where it is written.
    pub loc: Loc,
}

/// The type of a variable, to try a rule on: `[T, K]`, `const [N, K]`, `state [G, D]`, `i32 [T]`,
/// or an optional operand, `[N]?`.
#[derive(Clone, Debug, PartialEq)]
pub struct VarType {
    /// Element type; that of the trial when `None`.
    pub dtype: Option<DType>,
    /// Dimensions: numbers, `T`, `B`, `S`, dimension variables, and products of them.
    pub dims: Vec<String>,
    /// Whether it is a constant.
    pub constant: bool,
    /// Whether it is a KV-cache state.
    pub state: bool,
    /// Whether it may be left out.
    pub optional: bool,
}

/// `Rule(..)`, as written; a file holds a list of them.
#[derive(Deserialize)]
#[serde(rename = "Rule", deny_unknown_fields)]
pub(super) struct File<'a> {
    name: &'a str,
    #[serde(default)]
    doc: &'a str,
    numerics: Numerics,
    #[serde(borrow)]
    vars: Entries<'a, &'a str>,
    left: Entries<'a, Call<'a>>,
    right: Entries<'a, Call<'a>>,
    #[serde(default)]
    requires: Vec<Arg<'a>>,
    #[serde(default)]
    when: Vec<Arg<'a>>,
}

/// Names that conditions may use besides a rule's own.
pub(super) const CONTEXT: [&str; 3] = ["tokens", "decode", "device"];

pub(super) fn read(source: &Source, file: &File<'_>, ops: &OpSet) -> Result<Rule, SourceError> {
    let left = body(source, ops, &file.left)?;
    let right = body(source, ops, &file.right)?;
    let (values, attr_names) = free_names(&left);
    let attrs = attrs(source, file, &left, &attr_names)?;
    let values = values
        .into_iter()
        .map(|name| match file.vars.iter().find(|(k, _)| *k == name) {
            Some((_, text)) => Ok((name, var_type(source, text)?)),
            None => {
                let message = format!("variable `{name}` has no type in `vars`");
                Err(at(source, file.name, message))
            }
        })
        .collect::<Result<Vec<_>, _>>()?;
    if let Some((extra, _)) = file.vars.iter().find(|(k, _)| !values.iter().any(|(n, _)| n == k)) {
        let hint = nearest(extra, values.iter().map(|(n, _)| n.as_str()));
        return Err(at(source, extra, format!("the left side has no variable `{extra}`{hint}")));
    }
    let roots = roots(source, file, &left, &right)?;
    check_anchor(source, file, &left)?;
    check_right(source, file, &left, &right, &values, &attrs)?;
    let known: Vec<&str> = defined(&left)
        .chain(values.iter().map(|(n, _)| n.as_str()))
        .chain(attrs.iter().map(|(n, _)| n.as_str()))
        .chain(CONTEXT)
        .collect();
    let place = at(source, file.name, "");
    let rule = Rule {
        name: file.name.to_owned(),
        doc: file.doc.split_whitespace().collect::<Vec<_>>().join(" "),
        numerics: file.numerics,
        requires: conditions(source, &file.requires, &known)?,
        when: conditions(source, &file.when, &known)?,
        loc: Loc { file: source.file.clone(), line: place.line as u32, col: place.col as u32 },
        left,
        right,
        values,
        attrs,
        roots,
    };
    Ok(rule)
}

fn defined(body: &[Stmt]) -> impl Iterator<Item = &str> {
    body.iter().flat_map(|s| &s.results).map(String::as_str)
}

fn attrs(
    source: &Source,
    file: &File<'_>,
    left: &[Stmt],
    names: &[String],
) -> Result<Vec<(String, &'static AttrDef)>, SourceError> {
    let attr = |name: &String| {
        let used = attr_uses(left).find(|(n, _)| n == name);
        used.map(|(_, def)| (name.clone(), def)).ok_or_else(|| {
            let message = format!(
                "`{name}` stands in an expression on the left: a pattern matches attributes as they \
                 are (give the attribute a name, and put a condition on it under `requires`)"
            );
            at(source, file.name, message)
        })
    };
    names.iter().map(attr).collect()
}

fn roots(
    source: &Source,
    file: &File<'_>,
    left: &[Stmt],
    right: &[Stmt],
) -> Result<Vec<String>, SourceError> {
    let roots: Vec<String> =
        defined(right).filter(|n| defined(left).any(|l| l == *n)).map(str::to_owned).collect();
    let Some(anchor) = left.last() else {
        return Err(at(source, file.name, "the left side is empty"));
    };
    if anchor.results.iter().any(|r| roots.contains(r)) {
        return Ok(roots);
    }
    let message = format!(
        "the right side does not define `{}`, the value of the left side's last statement",
        anchor.results[0]
    );
    Err(at(source, file.name, message))
}

/// Every statement of the left side must be reached from the last one through operands: a pattern
/// whose parts only share an operand matches pairs without end.
fn check_anchor(source: &Source, file: &File<'_>, left: &[Stmt]) -> Result<(), SourceError> {
    let mut reached = vec![false; left.len()];
    if let Some(last) = reached.last_mut() {
        *last = true;
    }
    for i in (0..left.len()).rev() {
        if !reached[i] {
            let name = &left[i].results[0];
            let message = format!(
                "`{name}` is not reached from the left side's last statement: anchor the rule on a \
                 value that uses all of them"
            );
            return Err(at(source, file.name, message));
        }
        for operand in left[i].operands.iter().flatten() {
            for (j, stmt) in left.iter().enumerate().take(i) {
                reached[j] |= stmt.results.contains(operand);
            }
        }
    }
    match left.iter().find(|s| s.when.is_some()) {
        Some(_) => Err(at(source, file.name, "`when` has no meaning in a pattern")),
        None => Ok(()),
    }
}

fn check_right(
    source: &Source,
    file: &File<'_>,
    left: &[Stmt],
    right: &[Stmt],
    values: &[(String, VarType)],
    attrs: &[(String, &'static AttrDef)],
) -> Result<(), SourceError> {
    let (used, mentioned) = free_names(right);
    let value = |n: &str| values.iter().any(|(v, _)| v == n) || defined(left).any(|l| l == n);
    let attr = |n: &str| attrs.iter().any(|(a, _)| a == n);
    let known = || {
        let values = values.iter().map(|(n, _)| n.as_str()).chain(defined(left));
        values.chain(attrs.iter().map(|(n, _)| n.as_str()))
    };
    let unknown = used
        .iter()
        .find(|n| !value(n))
        .or_else(|| mentioned.iter().find(|n| !value(n) && !attr(n)));
    match unknown {
        Some(n) => {
            let hint = nearest(n, known());
            Err(at(
                source,
                file.name,
                format!("the right side uses `{n}`, which the left does not bind{hint}"),
            ))
        }
        None => Ok(()),
    }
}

fn conditions(
    source: &Source,
    list: &[Arg<'_>],
    known: &[&str],
) -> Result<Vec<(String, Expr)>, SourceError> {
    let condition = |arg: &Arg<'_>| match arg {
        Arg::Text(text) => {
            let e = expression(source, text)?;
            let mut unknown = None;
            e.names(&mut |n| {
                if !known.contains(&n) {
                    unknown.get_or_insert_with(|| n.to_owned());
                }
            });
            match unknown {
                Some(n) => {
                    let hint = nearest(&n, known.iter().copied());
                    Err(at(source, text, format!("unknown name `{n}`{hint}")))
                }
                None => Ok(((*text).to_owned(), e)),
            }
        }
        _ => Err(at(source, "", "a condition is a text, such as \"tokens.max <= 16\"")),
    };
    list.iter().map(condition).collect()
}

fn var_type(source: &Source, text: &str) -> Result<VarType, SourceError> {
    let expected = || {
        at(
            source,
            text,
            "expected a type such as `[T, K]`, `const [N, K]`, `state [G, D]`, `i32 [T]` or `[N]?`",
        )
    };
    let (head, rest) = text.split_once('[').ok_or_else(expected)?;
    let (dims, tail) = rest.split_once(']').ok_or_else(expected)?;
    let mut ty = VarType {
        dtype: None,
        dims: dims.split(',').map(|d| d.trim().to_owned()).filter(|d| !d.is_empty()).collect(),
        constant: false,
        state: false,
        optional: tail.trim() == "?",
    };
    if !matches!(tail.trim(), "" | "?") {
        return Err(expected());
    }
    for word in head.split_whitespace() {
        match (word, word.parse::<DType>()) {
            ("const", _) => ty.constant = true,
            ("state", _) => ty.state = true,
            (_, Ok(dtype)) => ty.dtype = Some(dtype),
            _ => return Err(expected()),
        }
    }
    Ok(ty)
}
