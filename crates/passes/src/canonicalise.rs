//! `canonicalise`: one form for equal things.
//!
//! Drops casts to the same type and reshapes to the same shape, collapses chains of reshapes,
//! merges equal computations, and removes what nothing uses.

use std::collections::HashMap;

use infernum_ir::{Attr, Dim, Effect, Graph, Memory, Module, Node, NodeKind, Param, Type, ValueId};

use crate::Pass;

pub(crate) const PASS: Pass = Pass {
    name: "canonicalise",
    doc: "drops no-op casts and reshapes, merges equal computations, removes dead ones",
    run: |module, _| Ok(canonicalise(module)),
};

fn canonicalise(module: &Module) -> Module {
    let graphs = module.graphs.iter().map(|g| sweep(&simplify(g))).collect();
    Module { graphs, ..module.clone() }
}

/// What makes two nodes compute the same.
#[derive(PartialEq, Eq, Hash)]
enum Key {
    Param(Param),
    Op(&'static str, Vec<Attr>, Vec<Option<ValueId>>),
}

fn simplify(graph: &Graph) -> Graph {
    let mut out = Graph::new(graph.name.clone());
    let mut map: HashMap<ValueId, ValueId> = HashMap::new();
    let mut seen: HashMap<Key, ValueId> = HashMap::new();
    for (index, node) in graph.nodes() {
        let operands: Vec<Option<ValueId>> =
            graph.operands(index).into_iter().map(|v| v.map(|v| map[&v])).collect();
        let new = match replacement(&out, node, &operands) {
            Some(value) => value,
            None => match key(node, &operands) {
                Some(key) => {
                    let new = seen.get(&key).copied();
                    let new = new.unwrap_or_else(|| out.add_node(node.clone(), &operands));
                    seen.insert(key, new);
                    new
                }
                None => out.add_node(node.clone(), &operands),
            },
        };
        for result in 0..node.types.len() {
            let to = ValueId { node: new.node, result: new.result + result };
            map.insert(ValueId { node: index, result }, to);
        }
    }
    out.set_results(graph.results().iter().map(|v| map[v]).collect());
    collapse_reshapes(&out)
}

/// The value that a no-op yields.
fn replacement(out: &Graph, node: &Node, operands: &[Option<ValueId>]) -> Option<ValueId> {
    let NodeKind::Op { op, .. } = &node.kind else { return None };
    let from = operands.first().copied().flatten()?;
    let keeps = op.memory == Memory::Converted || op.effect == Effect::View;
    let no_op = keeps && out.ty(from) == &node.types[0];
    no_op.then_some(from)
}

fn key(node: &Node, operands: &[Option<ValueId>]) -> Option<Key> {
    match &node.kind {
        NodeKind::Param(p) => Some(Key::Param(p.clone())),
        // A write is an event, not a value.
        NodeKind::Op { op, .. } if op.effect == Effect::Writes => None,
        NodeKind::Op { op, attrs } => Some(Key::Op(op.name, attrs.clone(), operands.to_vec())),
    }
}

/// A reshape of a reshape is one reshape of what the first one took.
fn collapse_reshapes(graph: &Graph) -> Graph {
    let mut out = Graph::new(graph.name.clone());
    let mut source: HashMap<ValueId, ValueId> = HashMap::new();
    for (index, node) in graph.nodes() {
        let mut operands = graph.operands(index);
        if let NodeKind::Op { op, .. } = &node.kind
            && op.effect == Effect::View
            && let Some(Some(from)) = operands.first_mut()
            && is_reshape(graph.ty(*from), &node.types[0])
        {
            *from = source.get(from).copied().unwrap_or(*from);
            source.insert(ValueId { node: index, result: 0 }, *from);
        }
        out.add_node(node.clone(), &operands);
    }
    out.set_results(graph.results().to_vec());
    out
}

/// Whether the same elements are counted alike on both sides, so that another shape may take them from further back.
fn is_reshape(from: &Type, to: &Type) -> bool {
    let count = |ty: &Type| Dim::product_of(&ty.tensor().ok()?.shape);
    count(from) == count(to)
}

/// Removes the nodes that no result depends on.
fn sweep(graph: &Graph) -> Graph {
    let mut live = vec![false; graph.len()];
    graph.results().iter().for_each(|v| live[v.node] = true);
    for index in (0..graph.len()).rev() {
        if live[index] {
            graph.operands(index).iter().flatten().for_each(|v| live[v.node] = true);
        }
    }
    let mut out = Graph::new(graph.name.clone());
    let mut map = vec![0; graph.len()];
    let moved = |v: ValueId, map: &[usize]| ValueId { node: map[v.node], result: v.result };
    for (index, node) in graph.nodes().filter(|(i, _)| live[*i]) {
        let operands: Vec<_> =
            graph.operands(index).into_iter().map(|v| v.map(|v| moved(v, &map))).collect();
        map[index] = out.add_node(node.clone(), &operands).node;
    }
    out.set_results(graph.results().iter().map(|v| moved(*v, &map)).collect());
    out
}

#[cfg(test)]
mod tests {
    use infernum_ir::{text, verify};

    use super::*;

    fn canonical(body: &str) -> String {
        let text = format!("module m\n\ngraph g {{\n{body}}}\n\nschedule g 0..1\n");
        let module = text::parse(&text, "test").expect("the test's own text");
        let out = canonicalise(&module);
        verify(&out).expect("a well-formed module stays so");
        text::print_graph(&out.graphs[0])
    }

    #[test]
    fn equal_computations_merge_and_dead_ones_go() {
        let out = canonical(
            "  %t = step tokens : u32[T]
  %w = weight \"w\" : const f32[8, 4]
  %a = embedding(%t, %w) : f32[T, 4]
  %b = embedding(%t, %w) : f32[T, 4]
  %dead = silu(%a) : f32[T, 4]
  %y = add(%a, %b) : f32[T, 4]
  return %y\n",
        );
        assert!(out.contains("%y = add(%a, %a)"), "{out}");
        assert!(!out.contains("%b") && !out.contains("%dead"), "{out}");
    }

    #[test]
    fn no_op_casts_and_reshape_chains_go() {
        let out = canonical(
            "  %t = step tokens : u32[T]
  %w = weight \"w\" : const f32[8, 4]
  %a = embedding(%t, %w) : f32[T, 4]
  %c = cast(%a) {dtype: f32} : f32[T, 4]
  %r = reshape(%c) {shape: [T, 2, 2]} : f32[T, 2, 2]
  %s = reshape(%r) {shape: [T, 4, 1]} : f32[T, 4, 1]
  return %s\n",
        );
        assert!(!out.contains("cast"), "{out}");
        assert!(out.contains("%s = reshape(%a) {shape: [T, 4, 1]}"), "{out}");
        assert_eq!(out.matches("reshape").count(), 1, "{out}");
    }

    #[test]
    fn writes_never_merge() {
        let out = canonical(
            "  %t = step tokens : u32[T]
  %w = weight \"w\" : const f32[8, 4]
  %k = state k : state f32[2, 2]
  %v = state v : state f32[2, 2]
  %a = embedding(%t, %w) : f32[T, 4]
  %r = reshape(%a) {shape: [T, 2, 2]} : f32[T, 2, 2]
  %k1 = kv_write(%k, %r) : state f32[2, 2]
  %v1 = kv_write(%v, %r) : state f32[2, 2]
  return %a, %k1, %v1\n",
        );
        assert_eq!(out.matches("kv_write").count(), 2, "{out}");
    }
}
