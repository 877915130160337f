//! Graphs, and modules of them.

use std::fmt;
use std::sync::Arc;

use petgraph::Direction;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;
use serde::{Deserialize, Serialize};

use crate::attr::Attr;
use crate::picking::PickRow;
use crate::{DType, Dim, Op, Sym, TensorType, Type};

/// A whole model: one graph for each kind of layer, and the order in which they run.
#[derive(Clone, Debug, PartialEq)]
pub struct Module {
    /// The family's name.
    pub name: String,
    /// The graphs, each named.
    pub graphs: Vec<Graph>,
    /// The calls that make up a step, in order. Values flow from one to the next by `carry`.
    pub schedule: Vec<CallSite>,
}

/// One call of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallSite {
    /// Index into [`Module::graphs`].
    pub graph: usize,
    /// The layer whose weights and cache it uses; `None` outside the layers.
    pub layer: Option<u32>,
}

/// One dataflow graph. Node indices are a topological order.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// Its name, unique in the module.
    pub name: String,
    dag: DiGraph<Node, Use>,
    results: Vec<ValueId>,
}

/// A node: a parameter of the graph, or an operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// What it is.
    pub kind: NodeKind,
    /// A name for each result, unique in the graph.
    pub names: Vec<String>,
    /// The type of each result.
    pub types: Vec<Type>,
    /// Where it was written.
    pub loc: Option<Loc>,
}

/// What a node is.
#[derive(Clone, Debug, PartialEq)]
pub enum NodeKind {
    /// A value from outside.
    Param(Param),
    /// An operation with its attributes, in declared order.
    Op {
        /// The op.
        op: Op,
        /// One value an attribute declared.
        attrs: Vec<Attr>,
    },
}

/// A value from outside the graph.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Param {
    /// An input of the step.
    Step(StepInput),
    /// Result `i` of the call before.
    Carry(u32),
    /// A tensor of the checkpoint.
    Weight(WeightRef),
    /// Memory beside the checkpoint's weights that is zero at first and changes between steps, by name: a row of it for
    /// each adapter; `{layer}` stands for the layer's number.
    Bank(String),
    /// A plane of this layer's KV cache, by name.
    State(String),
    /// A plane of the KV cache of a layer that runs before, with this step's rows, to be read.
    Shared {
        /// Its name there.
        plane: String,
        /// The layer.
        layer: u32,
    },
}

/// The inputs of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum StepInput {
    /// Token ids, `u32[T]`.
    Tokens,
    /// Each token's index in its sequence, `i32[T]`.
    Positions,
    /// Each context row's index in its sequence, `i32[S]`.
    ContextPositions,
    /// Which of its sequence's two texts each token is of, 0 or 1: `u32[T]`. Of a sequence of one text all are 0.
    Segments,
    /// The adapter that each token is computed with: one more than its row in the banks, 0 for none; `u32[T]`.
    Adapters,
    /// The tokens whose logits are wanted, `u32[B]` or `u32[T]`.
    OutputRows,
    /// How the token after each of these is picked, `u32[B, 16]` or `u32[T, 16]`: the words of a
    /// [`PickRow`]. Lists that these name lie beside the step.
    Picks,
}

/// Names a tensor of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WeightRef {
    /// Its name; `{layer}` stands for the layer's number and `{expert}` for an expert's.
    pub name: String,
    /// With `n`, the tensors for `{expert}` = 0..n stacked along a new first axis.
    pub stack: Option<u64>,
}

/// One result of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ValueId {
    /// Index of the node.
    pub node: usize,
    /// Which of its results.
    pub result: usize,
}

/// A place in a file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Loc {
    /// The file, as the user named it.
    pub file: Arc<str>,
    /// From 1.
    pub line: u32,
    /// From 1, in characters.
    pub col: u32,
}

/// An edge: which result feeds which operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Use {
    result: usize,
    operand: usize,
}

