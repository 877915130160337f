//! Within a layer that departs: which op does.
//!
//! Values of ours are matched with theirs in two ways. By name: a value that an op computes with a weight is what the
//! module of that weight gives, its operand what that module is given, and the N-th call of a function is one of the
//! values that the op of that name gives. A value so matched agrees or departs. By what they hold: a value equal to
//! anything of theirs agrees, whatever it is called there. The first that departs is looked up in the
//! graph, backwards, as far as values agree: what lies between is what may be wrong.

use std::collections::{BTreeMap, BTreeSet};

use infernum_ir::{Graph, NodeKind, Param, Type, ValueId};
use infernum_runtime::Observed;
use serde::Serialize;

use super::compare::{Figures, Spread, compare};
use super::dump::{Dump, Theirs};

/// A value of the layer.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    /// Its name in the IR.
    pub(crate) value: String,
    /// The op that gives it.
    pub(crate) op: &'static str,
    /// Where the spec says so.
    pub(crate) at: Option<String>,
    pub(crate) shape: Vec<usize>,
    pub(crate) spread: Spread,
    /// What it was compared with.
    pub(crate) theirs: Option<String>,
    pub(crate) figures: Option<Figures>,
    /// Whether it departs; `None` where there is nothing to compare it with.
    pub(crate) departs: Option<bool>,
}

/// What is known of where it departs.
#[derive(Debug, Serialize)]
pub(crate) struct Found {
    /// All values of the layer, in order.
    pub(crate) rows: Vec<Row>,
    /// The first that departs, by its place among the rows.
    pub(crate) first: usize,
    /// It, and what led to it from values that agree; in order.
    pub(crate) suspects: Vec<usize>,
}

/// A stage that departs: its name, its graph, and what the graph's values are.
pub(crate) struct Stage<'a> {
    pub(crate) name: &'a str,
    pub(crate) graph: &'a Graph,
    pub(crate) values: &'a [Observed],
    /// What the stage gives, which is known to depart.
    pub(crate) result: ValueId,
}

/// The values that ops of a graph compute in a step, not from constants alone.
pub(crate) fn computed(graph: &Graph) -> Vec<ValueId> {
    let of = |(node, n): (usize, &infernum_ir::Node)| {
        let is_op = matches!(n.kind, NodeKind::Op { .. });
        let tensor = |ty: &Type| matches!(ty, Type::Tensor(t) if !t.constant);
        let results: Vec<usize> =
            (0..n.types.len()).filter(|&r| is_op && tensor(&n.types[r])).collect();
        results.into_iter().map(move |result| ValueId { node, result })
    };
    graph.nodes().flat_map(of).collect()
}

/// Looks for the op.
pub(crate) fn locate(stage: &Stage<'_>, dump: &Dump, tolerance: f64) -> Found {
    let Stage { graph, result, .. } = *stage;
    let values: BTreeMap<ValueId, &Observed> = computed(graph)
        .into_iter()
        .filter_map(|v| {
            let name = graph.value_name(v);
            stage.values.iter().find(|o| o.name == name).map(|o| (v, o))
        })
        .collect();
    let mut matched = by_name(stage, dump, &values);
    if let Some(ours) = values.get(&result)
        && let Some(theirs) = dump.find(stage.name, ours.data.len())
    {
        matched.insert(result, (stage.name.to_owned(), figures(ours, &theirs)));
    }
    by_content(stage, dump, &values, &mut matched, tolerance);
    let order: Vec<ValueId> = values.keys().copied().collect();
    let rows: Vec<Row> =
        order.iter().map(|v| row(graph, *v, values[v], matched.remove(v), tolerance)).collect();
    let departs = |i: &usize| rows[*i].departs == Some(true);
    let end = order.iter().position(|v| *v == result).unwrap_or(order.len().saturating_sub(1));
    let first = (0..rows.len()).find(departs).unwrap_or(end);
    let suspects = match order.get(first) {
        Some(value) => suspects(graph, *value, &order, &rows),
        None => Vec::new(),
    };
    Found { rows, first, suspects }
}

fn figures(ours: &Observed, theirs: &Theirs) -> Figures {
    let shape: Vec<u64> = ours.shape.iter().map(|d| *d as u64).collect();
    compare((&shape, &ours.data), theirs)
}

fn row(
    graph: &Graph,
    v: ValueId,
    ours: &Observed,
    matched: Option<(String, Figures)>,
    tolerance: f64,
) -> Row {
    let node = graph.node(v.node);
    let (theirs, figures) = matched.unzip();
    Row {
        value: ours.name.clone(),
        op: if let NodeKind::Op { op, .. } = &node.kind { op.name } else { "" },
        at: node.loc.as_ref().map(ToString::to_string),
        shape: ours.shape.clone(),
        spread: Spread::of(&ours.data),
        theirs,
        departs: figures.map(|f: Figures| f.departs(tolerance)),
        figures,
    }
}

type Matched = BTreeMap<ValueId, (String, Figures)>;

