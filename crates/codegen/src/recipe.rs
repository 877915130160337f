//! Constant values become recipes.

use infernum_ir::{Attr, Graph, Memory, NodeKind, Param, Type, ValueId, in_layer};

use crate::plan::{Recipe, Weight};

/// Nodes of one recipe: a tree, so that a graph that shares its constants may unfold without end.
const MAX_NODES: usize = 1 << 16;

/// The constant `value` of one layer; `None` if its recipe is too large. The graph is well typed,
/// so that everything a constant is computed from is constant.
pub(crate) fn weight(graph: &Graph, value: ValueId, layer: Option<u32>) -> Option<Weight> {
    unfold(graph, value, layer, &mut 0)
}

fn unfold(graph: &Graph, value: ValueId, layer: Option<u32>, nodes: &mut usize) -> Option<Weight> {
    *nodes += 1;
    if *nodes > MAX_NODES {
        return None;
    }
    let node = graph.node(value.node);
    let Type::Tensor(ty) = node.types[value.result].clone() else { return None };
    let recipe = match &node.kind {
        NodeKind::Param(Param::Weight(w)) => {
            let mut tensors: Vec<_> = w.tensors(layer).into_iter().map(Recipe::Tensor).collect();
            match w.stack {
                Some(_) => Recipe::Stack(tensors),
                None => tensors.pop()?,
            }
        }
        NodeKind::Param(Param::Bank(name)) => Recipe::Bank(in_layer(name, layer)),
        NodeKind::Param(_) => return None,
        NodeKind::Op { op, attrs } => {
            let operands = graph.operands(value.node).into_iter();
            let operands: Vec<Option<Weight>> = operands
                .map(|v| v.map(|v| unfold(graph, v, layer, nodes).ok_or(())).transpose())
                .collect::<Result<_, ()>>()
                .ok()?;
            if op.memory == Memory::Concat && attrs[..] == [Attr::Int(0)] {
                Recipe::Concat(operands.into_iter().flatten().collect())
            } else {
                let types = node.types.iter().map(|t| t.tensor().cloned());
                Recipe::Op {
                    op: op.name.to_owned(),
                    attrs: attrs.clone(),
                    operands,
                    types: types.collect::<Result<_, _>>().ok()?,
                    result: value.result as u32,
                }
            }
        }
    };
    Some(Weight { ty, recipe })
}
