//! What the integers of a module count, and what they pick rows of.
//!
//! Ids of tokens, positions and choices of experts pick rows of tables. Where both are known before
//! anything runs, a pick that could go beyond its table is a mistake in the module.

use std::collections::{HashMap, HashSet};

use crate::graph::{Graph, Module, NodeKind, Param, StepInput, ValueId};
use crate::ops::{Effect, Op, OpCall};
use crate::{Attr, Dim, Instance, Sym, Type};

/// What the elements of an integer tensor are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Indices {
    /// Ids of tokens: below the vocabulary.
    Tokens,
    /// Places in a sequence: below its length.
    Positions,
    /// Tokens of the step.
    OutputRows,
    /// Below a number.
    Below(u64),
    /// Not known before it runs.
    Unknown,
}

/// A use of integers to pick rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowPick {
    /// Index into [`Module::graphs`].
    pub graph: usize,
    /// The node whose op picks.
    pub node: usize,
    /// What it picks by.
    pub by: Indices,
    /// How many rows there are to pick from.
    pub rows: Dim,
}

impl RowPick {
    /// Why it may pick what is not there, where that can be told without a step.
    pub fn fault(self) -> Option<String> {
        let rows = self.rows;
        let fits = match (self.by, rows) {
            (Indices::Unknown, _) | (Indices::Tokens | Indices::Positions, Dim::Const(_)) => true,
            (Indices::OutputRows, _) => rows == Dim::sym(Sym::T),
            (Indices::Below(n), Dim::Const(rows)) => n <= rows,
            (Indices::Tokens | Indices::Positions | Indices::Below(_), Dim::Sym { .. }) => false,
        };
        let by = match self.by {
            _ if fits => return None,
            Indices::Tokens => "ids of tokens".to_owned(),
            Indices::Positions => "positions".to_owned(),
            Indices::OutputRows => "rows of the step's T tokens".to_owned(),
            Indices::Below(n) => format!("indices below {n}"),
            Indices::Unknown => return None,
        };
        Some(format!("picks by {by} from {rows} row(s), where not all of them are"))
    }
}

/// Rows of the smallest table that ids of tokens pick from: no token may be larger.
pub fn token_rows(module: &Module) -> Option<u64> {
    let tables = row_picks(module).into_iter().filter(|p| p.by == Indices::Tokens);
    tables.filter_map(|p| p.rows.as_const()).min()
}

/// All picks of a well-formed module's calls, in the order of the schedule; each once.
pub fn row_picks(module: &Module) -> Vec<RowPick> {
    let (mut found, mut seen) = (Vec::new(), HashSet::new());
    let mut known: HashMap<(usize, Vec<Indices>), Vec<Indices>> = HashMap::new();
    let mut carried: Vec<Indices> = Vec::new();
    for site in &module.schedule {
        let graph = &module.graphs[site.graph];
        let key = (site.graph, std::mem::take(&mut carried));
        let given = known.remove(&key).unwrap_or_else(|| {
            let values = of_graph(graph, &key.1, &mut |node, by, rows| {
                let pick = RowPick { graph: site.graph, node, by, rows };
                if seen.insert(pick) {
                    found.push(pick);
                }
            });
            let is_tensor = |v: &&ValueId| matches!(graph.ty(**v), Type::Tensor(_));
            let tensors = graph.results().iter().filter(is_tensor);
            tensors.map(|v| values[v.node][v.result]).collect()
        });
        carried.clone_from(known.entry(key).or_insert(given));
    }
    found
}

/// What each value of a graph holds; `pick` hears of every pick, by node.
fn of_graph(
    graph: &Graph,
    carried: &[Indices],
    pick: &mut dyn FnMut(usize, Indices, Dim),
) -> Vec<Vec<Indices>> {
    let mut values: Vec<Vec<Indices>> = Vec::with_capacity(graph.len());
    for (i, node) in graph.nodes() {
        let found = match &node.kind {
            NodeKind::Param(param) => vec![match param {
                Param::Step(StepInput::Tokens) => Indices::Tokens,
                Param::Step(StepInput::Positions | StepInput::ContextPositions) => {
                    Indices::Positions
                }
                Param::Step(StepInput::OutputRows) => Indices::OutputRows,
                Param::Step(StepInput::Segments) => Indices::Below(2),
                Param::Carry(i) => carried.get(*i as usize).copied().unwrap_or(Indices::Unknown),
                Param::Step(StepInput::Picks | StepInput::Adapters)
                | Param::Weight(_)
                | Param::Bank(_)
                | Param::State(_)
                | Param::Shared { .. } => Indices::Unknown,
            }],
            NodeKind::Op { op, attrs } => {
                let operands = graph.operands(i);
                let of = |v: ValueId| values[v.node][v.result];
                let given: Vec<Indices> =
                    operands.iter().map(|v| v.map_or(Indices::Unknown, of)).collect();
                let types: Vec<_> = operands.iter().map(|v| v.map(|v| graph.ty(v))).collect();
                of_call(*op, attrs, &types, &given, &node.types, &mut |by, rows| pick(i, by, rows))
            }
        };
        values.push(found);
    }
    values
}

/// What the results of a call hold.
fn of_call(
    op: Op,
    attrs: &[Attr],
    types: &[Option<&Type>],
    given: &[Indices],
    results: &[Type],
    pick: &mut dyn FnMut(Indices, Dim),
) -> Vec<Indices> {
    if op.fused.is_some() {
        let Ok(body) = Instance::new(&OpCall { op, operands: types, attrs }) else {
            return vec![Indices::Unknown; results.len()];
        };
        let values = of_graph(&body.graph, given, &mut |_, by, rows| pick(by, rows));
        return body.results.iter().map(|v| values[v.node][v.result]).collect();
    }
    for (i, operand) in op.operands.iter().enumerate() {
        let from = operand.rows_of.and_then(|of| types[op.operand(of)?]?.tensor().ok());
        if let Some(rows) = from.and_then(|table| table.shape.first()) {
            pick(given[i], *rows);
        }
    }
    if op.effect == Effect::View {
        return given[..1].to_vec();
    }
    // Integers that are made of floats say where in a row of the first operand something is.
    let row = types.first().copied().flatten().and_then(|ty| ty.tensor().ok()?.last_const());
    vec![row.map_or(Indices::Unknown, Indices::Below); results.len()]
}
