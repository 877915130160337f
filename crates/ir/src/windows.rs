//! How far back a graph reads the planes of the cache.
//!
//! A mask with a window makes what lies further back the same number, whatever the rows there hold: -inf, which a
//! softmax makes 0, by which a mix multiplies values. So two things are followed from each plane on: whose rows
//! a value is made of, row by row, and beyond which window a ragged value is one known number.

use std::collections::{BTreeMap, BTreeSet};

use crate::graph::{Graph, Module, NodeKind, ValueId};
use crate::ops::{Effect, Memory, Op, OpCall, Reads};
use crate::{Attr, Dim, Instance, StateKind, Sym, TensorType, Type};

/// Context rows, counted back from a token's own, that a token sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Window {
    /// The last so many, its own included.
    Rows(u64),
    /// Every row.
    All,
}

/// How far back each plane is read, by the graph's parameter; those that nothing reads are left out.
pub fn windows(graph: &Graph) -> BTreeMap<ValueId, Window> {
    let mut planes = Vec::new();
    let mut reads = Vec::new();
    for (value, param, _) in graph.params() {
        if param.plane().is_some() {
            planes.push(value);
        }
    }
    let given = |node: usize| {
        let plane = planes.iter().position(|v| v.node == node);
        plane.map_or_else(Origin::default, |plane| Origin {
            planes: BTreeSet::from([plane]),
            ..Origin::default()
        })
    };
    let values = of_graph(graph, &given, &mut reads);
    for v in graph.results().iter().filter(|v| matches!(graph.ty(**v), Type::Tensor(_))) {
        values[v.node][v.result].read(Window::All, &mut reads);
    }
    let mut found: BTreeMap<ValueId, Window> = BTreeMap::new();
    for (plane, window) in reads {
        let most = found.entry(planes[plane]).or_insert(window);
        *most = window.max(*most);
    }
    found
}

/// The kind of state that the planes of each graph's own layer need: a ring where nothing looks back beyond some window, in
/// that layer or in others that share its planes. Planes of a layer are read together, so that they are of one kind.
pub fn state_kinds(module: &Module) -> Vec<StateKind> {
    let mut most: Vec<Option<Window>> = vec![None; module.graphs.len()];
    for (own, graph) in module.graphs.iter().enumerate() {
        for (plane, window) in windows(graph) {
            let NodeKind::Param(param) = &graph.node(plane.node).kind else { continue };
            let layer = param.plane().and_then(|(layer, _)| layer);
            let others = module.schedule.iter().filter(|site| site.layer == layer);
            let others = others.map(|site| site.graph).filter(|_| layer.is_some());
            for owner in others.chain(layer.is_none().then_some(own)) {
                if let Some(most) = most.get_mut(owner) {
                    *most = (*most).max(Some(window));
                }
            }
        }
    }
    let kind = |most: Option<Window>| match most {
        Some(Window::Rows(rows)) => StateKind::Ring(rows),
        Some(Window::All) | None => StateKind::Paged,
    };
    most.into_iter().map(kind).collect()
}

/// What is known of a value.
#[derive(Clone, Debug, Default)]
struct Origin {
    /// Planes of which row `s` of a value `[S, ..]`, or element `[.., t, s]` of a ragged one, holds row `s`. Of a
    /// state, the plane that it is a version of.
    planes: BTreeSet<usize>,
    /// Of a ragged value: beyond so many rows every element is this number.
    beyond: Option<(u64, f64)>,
}

impl Origin {
    fn read(&self, window: Window, reads: &mut Vec<(usize, Window)>) {
        reads.extend(self.planes.iter().map(|plane| (*plane, window)));
    }
}

fn of_graph(
    graph: &Graph,
    given: &dyn Fn(usize) -> Origin,
    reads: &mut Vec<(usize, Window)>,
) -> Vec<Vec<Origin>> {
    let mut values: Vec<Vec<Origin>> = Vec::with_capacity(graph.len());
    for (i, node) in graph.nodes() {
        let origins = match &node.kind {
            NodeKind::Param(_) => vec![given(i)],
            NodeKind::Op { op, attrs } => {
                let operands = graph.operands(i);
                let types: Vec<_> = operands.iter().map(|v| v.map(|v| graph.ty(v))).collect();
                let of = |v: ValueId| values[v.node][v.result].clone();
                let origins: Vec<_> =
                    operands.iter().map(|v| v.map_or_else(Origin::default, of)).collect();
                let call = OpCall { op: *op, operands: &types, attrs };
                of_call(&call, &origins, &node.types, reads)
            }
        };
        values.push(origins);
    }
    values
}