impl Param {
    /// Of a plane of the cache: the layer whose it is, if another's, and its name.
    pub fn plane(&self) -> Option<(Option<u32>, &str)> {
        match self {
            Param::State(plane) => Some((None, plane)),
            Param::Shared { plane, layer } => Some((Some(*layer), plane)),
            Param::Step(_) | Param::Carry(_) | Param::Weight(_) | Param::Bank(_) => None,
        }
    }
}

impl StepInput {
    /// Every input, with its name in IR text and in specs.
    pub const ALL: [(StepInput, &'static str); 7] = [
        (StepInput::Tokens, "tokens"),
        (StepInput::Positions, "positions"),
        (StepInput::ContextPositions, "context_positions"),
        (StepInput::Segments, "segments"),
        (StepInput::Adapters, "adapters"),
        (StepInput::OutputRows, "output_rows"),
        (StepInput::Picks, "picks"),
    ];

    /// Its type, in a step whose output has these rows.
    pub fn ty(self, rows: Sym) -> TensorType {
        let (dtype, sym) = match self {
            StepInput::Tokens | StepInput::Segments | StepInput::Adapters => (DType::U32, Sym::T),
            StepInput::Positions => (DType::I32, Sym::T),
            StepInput::ContextPositions => (DType::I32, Sym::S),
            StepInput::OutputRows => (DType::U32, rows),
            StepInput::Picks => {
                let words = Dim::Const(PickRow::WORDS as u64);
                return TensorType::act(DType::U32, [rows.into(), words]);
            }
        };
        TensorType::act(dtype, [sym.into()])
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(i, _)| *i == self).map_or("?", |(_, n)| n)
    }
}

/// The name of a tensor in a layer.
pub fn in_layer(name: &str, layer: Option<u32>) -> String {
    match layer {
        Some(layer) => name.replace("{layer}", &layer.to_string()),
        None => name.to_owned(),
    }
}

impl WeightRef {
    /// The checkpoint names it stands for in one layer, in stacking order.
    pub fn tensors(&self, layer: Option<u32>) -> Vec<String> {
        let name = in_layer(&self.name, layer);
        match self.stack {
            Some(n) => (0..n).map(|e| name.replace("{expert}", &e.to_string())).collect(),
            None => vec![name],
        }
    }
}

impl Graph {
    /// An empty graph.
    pub fn new(name: impl Into<String>) -> Graph {
        Graph { name: name.into(), ..Graph::default() }
    }

    /// Adds a parameter.
    pub fn param(&mut self, name: impl Into<String>, param: Param, ty: impl Into<Type>) -> ValueId {
        self.add_node(
            Node {
                kind: NodeKind::Param(param),
                names: vec![name.into()],
                types: vec![ty.into()],
                loc: None,
            },
            &[],
        )
    }

    /// Adds a call of `op`, typing its results; `names` has one for each of them.
    pub fn call(
        &mut self,
        names: Vec<String>,
        op: Op,
        operands: &[Option<ValueId>],
        attrs: Vec<Attr>,
        loc: Option<Loc>,
    ) -> Result<Vec<ValueId>, String> {
        let operand_types: Vec<Option<&Type>> =
            operands.iter().map(|v| v.map(|v| self.ty(v))).collect();
        let types = op.infer(&operand_types, &attrs)?;
        if types.len() != names.len() {
            return Err(format!(
                "`{}` has {} result(s), found {} name(s) for them",
                op.name,
                types.len(),
                names.len()
            ));
        }
        let results = types.len();
        let node = Node { kind: NodeKind::Op { op, attrs }, names, types, loc };
        let first = self.add_node(node, operands);
        Ok((0..results).map(|result| ValueId { node: first.node, result }).collect())
    }

    /// Adds a node as it is, without typing it: the verifier is what checks it. Returns its first
    /// result. Operands must be results of nodes already there.
    pub fn add_node(&mut self, node: Node, operands: &[Option<ValueId>]) -> ValueId {
        let id = self.dag.add_node(node);
        for (operand, value) in operands.iter().enumerate() {
            if let Some(v) = value {
                let edge = Use { result: v.result, operand };
                self.dag.add_edge(NodeIndex::new(v.node), id, edge);
            }
        }
        ValueId { node: id.index(), result: 0 }
    }

