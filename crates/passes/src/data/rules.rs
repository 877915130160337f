//! A file of rewrite rules.

use infernum_frontend_hf::spec::{Arg, Entries, Source, SpecCall};
use infernum_ir::body::Stmt;
use infernum_ir::expr::Expr;
use infernum_ir::{Attr, AttrDef, AttrKind, Loc, OpSet, SourceError, Type, nearest};
use serde::{Deserialize, Serialize};

use super::notation::{at, attr_uses, body, expression, free_names, use_of};
use super::samples::{self, Samples};
use super::var_type::{self, Sizes, VarType};

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
    /// Rounds what was not rounded: to fewer bits than the element type has.
    Lossy,
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
    /// Value variables: what each may be, which is also what the rule is tried on.
    pub values: Vec<(String, VarType)>,
    /// For attribute variables that are shapes, what each may be.
    pub shapes: Vec<(String, VarType)>,
    /// Attribute variables, with the op attribute each was matched from.
    pub attrs: Vec<(String, &'static AttrDef)>,
    /// Of some of them, the values that the rule is tried on. They say nothing of where it applies.
    pub samples: Vec<(String, Samples)>,
    /// The names that both sides define.
    pub roots: Vec<String>,
    /// Needed for the rule to hold.
    pub requires: Vec<(String, Expr)>,
    /// Needed for the rule to pay.
    pub when: Vec<(String, Expr)>,
    /// Where it is written.
    pub loc: Loc,
    /// Whether it is as we ship it, over ops as we ship them: then our tests have tried it.
    pub built_in: bool,
}

/// `Rule(..)`, as written; a file holds a list of them.
#[derive(Deserialize)]
#[serde(rename = "Rule", deny_unknown_fields)]
pub(super) struct File<'a> {
    pub(super) name: &'a str,
    #[serde(default)]
    doc: &'a str,
    numerics: Numerics,
    #[serde(borrow)]
    vars: Entries<'a, &'a str>,
    #[serde(default)]
    samples: Entries<'a, &'a str>,
    left: Entries<'a, SpecCall<'a>>,
    right: Entries<'a, SpecCall<'a>>,
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
    let (values, shapes) = vars(source, file, &values, &attrs)?;
    let samples = samples(source, &file.samples, &attrs)?;
    let roots = roots(source, file, &left, &right)?;
    check_anchor(source, file, &left)?;
    check_right(source, file, &left, &right, &values, &attrs)?;
    let known: Vec<&str> = defined(&left)
        .chain(values.iter().map(|(n, _)| n.as_str()))
        .chain(attrs.iter().map(|(n, _)| n.as_str()))
        .chain(CONTEXT)
        .collect();
    // Where a rule holds cannot depend on the step or the device.
    let own = known.len() - CONTEXT.len();
    let place = at(source, file.name, "");
    let rule = Rule {
        name: file.name.to_owned(),
        doc: file.doc.split_whitespace().collect::<Vec<_>>().join(" "),
        numerics: file.numerics,
        requires: conditions(source, file, &file.requires, &known[..own])?,
        when: conditions(source, file, &file.when, &known)?,
        loc: Loc { file: source.file.clone(), line: place.line as u32, col: place.col as u32 },
        built_in: false,
        left,
        right,
        values,
        shapes,
        attrs,
        samples,
        roots,
    };
    Ok(rule)
}

type Vars = Vec<(String, VarType)>;

