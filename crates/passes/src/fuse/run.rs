//! Saturation: every rule at every place, until nothing is new.

use std::collections::{HashMap, HashSet};

use egg::Id;
use infernum_ir::Op;
use infernum_ir::body::{self, Emit};
use serde::Serialize;

use super::convert::{Imported, Origin};
use super::rule::{Bindings, Context, Pattern, refusal};

/// What saturation may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Nodes of the e-graph.
    pub nodes: usize,
    /// Rounds of all rules.
    pub rounds: usize,
    /// Search nodes of an extraction.
    pub search: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { nodes: 20_000, rounds: 30, search: 20_000 }
    }
}

/// Why saturation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// Nothing was left to do.
    Saturated,
    /// The cap on nodes was hit: what rules might still have found is not known.
    NodeCap,
    /// The cap on rounds was hit.
    RoundCap,
}

/// A rule that fired.
pub(super) struct Firing {
    /// Position among the patterns.
    pub(super) pattern: usize,
    pub(super) anchor: Id,
    pub(super) site: Origin,
    pub(super) bindings: Vec<(String, String)>,
    /// The calls that its left side matched, as it writes them.
    pub(super) matched: Vec<Matched>,
    /// The classes of the calls that it made.
    pub(super) made: Vec<(Id, super::language::Node)>,
}

/// A call that a left side matched.
pub(super) struct Matched {
    pub(super) op: Op,
    /// The class of its first result.
    pub(super) class: Id,
    pub(super) origin: Option<Origin>,
}

/// A match that a condition refused.
pub(super) struct Refusal {
    pub(super) pattern: usize,
    pub(super) anchor: Id,
    pub(super) site: Origin,
    pub(super) condition: String,
    pub(super) values: Vec<(String, String)>,
}

/// What saturation did.
pub(super) struct Saturation {
    pub(super) firings: Vec<Firing>,
    pub(super) refusals: Vec<Refusal>,
    pub(super) rounds: usize,
    pub(super) stop: Stop,
}