    /// Sets the graph's results.
    pub fn set_results(&mut self, results: Vec<ValueId>) {
        self.results = results;
    }

    /// The graph's results: what the next call carries, and the last version of each state.
    pub fn results(&self) -> &[ValueId] {
        &self.results
    }

    /// Number of nodes; their indices run from 0 and are a topological order.
    pub fn len(&self) -> usize {
        self.dag.node_count()
    }

    /// True when it has no nodes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A node.
    pub fn node(&self, index: usize) -> &Node {
        &self.dag[NodeIndex::new(index)]
    }

    /// A node, to be changed in place.
    pub fn node_mut(&mut self, index: usize) -> &mut Node {
        &mut self.dag[NodeIndex::new(index)]
    }

    /// The nodes in order.
    pub fn nodes(&self) -> impl Iterator<Item = (usize, &Node)> {
        self.dag.node_weights().enumerate()
    }

    /// A node's operands, one entry for each that its op declares.
    pub fn operands(&self, index: usize) -> Vec<Option<ValueId>> {
        let arity = match &self.node(index).kind {
            NodeKind::Op { op, .. } => op.operands.len(),
            NodeKind::Param(_) => 0,
        };
        let mut operands = vec![None; arity];
        for edge in self.dag.edges_directed(NodeIndex::new(index), Direction::Incoming) {
            let Use { result, operand } = *edge.weight();
            if let Some(slot) = operands.get_mut(operand) {
                *slot = Some(ValueId { node: edge.source().index(), result });
            }
        }
        operands
    }

    /// The nodes that use a value, with the operand's position.
    pub fn users(&self, value: ValueId) -> impl Iterator<Item = (usize, usize)> {
        self.dag
            .edges_directed(NodeIndex::new(value.node), Direction::Outgoing)
            .filter(move |e| e.weight().result == value.result)
            .map(|e| (e.target().index(), e.weight().operand))
    }

    /// A value's type.
    pub fn ty(&self, value: ValueId) -> &Type {
        &self.node(value.node).types[value.result]
    }

    /// A value's name.
    pub fn value_name(&self, value: ValueId) -> &str {
        &self.node(value.node).names[value.result]
    }

    /// For a state made by an op, the version it was made from: an op's states, in order, are the
    /// next versions of its state operands.
    pub fn state_source(&self, value: ValueId) -> Option<ValueId> {
        let node = self.node(value.node);
        let is_state = |ty: &Type| matches!(ty, Type::State(_));
        if matches!(node.kind, NodeKind::Param(_)) || !is_state(&node.types[value.result]) {
            return None;
        }
        let before = node.types[..value.result].iter().filter(|ty| is_state(ty)).count();
        let operands = self.operands(value.node).into_iter().flatten();
        operands.filter(|v| is_state(self.ty(*v))).nth(before)
    }

    /// The value of that name.
    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.nodes().find_map(|(node, n)| {
            let result = n.names.iter().position(|x| x == name)?;
            Some(ValueId { node, result })
        })
    }

    /// The parameters, with their values.
    pub fn params(&self) -> impl Iterator<Item = (ValueId, &Param, &Type)> {
        self.nodes().filter_map(|(node, n)| match &n.kind {
            NodeKind::Param(p) => Some((ValueId { node, result: 0 }, p, &n.types[0])),
            NodeKind::Op { .. } => None,
        })
    }
}

impl PartialEq for Graph {
    fn eq(&self, other: &Graph) -> bool {
        self.name == other.name
            && self.results == other.results
            && self.len() == other.len()
            && self.nodes().zip(other.nodes()).all(|(a, b)| a == b)
            && (0..self.len()).all(|i| self.operands(i) == other.operands(i))
    }
}

impl Module {
    /// The graph of that name.
    pub fn graph(&self, name: &str) -> Option<&Graph> {
        self.graphs.iter().find(|g| g.name == name)
    }
}

impl fmt::Display for Loc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.col)
    }
}
