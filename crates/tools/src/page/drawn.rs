//! A graph as the page draws it.

use std::collections::BTreeMap;

use infernum_ir::{Graph, Node, NodeKind, Param, StepInput, Type, ValueId};
use serde::Serialize;

use super::layout::layout;

/// Characters of a line in a node; longer ones are cut, and whole in the details.
const COLUMNS: usize = 34;
/// Width of a character, and height of a line.
const TEXT: (f64, f64) = (7.3, 16.0);
/// Space around the text of a node.
const PADDING: (f64, f64) = (10.0, 7.0);

/// A graph with places.
#[derive(Serialize)]
pub(super) struct Drawn {
    size: [i64; 2],
    nodes: Vec<DrawnNode>,
    edges: Vec<DrawnEdge>,
}

#[derive(Serialize)]
struct DrawnNode {
    /// Upper left corner, width and height.
    rect: [i64; 4],
    /// What stands in it.
    lines: Vec<String>,
    op: String,
    /// `op`, `free` (a view: it costs nothing) or `input`.
    kind: &'static str,
    /// Name and type of each result.
    results: Vec<String>,
    /// Constant operands, as they are computed at load.
    constants: Vec<[String; 2]>,
    attrs: Vec<[String; 2]>,
    loc: Option<String>,
    cost_us: f64,
    groups: Vec<usize>,
}

#[derive(Serialize)]
struct DrawnEdge {
    from: usize,
    to: usize,
    value: String,
    points: Vec<[i64; 2]>,
}

/// Draws all of a graph that is not constant. `cost` prices a node, `groups` says which groups it is
/// in.
pub(super) fn draw(
    graph: &Graph,
    cost: &dyn Fn(usize) -> f64,
    groups: &dyn Fn(usize) -> Vec<usize>,
) -> Drawn {
    let shown = graph.nodes().filter(|(index, node)| !is_constant(node) && used(graph, *index));
    let mut nodes: Vec<(usize, DrawnNode)> = shown
        .map(|(index, node)| {
            let drawn =
                DrawnNode { groups: groups(index), ..node_of(graph, index, node, cost(index)) };
            (index, drawn)
        })
        .collect();
    let place: BTreeMap<usize, usize> =
        nodes.iter().enumerate().map(|(at, (index, _))| (*index, at)).collect();
    let mut links: BTreeMap<(usize, usize), Vec<String>> = BTreeMap::new();
    for (to, (index, _)) in nodes.iter().enumerate() {
        for value in graph.operands(*index).into_iter().flatten() {
            if let Some(&from) = place.get(&value.node) {
                links.entry((from, to)).or_default().push(value_of(graph, value));
            }
        }
    }
    let sizes: Vec<(f64, f64)> = nodes.iter().map(|(_, n)| size(n)).collect();
    let pairs: Vec<(usize, usize)> = links.keys().copied().collect();
    let laid = layout(&sizes, &pairs);
    for ((_, node), (at, size)) in nodes.iter_mut().zip(laid.nodes.iter().zip(&sizes)) {
        node.rect = [at.0, at.1, size.0, size.1].map(whole);
    }
    let edge = |((link, values), points): ((_, Vec<String>), Vec<(f64, f64)>)| {
        let (from, to): (usize, usize) = link;
        let points = points.into_iter().map(|p| [whole(p.0), whole(p.1)]).collect();
        DrawnEdge { from, to, value: values.join(", "), points }
    };
    Drawn {
        size: [whole(laid.size.0), whole(laid.size.1)],
        edges: links.into_iter().zip(laid.edges).map(edge).collect(),
        nodes: nodes.into_iter().map(|(_, node)| node).collect(),
    }
}

fn whole(x: f64) -> i64 {
    x.round() as i64
}