/// The types of `vars`: those of the left side's free values, and of its shape attributes.
fn vars(
    source: &Source,
    file: &File<'_>,
    values: &[String],
    attrs: &[(String, &'static AttrDef)],
) -> Result<(Vars, Vars), SourceError> {
    let is_shape = |name: &str| attrs.iter().any(|(n, d)| n == name && d.kind == AttrKind::Dims);
    let mut shapes: Vars = Vec::new();
    let mut typed: Vars = Vec::new();
    for (name, text) in file.vars.iter() {
        let (ty, shape) = var_type::parse(source, text)?;
        match (values.iter().any(|v| v == name), is_shape(name)) {
            (true, _) if !shape => typed.push((name.to_owned(), ty)),
            (_, true) if shape => shapes.push((name.to_owned(), ty)),
            (true, _) => return Err(at(source, text, format!("`{name}` is a value, not a shape"))),
            (_, true) => {
                let message = format!("`{name}` is an attribute: write `shape {text}`");
                return Err(at(source, text, message));
            }
            _ if attrs.iter().any(|(n, _)| n == name) => {
                let message =
                    format!("`{name}` is an attribute: only one that is a shape has a type");
                return Err(at(source, name, message));
            }
            _ => {
                let hint = nearest(name, values.iter().map(String::as_str));
                let message = format!("the left side has no variable `{name}`{hint}");
                return Err(at(source, name, message));
            }
        }
    }
    let given = |n: &String| typed.iter().chain(&shapes).any(|(k, _)| k == n);
    let shape_names = attrs.iter().map(|(n, _)| n).filter(|n| is_shape(n));
    if let Some(name) = values.iter().chain(shape_names).find(|n| !given(n)) {
        let message = format!("variable `{name}` has no type in `vars`");
        return Err(at(source, use_of(&file.left, name).unwrap_or(file.name), message));
    }
    // In the order in which the left side meets them.
    typed.sort_by_key(|(n, _)| values.iter().position(|v| v == n));
    Ok((typed, shapes))
}

/// The values of `samples`, which are of attributes.
pub(super) fn samples(
    source: &Source,
    entries: &Entries<'_, &str>,
    attrs: &[(String, &'static AttrDef)],
) -> Result<Vec<(String, Samples)>, SourceError> {
    let one = |(name, text): (&str, &&str)| {
        let Some((_, def)) = attrs.iter().find(|(n, _)| n == name) else {
            let hint = nearest(name, attrs.iter().map(|(n, _)| n.as_str()));
            return Err(at(source, name, format!("there is no attribute `{name}`{hint}")));
        };
        if def.kind == AttrKind::Dims {
            return Err(at(source, name, "a shape is tried on what `vars` says of it"));
        }
        Ok((name.to_owned(), samples::parse(source, text, def)?))
    };
    entries.iter().map(one).collect()
}

impl Rule {
    /// Checks what the variables were matched to against `vars`; the error names the variable that
    /// does not fit. `ty` gives a value's type, `None` where it is left out; `attr` an attribute.
    pub fn fits(
        &self,
        ty: &dyn Fn(&str) -> Option<Type>,
        attr: &dyn Fn(&str) -> Option<Attr>,
    ) -> Result<Sizes, String> {
        let mut sizes = Sizes::default();
        // Twice: a product can be checked once its factors are known.
        for _ in 0..2 {
            for (name, want) in &self.values {
                match ty(name) {
                    Some(found) if !want.fits(&found, &mut sizes) => {
                        return Err(format!("`{name}` is {found}, which does not fit `vars`"));
                    }
                    None if !want.optional => return Err(format!("`{name}` is left out")),
                    _ => {}
                }
            }
            for (name, want) in &self.shapes {
                match attr(name) {
                    Some(Attr::Dims(dims)) if want.fits_shape(&dims, &mut sizes) => {}
                    found => {
                        let found = found.map_or("nothing".to_owned(), |a| a.to_string());
                        return Err(format!("`{name}` is {found}, which does not fit `vars`"));
                    }
                }
            }
        }
        Ok(sizes)
    }
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
            at(source, use_of(&file.left, name).unwrap_or(file.name), message)
        })
    };
    let attrs = names.iter().map(attr).collect::<Result<Vec<_>, _>>()?;
    for (name, def) in attr_uses(left) {
        if let Some((_, first)) = attrs.iter().find(|(n, d)| n == name && d.kind != def.kind) {
            let message =
                format!("`{name}` is {} in one place and {} in another", first.kind, def.kind);
            return Err(at(source, use_of(&file.left, name).unwrap_or(file.name), message));
        }
    }
    Ok(attrs)
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
    let key = file.left.iter().last().map_or(file.name, |(names, _)| names);
    Err(at(source, key, message))
}

/// Every statement of the left side must be reached from the last one through operands: a pattern
/// whose parts only share an operand matches pairs without end.
fn check_anchor(source: &Source, file: &File<'_>, left: &[Stmt]) -> Result<(), SourceError> {
    let keys: Vec<&str> = file.left.iter().map(|(names, _)| names).collect();
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
            return Err(at(source, keys[i], message));
        }
        for operand in left[i].operands.iter().flatten() {
            for (j, stmt) in left.iter().enumerate().take(i) {
                reached[j] |= stmt.results.contains(operand);
            }
        }
    }
    match left.iter().position(|s| s.when.is_some()) {
        Some(i) => Err(at(source, keys[i], "`when` has no meaning in a pattern")),
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
                use_of(&file.right, n).unwrap_or(file.name),
                format!("the right side uses `{n}`, which the left does not bind{hint}"),
            ))
        }
        None => Ok(()),
    }
}

fn conditions(
    source: &Source,
    file: &File<'_>,
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
                Some(n) if CONTEXT.contains(&n.as_str()) => {
                    let message = format!("`{n}` says when a rule pays: write this under `when`");
                    Err(at(source, text, message))
                }
                Some(n) => {
                    let hint = nearest(&n, known.iter().copied());
                    Err(at(source, text, format!("unknown name `{n}`{hint}")))
                }
                None => Ok(((*text).to_owned(), e)),
            }
        }
        _ => Err(at(source, file.name, "a condition is a text, such as \"tokens.max <= 16\"")),
    };
    list.iter().map(condition).collect()
}
