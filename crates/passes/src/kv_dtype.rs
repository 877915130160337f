//! What rows of the KV cache are stored in.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use infernum_ir::encoding::quantised_rows::quantised_heads;
use infernum_ir::{Graph, Module, NodeKind, Op, Type, ValueId};

/// What rows of the KV cache are stored in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvDtype {
    /// Elements of activations' type, as they are written.
    #[default]
    Auto,
    /// `f8e4m3`, each head of a row with a scale of its own.
    Fp8,
}

impl KvDtype {
    /// Every choice, by name.
    const ALL: [(&'static str, KvDtype); 2] = [("auto", KvDtype::Auto), ("fp8", KvDtype::Fp8)];
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = KvDtype::ALL.iter().find(|(_, one)| one == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

impl FromStr for KvDtype {
    type Err = String;

    fn from_str(text: &str) -> Result<KvDtype, String> {
        let found = KvDtype::ALL.iter().find(|(name, _)| *name == text);
        let names = KvDtype::ALL.map(|(name, _)| name).join(" or ");
        found.map(|(_, one)| *one).ok_or_else(|| format!("expected {names}, found `{text}`"))
    }
}

/// The module with its planes of rows stored so. That is a matter of their type alone: what writes a plane rounds, what reads
/// it gets values of the type that was written, so that everything after this, rules and layouts too, is as it was. An error where rows
/// are not what attention takes as keys and values: kernels for others (such as latents of which both are made) know no codes.
pub fn store_rows(module: &Module, dtype: KvDtype) -> Result<Module, String> {
    if dtype == KvDtype::Auto {
        return Ok(module.clone());
    }
    let mut found = 0;
    let mut module = module.clone();
    for graph in &mut module.graphs {
        found += encode(graph).map_err(|e| format!("graph `{}`: {e}", graph.name))?;
    }
    match found {
        0 => Err(format!("`{dtype}` is for caches of keys and values, and the model has none")),
        _ => Ok(module),
    }
}

/// Encodes the planes of a graph; how many there are.
fn encode(graph: &mut Graph) -> Result<usize, String> {
    let mut planes = 0;
    for node in 0..graph.len() {
        let reads =
            matches!(&graph.node(node).kind, NodeKind::Op { op, .. } if op.name == "kv_read");
        if reads && let Some(taken) = stranger(graph, node) {
            let value = graph.value_name(ValueId { node, result: 0 });
            return Err(format!(
                "`{KV}` is for rows that attention takes as keys or values, and `%{value}` goes to `{taken}`",
                KV = KvDtype::Fp8
            ));
        }
        for result in 0..graph.node(node).types.len() {
            let is_param = matches!(graph.node(node).kind, NodeKind::Param(_));
            if let Type::State(state) = &mut graph.node_mut(node).types[result]
                && !state.is_slot()
            {
                state.encoding = Some(quantised_heads().clone());
                planes += usize::from(is_param);
            }
        }
    }
    Ok(planes)
}

/// Ops that only move what they are given.
const MOVES: [&str; 4] = ["concat", "reshape", "slice", "transpose"];

/// An op that takes the rows that `read` yields, as they are, and is none that takes keys or values.
fn stranger(graph: &Graph, read: usize) -> Option<&'static str> {
    let mut seen = BTreeSet::new();
    let mut left = vec![read];
    while let Some(node) = left.pop() {
        for (user, operand) in graph.users(ValueId { node, result: 0 }) {
            let NodeKind::Op { op, .. } = &graph.node(user).kind else { continue };
            let is_taken = |op: &Op| matches!(op.name, "scores" | "mix") && operand == 1;
            if MOVES.contains(&op.name) {
                if seen.insert(user) {
                    left.push(user);
                }
            } else if !is_taken(op) {
                return Some(op.name);
            }
        }
    }
    None
}