/// Matches values with what modules of theirs give and are given, and with what functions give.
fn by_name(stage: &Stage<'_>, dump: &Dump, values: &BTreeMap<ValueId, &Observed>) -> Matched {
    let graph = stage.graph;
    let mut found = Matched::new();
    let mut keep = |name: &str, candidates: &[ValueId]| {
        let of = |v: &ValueId| {
            let ours = values.get(v)?;
            Some((
                *v,
                figures(ours, &dump.find(&format!("{}{name}", stage.name), ours.data.len())?),
            ))
        };
        let best = candidates.iter().filter_map(of).min_by(|a, b| a.1.nmse.total_cmp(&b.1.nmse));
        if let Some((v, figures)) = best {
            found.entry(v).or_insert((name[1..].to_owned(), figures));
        }
    };
    let names = dump.within(stage.name);
    let last = |name: &str| name.rsplit(['.', '/']).next().unwrap_or_default().to_owned();
    let by_module = modules(graph);
    for given in [false, true] {
        for name in names.iter().filter(|n| n.starts_with('/') && n.ends_with('<') == given) {
            let path = name[1..].trim_end_matches('<');
            // What computes with a weight of a module that has others within is a part of it.
            let within = |n: &&str| n[1..].strip_prefix(path).is_some_and(|n| n.starts_with('.'));
            if names.iter().any(within) {
                continue;
            }
            // Outside of layers checkpoints and modules may name what is around a module differently.
            let same = |(module, in_layer): &(String, bool)| {
                if *in_layer { module == path } else { last(module) == last(path) }
            };
            let nodes = by_module.iter().filter(|(module, _)| same(module)).map(|(_, node)| *node);
            let value = |node: usize| {
                let first = || graph.operands(node).first().copied().flatten();
                if given { first() } else { Some(ValueId { node, result: 0 }) }
            };
            keep(name, &nodes.filter_map(value).collect::<Vec<_>>());
        }
    }
    for name in names.iter().filter(|n| n.starts_with(':')) {
        let op = name[1..].split('.').next().unwrap_or_default();
        let gives = |v: &&ValueId| matches!(&graph.node(v.node).kind, NodeKind::Op { op: found, .. } if found.name == op);
        keep(name, &values.keys().filter(gives).copied().collect::<Vec<_>>());
    }
    found
}

/// The nodes that compute with weights, by the module of the weight: its path, within the layer if it is in one.
fn modules(graph: &Graph) -> Vec<((String, bool), usize)> {
    // Constants that are made of weights stand for them.
    let mut weights: BTreeMap<usize, &str> = BTreeMap::new();
    let mut found = Vec::new();
    for (i, node) in graph.nodes() {
        if let NodeKind::Param(Param::Weight(weight)) = &node.kind {
            weights.insert(i, &weight.name);
            continue;
        }
        let operands = graph.operands(i);
        let Some(name) = operands.iter().flatten().find_map(|v| weights.get(&v.node)).copied()
        else {
            continue;
        };
        if matches!(&node.types[0], Type::Tensor(t) if t.constant) {
            weights.insert(i, name);
            continue;
        }
        let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
        let inside = module.split_once("{layer}.");
        found.push(((inside.map_or(module, |(_, path)| path).to_owned(), inside.is_some()), i));
    }
    found
}

/// Matches what is left with whatever of theirs is equal.
fn by_content(
    stage: &Stage<'_>,
    dump: &Dump,
    values: &BTreeMap<ValueId, &Observed>,
    matched: &mut Matched,
    tolerance: f64,
) {
    let names = dump.within(stage.name);
    let mut known: BTreeMap<usize, Vec<(&str, Theirs)>> = BTreeMap::new();
    for (v, ours) in values {
        let size = ours.data.len();
        let theirs = known.entry(size).or_insert_with(|| {
            let read = |name| Some((name, dump.find(&format!("{}{name}", stage.name), size)?));
            names.iter().copied().filter_map(read).collect()
        });
        if matched.contains_key(v) {
            continue;
        }
        let near = theirs.iter().map(|(name, theirs)| (*name, figures(ours, theirs)));
        let best = near.min_by(|a, b| a.1.nmse.total_cmp(&b.1.nmse));
        if let Some((name, figures)) = best.filter(|(_, f)| !f.departs(tolerance)) {
            matched.insert(*v, (name[1..].to_owned(), figures));
        }
    }
}

/// `value` and what it is made of, as far back as values that agree.
fn suspects(graph: &Graph, value: ValueId, order: &[ValueId], rows: &[Row]) -> Vec<usize> {
    let (mut seen, mut found) = (BTreeSet::new(), BTreeSet::new());
    let mut open = vec![value];
    while let Some(v) = open.pop() {
        if !seen.insert(v) {
            continue;
        }
        let place = order.iter().position(|o| *o == v);
        if let Some(i) = place {
            if rows[i].departs == Some(false) {
                continue;
            }
            found.insert(i);
        }
        open.extend(graph.operands(v.node).into_iter().flatten());
    }
    found.into_iter().collect()
}