/// Runs every pattern until nothing changes or a limit is hit. Deterministic: rules in their order,
/// matches in the order of their classes.
pub(super) fn saturate(
    imported: &mut Imported<'_>,
    patterns: &[Pattern<'_>],
    context: &Context,
    limits: &Limits,
) -> Saturation {
    let mut out =
        Saturation { firings: Vec::new(), refusals: Vec::new(), rounds: 0, stop: Stop::RoundCap };
    let mut tried: HashSet<(usize, Bindings)> = HashSet::new();
    while out.rounds < limits.rounds {
        out.rounds += 1;
        let mut changed = false;
        // Matches name classes as they are now.
        let origins: Origins =
            imported.origins().into_iter().map(|(id, o)| (id, o.clone())).collect();
        let matches: Vec<(usize, Bindings)> = patterns
            .iter()
            .enumerate()
            .flat_map(|(i, p)| p.search(&imported.graph).into_iter().map(move |b| (i, b)))
            .filter(|m| tried.insert(m.clone()))
            .collect();
        for (i, bound) in matches {
            if imported.graph.egg.total_number_of_nodes() >= limits.nodes {
                imported.graph.egg.rebuild();
                out.stop = Stop::NodeCap;
                return out;
            }
            changed |= attempt(imported, &origins, &patterns[i], i, &bound, context, &mut out);
        }
        imported.graph.egg.rebuild();
        if !changed {
            out.stop = Stop::Saturated;
            break;
        }
    }
    out
}

type Origins = HashMap<Id, Origin>;

/// Tries one match; true when it changed the e-graph.
fn attempt(
    imported: &mut Imported<'_>,
    origins: &Origins,
    pattern: &Pattern<'_>,
    index: usize,
    bound: &Bindings,
    context: &Context,
    out: &mut Saturation,
) -> bool {
    let env = pattern.env(&imported.graph, bound);
    let Some(anchor) = anchor(pattern, &env) else { return false };
    if !pattern.attributes_agree(&imported.graph, &env) {
        return false;
    }
    let Some(site) = origins.get(&anchor).cloned() else { return false };
    let refused = match refusal(pattern.rule, &imported.graph, &env, context) {
        Some(refused) => Some(refused),
        None => match apply(imported, pattern, env.clone(), &site) {
            Ok(None) => return false,
            Ok(Some(made)) => {
                let names = pattern.names();
                let bindings =
                    names.map(|n| (n.to_owned(), describe(imported, origins, n, &env))).collect();
                let matched = matched(pattern, origins, &env);
                out.firings.push(Firing { pattern: index, anchor, site, bindings, matched, made });
                return true;
            }
            Err(e) => Some((e, Vec::new())),
        },
    };
    if let Some((condition, values)) = refused {
        let same = |r: &Refusal| {
            r.pattern == index && r.condition == condition && r.site == site && r.values == values
        };
        if !out.refusals.iter().any(same) {
            out.refusals.push(Refusal { pattern: index, anchor, site, condition, values });
        }
    }
    false
}

/// The class of the anchor's value: of its first result that is a root.
fn anchor(pattern: &Pattern<'_>, env: &body::Env<Id>) -> Option<Id> {
    let last = pattern.rule.left.last()?;
    let root = last.results.iter().find(|r| pattern.rule.roots.contains(r))?;
    env.values.get(root).copied().flatten()
}

/// The calls of the left side. Names are those of before the firing, which unites classes.
fn matched(pattern: &Pattern<'_>, origins: &Origins, env: &body::Env<Id>) -> Vec<Matched> {
    let call = |stmt: &body::Stmt| {
        let class = env.values.get(stmt.results.first()?).copied().flatten()?;
        Some(Matched { op: stmt.op, class, origin: origins.get(&class).cloned() })
    };
    pattern.rule.left.iter().filter_map(call).collect()
}

type Made = Vec<(Id, super::language::Node)>;

/// Builds the right side and unites each root with it. `None` when that says nothing new; an error
/// says why it does not hold.
fn apply(
    imported: &mut Imported<'_>,
    pattern: &Pattern<'_>,
    mut env: body::Env<Id>,
    site: &Origin,
) -> Result<Option<Made>, String> {
    let rule = pattern.rule;
    let value = |env: &body::Env<Id>, name: &String| {
        let value = env.values.get(name).copied().flatten();
        value.ok_or_else(|| format!("`{name}` has no value"))
    };
    let left = rule.roots.iter().map(|n| value(&env, n)).collect::<Result<Vec<_>, _>>()?;
    imported.graph.added.clear();
    let built = body::apply(&rule.right, &mut imported.graph, &mut env);
    let added = std::mem::take(&mut imported.graph.added);
    built.map_err(|e| format!("the right side does not type: {e}"))?;
    let right = rule.roots.iter().map(|n| value(&env, n)).collect::<Result<Vec<_>, _>>()?;
    for ((name, a), b) in rule.roots.iter().zip(&left).zip(&right) {
        let (want, found) = (imported.graph.ty(*a), imported.graph.ty(*b));
        if want != found {
            return Err(format!("`{name}` is {want} on the left and {found} on the right"));
        }
    }
    let mut made = Vec::new();
    for (id, node, name) in added {
        if node.call().is_some() {
            made.push((id, node));
        }
        let name = if rule.roots.contains(&name) { "" } else { &name };
        imported.made(id, site, name);
    }
    let mut changed = false;
    for (a, b) in left.iter().zip(&right) {
        changed |= imported.graph.egg.union_trusted(*a, *b, rule.name.as_str());
    }
    Ok(changed.then_some(made))
}

/// What a name of a match stands for: a value's name and type, or an attribute.
fn describe(imported: &Imported<'_>, origins: &Origins, name: &str, env: &body::Env<Id>) -> String {
    if let Some(attr) = env.attrs.get(name) {
        return attr.to_string();
    }
    match env.values.get(name).copied().flatten() {
        Some(id) => {
            let shown = origins.get(&id).map_or("?", |o| &o.name);
            let ty = imported.graph.value_type(id).map(|t| format!(" : {t}"));
            format!("%{shown}{}", ty.unwrap_or_default())
        }
        None => "none".to_owned(),
    }
}