fn of_call(
    call: &OpCall<'_>,
    operands: &[Origin],
    results: &[Type],
    reads: &mut Vec<(usize, Window)>,
) -> Vec<Origin> {
    if call.op.fused.is_some() {
        let Ok(body) = Instance::new(call) else {
            return unknown(operands, results, reads);
        };
        let given = |node: usize| {
            let i = body.params.iter().position(|p| p.is_some_and(|p| p.node == node));
            i.map_or_else(Origin::default, |i| operands[i].clone())
        };
        let values = of_graph(&body.graph, &given, reads);
        return body.results.iter().map(|v| values[v.node][v.result].clone()).collect();
    }
    let zero_beyond = |x: &Origin| match x.beyond {
        Some((rows, 0.0)) => Window::Rows(rows),
        _ => Window::All,
    };
    match (call.op.name, call.op.reads) {
        // The next version of a plane, or its rows.
        _ if call.op.effect == Effect::Writes => {
            operands[1..].iter().for_each(|x| x.read(Window::All, reads));
            let mut made = vec![Origin::default(); results.len()];
            made[0] = operands[0].clone();
            made
        }
        _ if call.op.effect == Effect::Reads => vec![operands[0].clone()],
        (_, Reads::Window(attr)) => vec![masked(&operands[0], call.maybe_int(attr), reads)],
        ("softmax", _) if is_ragged(&results[0]) => {
            operands.iter().for_each(|x| x.read(Window::All, reads));
            let hidden = operands[0].beyond.filter(|(_, x)| *x == f64::NEG_INFINITY);
            vec![Origin { beyond: hidden.map(|(rows, _)| (rows, 0.0)), ..Origin::default() }]
        }
        ("mix", _) => {
            operands[0].read(Window::All, reads);
            operands[1].read(zero_beyond(&operands[0]), reads);
            vec![Origin::default()]
        }
        ("scores", _) => {
            operands[0].read(Window::All, reads);
            vec![operands[1].clone()]
        }
        _ if results.len() == 1 && is_by_row(call, operands, &results[0]) => {
            let planes = operands.iter().flat_map(|x| x.planes.iter().copied()).collect();
            let beyond = is_ragged(&results[0]).then(|| mapped(call.op, call.attrs, operands));
            vec![Origin { planes, beyond: beyond.flatten() }]
        }
        _ => unknown(operands, results, reads),
    }
}

/// All of what it is made of is read.
fn unknown(operands: &[Origin], results: &[Type], reads: &mut Vec<(usize, Window)>) -> Vec<Origin> {
    operands.iter().for_each(|x| x.read(Window::All, reads));
    vec![Origin::default(); results.len()]
}

fn masked(x: &Origin, window: Option<u64>, reads: &mut Vec<(usize, Window)>) -> Origin {
    let hidden = x.beyond.filter(|(_, x)| *x == f64::NEG_INFINITY).map(|(rows, _)| rows);
    let Some(rows) = window.into_iter().chain(hidden).min() else { return x.clone() };
    x.read(Window::Rows(rows), reads);
    Origin { planes: BTreeSet::new(), beyond: Some((rows, f64::NEG_INFINITY)) }
}

fn is_ragged(ty: &Type) -> bool {
    ty.tensor().is_ok_and(TensorType::is_ragged)
}

/// Whether row `s` of the result, or element `[t, s]`, is made of the same of each operand that has rows of the
/// cache. No op moves rows along an axis that it keeps whole, but those that look rows up.
fn is_by_row(call: &OpCall<'_>, operands: &[Origin], result: &Type) -> bool {
    let by_row = |ty: &Type| {
        ty.tensor().is_ok_and(|t| t.shape.first() == Some(&Dim::sym(Sym::S)) && t.rank() > 1)
    };
    let made_of = operands.iter().zip(call.operands).filter(|(x, _)| !x.planes.is_empty());
    let alike = |ty: &Type| (by_row(result) && by_row(ty)) || (is_ragged(result) && is_ragged(ty));
    let elementwise = !is_ragged(result)
        || call.op.memory == Memory::Converted
        || call.op.pointwise(call.attrs).is_some();
    elementwise
        && !matches!(call.op.memory, Memory::Lookup { .. })
        && made_of.into_iter().all(|(_, ty)| ty.is_some_and(alike))
}

/// What an elementwise op makes of what is one number beyond a window.
fn mapped(op: Op, attrs: &[Attr], operands: &[Origin]) -> Option<(u64, f64)> {
    if op.memory == Memory::Converted {
        return operands.first()?.beyond;
    }
    let given = operands.iter().take_while(|x| x.beyond.is_some()).count();
    let all: Vec<(u64, f64)> = operands[..given].iter().filter_map(|x| x.beyond).collect();
    let rows = all.iter().map(|(rows, _)| *rows).max()?;
    let mut args: Vec<f64> = all.iter().map(|(_, x)| *x).collect();
    // What is not known must not matter.
    args.resize(operands.len(), f64::NAN);
    let y = op.pointwise_fn(attrs)?.ok()?.eval(&args);
    // Rounding keeps these.
    (y == 0.0 || y == f64::NEG_INFINITY).then_some((rows, y))
}