fn size(node: &DrawnNode) -> (f64, f64) {
    let widest = node.lines.iter().map(|l| l.chars().count()).max().unwrap_or(0);
    let (width, height) = (widest as f64 * TEXT.0, node.lines.len() as f64 * TEXT.1);
    (width + 2.0 * PADDING.0, height + 2.0 * PADDING.1)
}

fn is_constant(node: &Node) -> bool {
    node.types.iter().all(|t| matches!(t, Type::Tensor(t) if t.constant))
}

/// Parameters that nothing takes would only be in the way.
fn used(graph: &Graph, index: usize) -> bool {
    let node = graph.node(index);
    let values = (0..node.names.len()).map(|result| ValueId { node: index, result });
    matches!(node.kind, NodeKind::Op { .. })
        || values.into_iter().any(|v| graph.users(v).next().is_some())
}

fn node_of(graph: &Graph, index: usize, node: &Node, cost_us: f64) -> DrawnNode {
    let result = |(name, ty): (&String, &Type)| format!("%{name} : {ty}");
    let results: Vec<String> = node.names.iter().zip(&node.types).map(result).collect();
    let (op, kind, attrs) = match &node.kind {
        NodeKind::Op { op, attrs } => {
            let attrs = op.attrs.iter().zip(attrs);
            let attrs = attrs.map(|(def, attr)| [def.name.to_owned(), attr.to_string()]);
            let kind = if cost_us > 0.0 { "op" } else { "free" };
            (op.name.to_owned(), kind, attrs.collect())
        }
        NodeKind::Param(param) => (source(param), "input", Vec::new()),
    };
    let mut lines = if kind == "input" { Vec::new() } else { vec![op.clone()] };
    lines.extend(node.names.iter().map(|n| cut(&format!("%{n}"))));
    if let [ty] = &node.types[..] {
        lines.push(cut(&ty.to_string()));
    }
    DrawnNode {
        rect: [0; 4],
        lines,
        op,
        kind,
        results,
        constants: constants(graph, index),
        attrs,
        loc: node.loc.as_ref().map(ToString::to_string),
        cost_us,
        groups: Vec::new(),
    }
}

fn source(param: &Param) -> String {
    match param {
        Param::Step(input) => {
            let known = StepInput::ALL.iter().find(|(i, _)| i == input);
            format!("step input {}", known.map_or("", |(_, name)| name))
        }
        Param::Carry(_) => "from the layer before".to_owned(),
        Param::Weight(weight) => weight.name.clone(),
        Param::Bank(name) => format!("adapters' {name}"),
        Param::State(plane) => format!("cache plane {plane}"),
        Param::Shared { plane, layer } => format!("cache plane {plane} of layer {layer}"),
    }
}

fn constants(graph: &Graph, index: usize) -> Vec<[String; 2]> {
    let NodeKind::Op { op, .. } = graph.node(index).kind else { return Vec::new() };
    let operands = op.operands.iter().zip(graph.operands(index));
    let constant = operands.filter_map(|(def, v)| v.map(|v| (def.name, v)));
    constant
        .filter(|(_, v)| is_constant(graph.node(v.node)))
        .map(|(name, v)| [name.to_owned(), constant_of(graph, v, 0)])
        .collect()
}

/// How a constant is computed from weights.
fn constant_of(graph: &Graph, value: ValueId, depth: usize) -> String {
    match &graph.node(value.node).kind {
        NodeKind::Op { op, .. } if depth < 4 => {
            let operands = graph.operands(value.node).into_iter().flatten();
            let operands: Vec<_> = operands.map(|v| constant_of(graph, v, depth + 1)).collect();
            format!("{}({})", op.name, operands.join(", "))
        }
        _ => value_of(graph, value),
    }
}

fn value_of(graph: &Graph, value: ValueId) -> String {
    format!("%{} : {}", graph.value_name(value), graph.ty(value))
}

fn cut(line: &str) -> String {
    if line.chars().count() <= COLUMNS {
        return line.to_owned();
    }
    line.chars().take(COLUMNS - 1).chain(['…']).collect()
}
