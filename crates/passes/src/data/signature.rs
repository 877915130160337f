//! What a fused op is called with: types of its operands, values of its attributes.

use std::collections::HashMap;

use infernum_frontend_hf::spec::{Entries, Source};
use infernum_ir::body::{AttrSource, Stmt};
use infernum_ir::{AttrDef, Op, SourceError, nearest};

use super::notation::at;
use super::rules::{self, Rule};
use super::samples::Samples;
use super::var_type::{self, VarType};

/// What calls of a fused op look like: its documentation, and what its kernels are checked on.
#[derive(Clone, Debug, PartialEq)]
pub struct Signature {
    /// The type of each operand; `None` for one that is left out.
    pub operands: Vec<Option<VarType>>,
    /// Of some attributes, by name, the values that calls are made with.
    pub samples: Vec<(String, Samples)>,
    /// Sizes to check kernels at, besides small ones.
    pub sizes: Vec<HashMap<String, u64>>,
}

/// The signature that a fused op's own file gives: `vars`, `samples` and `sizes`.
pub(super) fn declared(
    source: &Source,
    op: Op,
    vars: &Entries<'_, &str>,
    samples: &Entries<'_, &str>,
    sizes: &[Entries<'_, u64>],
) -> Result<Option<Signature>, SourceError> {
    let attrs: Vec<(String, &'static AttrDef)> = {
        let defs: &'static [AttrDef] = op.attrs;
        defs.iter().map(|def| (def.name.to_owned(), def)).collect()
    };
    let samples = rules::samples(source, samples, &attrs)?;
    if vars.0.is_empty() {
        return Ok(None);
    }
    let mut operands: Vec<Option<VarType>> = vec![None; op.operands.len()];
    for (name, text) in vars.iter() {
        let Some(i) = op.operand(name) else {
            let hint = nearest(name, op.operands.iter().map(|o| o.name));
            return Err(at(source, name, format!("there is no operand `{name}`{hint}")));
        };
        let (ty, is_shape) = var_type::parse(source, text)?;
        if is_shape {
            return Err(at(source, text, format!("`{name}` is a value, not a shape")));
        }
        if ty.optional != op.operands[i].optional {
            let message = format!("`{name}`: `?` stands here just where it does in `operands`");
            return Err(at(source, text, message));
        }
        operands[i] = Some(ty);
    }
    if let Some(i) = operands.iter().position(Option::is_none) {
        let name = op.operands[i].name;
        let place = vars.0.first().map_or(op.name, |(name, _)| *name);
        return Err(at(source, place, format!("operand `{name}` has no type in `vars`")));
    }
    let mut known = Vec::new();
    for dim in operands.iter().flatten().flat_map(|ty| ty.dims.iter().chain(&ty.below)) {
        dim.names(&mut |n| known.push(n));
    }
    for (name, _) in sizes.iter().flat_map(Entries::iter) {
        if !known.contains(&name) {
            let hint = nearest(name, known.iter().copied());
            return Err(at(source, name, format!("no type in `vars` mentions `{name}`{hint}")));
        }
    }
    let sizes = sizes.iter().map(|s| s.iter().map(|(n, v)| (n.to_owned(), *v)).collect());
    Ok(Some(Signature { sizes: sizes.collect(), operands, samples }))
}

/// The signature that follows from a rule that makes calls of `op` of its variables.
pub(super) fn derived(op: Op, rules: &[Rule]) -> Option<Signature> {
    let calls = rules.iter().flat_map(|rule| rule.right.iter().map(move |stmt| (rule, stmt)));
    let of_op = calls.filter(|(_, stmt)| stmt.op == op);
    let mut found: Vec<Signature> = of_op.filter_map(|(rule, stmt)| called(rule, stmt)).collect();
    // The one that says most: another rule may leave operands out.
    found.sort_by_key(|s| s.operands.iter().filter(|o| o.is_none()).count());
    found.into_iter().next()
}

fn called(rule: &Rule, stmt: &Stmt) -> Option<Signature> {
    let type_of = |name: &String| rule.values.iter().find(|(n, _)| n == name).map(|(_, ty)| ty);
    let operands = stmt.operands.iter().map(|name| match name {
        Some(name) => type_of(name).cloned().map(Some),
        None => Some(None),
    });
    let operands = operands.collect::<Option<Vec<_>>>()?;
    let mut samples = Vec::new();
    for (def, source) in stmt.op.attrs.iter().zip(&stmt.attrs) {
        let given = match source {
            AttrSource::Given(attr) => Some(Samples::one(attr.clone())),
            AttrSource::Value(infernum_ir::expr::Expr::Var(name)) => {
                rule.samples.iter().find(|(n, _)| n == name).map(|(_, s)| s.clone())
            }
            _ => None,
        };
        samples.extend(given.map(|s| (def.name.to_owned(), s)));
    }
    Some(Signature { operands, samples, sizes: Vec::new() })
}
