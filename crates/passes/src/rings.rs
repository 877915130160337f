//! `rings`: rows that no token will see again are not kept.

use infernum_ir::{Graph, Module, StateKind, Type, state_kind};

use crate::Pass;

pub(crate) const PASS: Pass = Pass {
    name: "rings",
    doc: "keeps the cache's rows only as long as the masks of a layer let tokens see them",
    run: |module, _| {
        let graphs = module.graphs.iter().map(keep_windows).collect();
        Ok(Module { graphs, ..module.clone() })
    },
};

fn keep_windows(graph: &Graph) -> Graph {
    let mut graph = graph.clone();
    let kind = state_kind(&graph);
    if kind == StateKind::Paged {
        return graph;
    }
    for node in 0..graph.len() {
        for ty in &mut graph.node_mut(node).types {
            if let Type::State(state) = ty
                && !state.is_slot()
            {
                state.kind = kind;
            }
        }
    }
    graph
}
