//! Which calls of a fused graph stand for which calls of the graph before.

use std::collections::{BTreeMap, BTreeSet};

use infernum_ir::{Graph, NodeKind, ValueId};

/// Calls that compute the same values before and after fusion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Group {
    /// Nodes of the graph before.
    pub before: BTreeSet<usize>,
    /// Nodes of the graph after.
    pub after: BTreeSet<usize>,
}

/// Groups the calls of two graphs of which one was made from the other: values that both have keep
/// their names. Calls of `after` that pass each other values that `before` does not have are one
/// group; it replaces what `before` computes between the values that both have. Calls that are in
/// both graphs as they were are in no group. A call of `before` that is now computed twice is in two.
pub fn groups(before: &Graph, after: &Graph) -> Vec<Group> {
    let shared = |value: ValueId| {
        let found = before.find(after.value_name(value))?;
        (before.ty(found) == after.ty(value)).then_some(found)
    };
    let values = |index: usize| {
        let results = 0..after.node(index).names.len();
        results.map(move |result| ValueId { node: index, result })
    };
    let stop: BTreeSet<ValueId> =
        after.nodes().flat_map(|(index, _)| values(index)).filter_map(shared).collect();

    let mut members: BTreeMap<usize, Group> = BTreeMap::new();
    for (index, root) in connected(after, &|value| shared(value).is_some()) {
        let group = members.entry(root).or_default();
        group.after.insert(index);
        let mut open: Vec<ValueId> = values(index).filter_map(shared).collect();
        while let Some(value) = open.pop() {
            if is_call(before, value.node) && group.before.insert(value.node) {
                let operands = before.operands(value.node).into_iter().flatten();
                open.extend(operands.filter(|v| !stop.contains(v)));
            }
        }
    }
    members.into_values().filter(|group| !unchanged(group, before, after)).collect()
}

/// Each call with the first call that it is connected to by values that are not shared.
fn connected(graph: &Graph, shared: &dyn Fn(ValueId) -> bool) -> Vec<(usize, usize)> {
    let mut roots: Vec<usize> = (0..graph.len()).collect();
    for (index, _) in graph.nodes() {
        for value in graph.operands(index).into_iter().flatten() {
            if is_call(graph, value.node) && !shared(value) {
                let (a, b) = (roots[index], roots[value.node]);
                roots.iter_mut().filter(|r| **r == a.max(b)).for_each(|r| *r = a.min(b));
            }
        }
    }
    roots.into_iter().enumerate().filter(|(index, _)| is_call(graph, *index)).collect()
}

fn is_call(graph: &Graph, index: usize) -> bool {
    matches!(graph.node(index).kind, NodeKind::Op { .. })
}

fn unchanged(group: &Group, before: &Graph, after: &Graph) -> bool {
    let ops = |graph: &Graph, nodes: &BTreeSet<usize>| {
        let kinds = nodes.iter().map(|&n| graph.node(n).kind.clone());
        kinds.collect::<Vec<_>>()
    };
    ops(before, &group.before) == ops(after, &group.after)
}
