//! `rings`: rows that no token will see again are not kept.

use std::collections::BTreeMap;

use infernum_ir::{Graph, Module, NodeKind, Param, StateKind, Type, ValueId, state_kinds};

use crate::Pass;

pub(crate) const PASS: Pass = Pass {
    name: "rings",
    doc: "keeps the cache's rows only as long as the masks of a layer let tokens see them",
    run: |module, _| {
        let kinds = state_kinds(module);
        let of_layer: BTreeMap<u32, StateKind> = (module.schedule.iter())
            .filter_map(|site| Some((site.layer?, *kinds.get(site.graph)?)))
            .collect();
        let graphs = module.graphs.iter().zip(&kinds);
        let graphs = graphs.map(|(graph, own)| keep_windows(graph, *own, &of_layer)).collect();
        Ok(Module { graphs, ..module.clone() })
    },
};

/// The graph with planes of these kinds: its layer's own, and those of others.
fn keep_windows(graph: &Graph, own: StateKind, of_layer: &BTreeMap<u32, StateKind>) -> Graph {
    let mut graph = graph.clone();
    let mut kinds: BTreeMap<ValueId, StateKind> = BTreeMap::new();
    for node in 0..graph.len() {
        for result in 0..graph.node(node).types.len() {
            let value = ValueId { node, result };
            let kind = match &graph.node(node).kind {
                NodeKind::Param(Param::Shared { layer, .. }) => of_layer.get(layer).copied(),
                NodeKind::Param(_) => Some(own),
                NodeKind::Op { .. } => {
                    graph.state_source(value).and_then(|from| kinds.get(&from).copied())
                }
            };
            if let (Some(kind), Type::State(state)) =
                (kind, &mut graph.node_mut(node).types[result])
                && !state.is_slot()
            {
                state.kind = kind;
                kinds.insert(value, kind);
            }
        }
    }
    graph
}
