//! Graphs become programs: values get places, nodes become launches.

use std::collections::HashMap;

use infernum_ir::body::Stmt;
use infernum_ir::{
    Attr, Dims, Effect, Graph, Memory, Node, NodeKind, Op, Param, Pointwise, StateType, TensorType,
    Type, ValueId, VerifyError,
};
use infernum_passes::Bucket;

use crate::plan::{Arg, Carried, Launch, Program, Region, Value};
use crate::planner::{Storage, place};

/// Why a module has no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The module is not well formed.
    #[error(transparent)]
    Invalid(#[from] Box<VerifyError>),
    /// A cache plane is read as it was before a write that comes first in the graph.
    #[error(
        "graph `{graph}`: `%{value}` uses state `%{state}` after a later version was written; \
         put it before that `kv_write`"
    )]
    StaleState {
        /// The graph.
        graph: String,
        /// The value whose op uses it.
        value: String,
        /// The version used.
        state: String,
    },
    /// Constants that unfold without end.
    #[error("graph `{graph}`: the constant `%{value}` is made of too many operations")]
    Recipe {
        /// The graph.
        graph: String,
        /// The constant.
        value: String,
    },
    /// The step's output rows have no meaning.
    #[error("step input output_rows: expected the shape [B] or [T] throughout, found {found}")]
    OutputRows {
        /// The type found.
        found: String,
    },
    /// The buffers would not fit any machine.
    #[error("the buffers need {bytes} bytes at the limits {limits:?}; plan for smaller steps")]
    TooLarge {
        /// Size of the arena.
        bytes: u64,
        /// The limits asked for.
        limits: Dims,
    },
    /// Steps that no bucket holds.
    #[error(
        "no bucket holds {} of {tokens} token(s); widen one or add one",
        if *.decode_only { "a decode step" } else { "a step" }
    )]
    Gap {
        /// The smallest such step.
        tokens: u64,
        /// Whether each of its sequences has one token.
        decode_only: bool,
    },
    /// Buckets that disagree on the cache.
    #[error("bucket {bucket} does not use the cache plane {plane}, which another bucket does")]
    Planes {
        /// The bucket.
        bucket: Bucket,
        /// The plane.
        plane: String,
    },
}

/// The results that the next call carries.
pub(crate) fn tensor_results(graph: &Graph) -> impl Iterator<Item = ValueId> + '_ {
    graph.results().iter().copied().filter(|&v| matches!(graph.ty(v), Type::Tensor(_)))
}

/// The time after the last launch, at which results must still be there.
const END: usize = usize::MAX;

/// One graph on its way to a program.
///
/// Buffer indices are storages: the values that share memory (views, results in place) share one.
pub(crate) struct Lowering<'a> {
    graph: &'a Graph,
    limits: &'a Dims,
    /// Whether the node's results are used; nothing is in a graph that is never called.
    live: Vec<bool>,
    /// Where each value lies; an absent constant is used by constants only.
    args: HashMap<ValueId, Arg>,
    storages: Vec<Storage>,
    /// By carried value: the storage of the parameter.
    carries: HashMap<usize, u32>,
    /// The nodes to launch. Launch `i` runs at time `i + 1`; parameters exist from time 0.
    order: Vec<usize>,
    pub(crate) weights: Vec<ValueId>,
    /// The planes that it works on: whose, if another layer's, their names and types.
    pub(crate) states: Vec<(Option<u32>, String, StateType)>,
}

impl<'a> Lowering<'a> {
    pub(crate) fn new(graph: &'a Graph, limits: &'a Dims, is_called: bool) -> Self {
        let mut live = vec![false; graph.len()];
        graph.results().iter().for_each(|v| live[v.node] = is_called);
        for i in (0..graph.len()).rev() {
            if live[i] {
                graph.operands(i).iter().flatten().for_each(|v| live[v.node] = true);
            }
        }
        Lowering {
            graph,
            limits,
            live,
            args: HashMap::new(),
            storages: Vec::new(),
            carries: HashMap::new(),
            order: Vec::new(),
            weights: Vec::new(),
            states: Vec::new(),
        }
    }

    /// Gives every value a place and every launch a time.
    pub(crate) fn places(&mut self) -> Result<(), PlanError> {
        let graph = self.graph;
        // The newest version of each plane.
        let mut versions: Vec<ValueId> = Vec::new();
        for i in 0..graph.len() {
            if !self.live[i] {
                continue;
            }
            let node = graph.node(i);
            let id = ValueId { node: i, result: 0 };
            match &node.kind {
                NodeKind::Param(param) => self.param(id, param, &mut versions),
                NodeKind::Op { .. } if is_constant(&node.types[0]) => {}
                NodeKind::Op { op, .. } => {
                    let operands = graph.operands(i);
                    self.check_states(i, &operands, &mut versions)?;
                    let args: Vec<_> = operands.iter().map(|v| v.map(|v| self.arg(v))).collect();
                    if op.effect == Effect::View
                        && let Some(Some(arg)) = args.first()
                    {
                        self.args.insert(id, *arg);
                        continue;
                    }
                    self.order.push(i);
                    args.iter().flatten().for_each(|a| self.touch(*a));
                    for (result, ty) in node.types.iter().enumerate() {
                        let value = ValueId { node: i, result };
                        let arg = match ty {
                            Type::Tensor(ty) => Arg::Buffer(self.storage(ty)),
                            // The verifier has seen that it is the next version of one.
                            Type::State(_) => {
                                graph.state_source(value).map_or(Arg::State(0), |v| self.arg(v))
                            }
                        };
                        self.args.insert(value, arg);
                    }
                }
            }
        }
        for v in tensor_results(graph).filter(|v| self.live[v.node]).collect::<Vec<_>>() {
            if let Arg::Buffer(b) = self.arg(v) {
                self.storages[b as usize].last = END;
            }
        }
        self.share_in_place();
        Ok(())
    }

    fn param(&mut self, id: ValueId, param: &Param, versions: &mut Vec<ValueId>) {
        let ty = self.graph.ty(id);
        match (param, ty) {
            (Param::Step(input), _) => {
                self.args.insert(id, Arg::Step(*input));
            }
            (Param::Carry(i), Type::Tensor(ty)) => {
                // The same carried value may be a parameter twice.
                let storage = match self.carries.get(&(*i as usize)) {
                    Some(&storage) => storage,
                    None => self.storage(ty),
                };
                // It exists before any launch, wherever the graph mentions it.
                self.storages[storage as usize].first = 0;
                self.carries.insert(*i as usize, storage);
                self.args.insert(id, Arg::Buffer(storage));
            }
            // Constants get a place when a launch asks for one.
            (param, ty) => {
                if let (Some((layer, plane)), Type::State(ty)) = (param.plane(), ty) {
                    self.args.insert(id, Arg::State(self.states.len() as u32));
                    self.states.push((layer, plane.to_owned(), ty.clone()));
                    versions.push(id);
                }
            }
        }
    }

    /// A cache plane is written in place, so only its newest version can be used. An op that makes
    /// the next version of one may read others, which stay as they are.
    fn check_states(
        &self,
        node: usize,
        operands: &[Option<ValueId>],
        versions: &mut [ValueId],
    ) -> Result<(), PlanError> {
        let graph = self.graph;
        let is_state = |v: &&ValueId| matches!(graph.ty(**v), Type::State(_));
        let stale = |v: &&ValueId| !versions.contains(v);
        if let Some(&state) = operands.iter().flatten().filter(is_state).find(stale) {
            return Err(PlanError::StaleState {
                graph: graph.name.clone(),
                value: graph.node(node).names[0].clone(),
                state: graph.value_name(state).to_owned(),
            });
        }
        for result in 0..graph.node(node).types.len() {
            let next = ValueId { node, result };
            let from = graph.state_source(next);
            if let Some(version) = versions.iter_mut().find(|v| from == Some(**v)) {
                *version = next;
            }
        }
        Ok(())
    }

    fn now(&self) -> usize {
        self.order.len()
    }

    fn storage(&mut self, ty: &TensorType) -> u32 {
        let (bytes, now) = (ty.bytes(self.limits).max(1), self.now());
        self.storages.push(Storage { bytes, first: now, last: now });
        self.storages.len() as u32 - 1
    }

    /// Marks a use by the launch of now.
    fn touch(&mut self, arg: Arg) {
        let now = self.now();
        if let Arg::Buffer(b) = arg {
            let last = &mut self.storages[b as usize].last;
            *last = now.max(*last);
        }
    }

    /// Where a value lies; a constant gets its slot here.
    fn arg(&mut self, v: ValueId) -> Arg {
        if let Some(arg) = self.args.get(&v) {
            return *arg;
        }
        let arg = Arg::Weight(self.weights.len() as u32);
        self.weights.push(v);
        self.args.insert(v, arg);
        arg
    }

    /// Lets result 0 of elementwise launches take the place of an operand that dies there.
    fn share_in_place(&mut self) {
        for (i, &node) in self.order.iter().enumerate() {
            let NodeKind::Op { op, .. } = &self.graph.node(node).kind else { continue };
            let operands = self.graph.operands(node);
            let result = ValueId { node, result: 0 };
            let Some(&Arg::Buffer(to)) = self.args.get(&result) else { continue };
            let place = |&o: &usize| {
                let x = operands.get(o).copied().flatten()?;
                let Some(&Arg::Buffer(from)) = self.args.get(&x) else { return None };
                let dies = self.storages[from as usize].last == i + 1;
                let uses = operands.iter().flatten().filter_map(|v| self.args.get(v));
                let once = uses.filter(|a| **a == Arg::Buffer(from)).count() == 1;
                let same = self.graph.ty(x) == self.graph.ty(result);
                (dies && once && same).then_some(from)
            };
            if let Some(from) = may_alias(*op).iter().find_map(place) {
                self.storages[from as usize].last = self.storages[to as usize].last;
                let moved = self.args.values_mut().filter(|a| **a == Arg::Buffer(to));
                moved.for_each(|a| *a = Arg::Buffer(from));
                // Nothing lives there any more.
                self.storages[to as usize].bytes = 0;
            }
        }
    }

    /// Fixes what is carried to its slots, places the rest after them, and writes the launches.
    /// Nothing is carried on from the last call.
    pub(crate) fn finish(&mut self, slots: &[Region], base: u64, is_last: bool) -> (Program, u64) {
        let mut fixed: HashMap<u32, usize> = self.carries.iter().map(|(&i, &s)| (s, i)).collect();
        let mut launches: Vec<Launch> =
            (0..self.order.len()).map(|i| self.launch(self.order[i])).collect();
        let results = if is_last {
            self.final_results(&mut launches)
        } else {
            self.carry_results(&mut fixed, &mut launches)
        };
        let floating: Vec<usize> = (0..self.storages.len())
            .filter(|&i| !fixed.contains_key(&(i as u32)) && self.storages[i].bytes > 0)
            .collect();
        let placed: Vec<Storage> = floating.iter().map(|&i| self.storages[i]).collect();
        let (offsets, end) = place(&placed, base);
        let mut buffers = vec![Region { offset: 0, bytes: 0 }; self.storages.len()];
        for (&storage, &slot) in &fixed {
            buffers[storage as usize] = slots.get(slot).copied().unwrap_or(buffers[0]);
        }
        for (&storage, &offset) in floating.iter().zip(&offsets) {
            buffers[storage] = Region { offset, bytes: self.storages[storage].bytes };
        }
        for (b, s) in self.storages.iter().enumerate().filter(|(_, s)| s.bytes > 0) {
            if let Some(launch) = s.last.checked_sub(1).and_then(|i| launches.get_mut(i)) {
                launch.frees.push(b as u32);
            }
        }
        (Program { name: self.graph.name.clone(), buffers, launches, results }, end)
    }

    fn launch(&mut self, node: usize) -> Launch {
        let graph = self.graph;
        let n = graph.node(node);
        let (op, attrs) = match &n.kind {
            NodeKind::Op { op, attrs } => (op.name, named(*op, attrs)),
            NodeKind::Param(_) => (Launch::COPY, Vec::new()),
        };
        let mut value = |v: ValueId| Value { arg: self.arg(v), ty: graph.ty(v).clone() };
        let operands =
            graph.operands(node).into_iter().map(|v| v.map(&mut value)).collect::<Vec<_>>();
        let results =
            (0..n.types.len()).map(|result| value(ValueId { node, result })).collect::<Vec<_>>();
        Launch {
            op: op.to_owned(),
            attrs,
            names: names_of(n),
            operands,
            results,
            name: n.names[0].clone(),
            loc: n.loc.as_ref().map(ToString::to_string),
            frees: Vec::new(),
            run: None,
        }
    }

    /// Results that stay where they were computed; what was not computed is copied.
    fn final_results(&mut self, launches: &mut Vec<Launch>) -> Vec<Carried> {
        let graph = self.graph;
        let values: Vec<ValueId> = tensor_results(graph).filter(|v| self.live[v.node]).collect();
        let mut results = Vec::new();
        for v in values {
            let Type::Tensor(ty) = graph.ty(v) else { continue };
            let name = graph.value_name(v).to_owned();
            let mut result = Carried { name, buffer: 0, ty: ty.clone() };
            result.buffer = match self.arg(v) {
                Arg::Buffer(b) => b,
                arg => {
                    let to = self.copy(arg, &result, launches);
                    self.storages[to as usize].last = END;
                    to
                }
            };
            results.push(result);
        }
        results
    }

    /// Sees to it that result `i` ends in slot `i`: computed there when what was carried in is
    /// dead by then, or copied there at the end.
    fn carry_results(
        &mut self,
        fixed: &mut HashMap<u32, usize>,
        launches: &mut Vec<Launch>,
    ) -> Vec<Carried> {
        let graph = self.graph;
        let values: Vec<ValueId> = tensor_results(graph).filter(|v| self.live[v.node]).collect();
        let mut results = Vec::new();
        let mut copies = Vec::new();
        for (i, &v) in values.iter().enumerate() {
            let arg = self.arg(v);
            let Type::Tensor(ty) = graph.ty(v) else { continue };
            let buffer = match arg {
                Arg::Buffer(b) if fixed.get(&b) == Some(&i) => b,
                Arg::Buffer(b) if !fixed.contains_key(&b) && self.slot_is_free(i, b) => {
                    fixed.insert(b, i);
                    b
                }
                _ => {
                    copies.push((i, arg));
                    0 // known once it is copied
                }
            };
            results.push(Carried { name: graph.value_name(v).to_owned(), buffer, ty: ty.clone() });
        }
        // What lies in a slot may be in the way of another copy: take it out first.
        for (i, arg) in &mut copies {
            if matches!(*arg, Arg::Buffer(b) if fixed.contains_key(&b)) {
                let to = self.copy(*arg, &results[*i], launches);
                *arg = Arg::Buffer(to);
            }
        }
        for (i, arg) in copies {
            let to = self.copy(arg, &results[i], launches);
            fixed.insert(to, i);
            self.storages[to as usize].last = END;
            results[i].buffer = to;
        }
        results
    }

    /// Whether what was carried in slot `i` is dead when storage `b` is first written.
    fn slot_is_free(&self, i: usize, b: u32) -> bool {
        let first = self.storages[b as usize].first;
        self.carries.get(&i).is_none_or(|&c| self.storages[c as usize].last < first)
    }

    /// Appends a copy into a new storage.
    fn copy(&mut self, from: Arg, what: &Carried, launches: &mut Vec<Launch>) -> u32 {
        self.order.push(usize::MAX);
        let to = self.storage(&what.ty);
        let now = self.now();
        if let Arg::Buffer(b) = from {
            // It lived until the end: now the end is known.
            let last = &mut self.storages[b as usize].last;
            *last = if *last == END { END } else { now.max(*last) };
        }
        let ty = Type::Tensor(what.ty.clone());
        launches.push(Launch {
            op: Launch::COPY.to_owned(),
            attrs: Vec::new(),
            names: copied(),
            operands: vec![Some(Value { arg: from, ty: ty.clone() })],
            results: vec![Value { arg: Arg::Buffer(to), ty }],
            name: what.name.clone(),
            loc: None,
            frees: Vec::new(),
            run: None,
        });
        to
    }
}

/// Attributes under their names, so that a reader of the plan needs no definition of the op.
fn named(op: Op, attrs: &[Attr]) -> Vec<(String, Attr)> {
    op.attrs.iter().map(|d| d.name.to_owned()).zip(attrs.iter().cloned()).collect()
}

/// What an op calls its operands and results. A primitive's results have no names: one is `y`,
/// several are `y0`, `y1`, and so on.
fn names_of(node: &Node) -> Vec<String> {
    let NodeKind::Op { op, .. } = &node.kind else { return copied() };
    let operands = op.operands.iter().map(|o| o.name.to_owned());
    let results = match &op.fused {
        Some(fused) => fused.results.clone(),
        None if node.types.len() == 1 => vec!["y".to_owned()],
        None => (0..node.types.len()).map(|i| format!("y{i}")).collect(),
    };
    operands.chain(results).collect()
}

/// As in [`names_of`], for [`Launch::COPY`].
fn copied() -> Vec<String> {
    vec!["x".to_owned(), "y".to_owned()]
}

fn is_constant(ty: &Type) -> bool {
    matches!(ty, Type::Tensor(t) if t.constant)
}

/// The operands of its type that result 0 may be written over: each part of the result depends on
/// the same part of the operand only. Kernels of fused ops must allow it too: where result 0 is made
/// by an elementwise op, or by a fused one that ends so, of an operand that nothing else in the body uses.
fn may_alias(op: Op) -> Vec<usize> {
    let Some(fused) = &op.fused else {
        let rows = op.memory == Memory::Rowwise;
        return if rows || op.pointwise != Pointwise::No { vec![0] } else { Vec::new() };
    };
    let made = |s: &&Stmt| fused.results.first().is_some_and(|r| s.results.contains(r));
    let Some(last) = fused.body.iter().rfind(made) else { return Vec::new() };
    let operands: Vec<&String> = if last.op.pointwise != Pointwise::No {
        last.operands.iter().flatten().collect()
    } else if last.op.fused.is_some() && last.results.first() == fused.results.first() {
        let inner = may_alias(last.op).into_iter();
        inner.filter_map(|i| last.operands.get(i)?.as_ref()).collect()
    } else {
        return Vec::new();
    };
    let uses = |name: &str| {
        let all = fused.body.iter().flat_map(|s| s.operands.iter().flatten());
        all.filter(|n| *n == name).count()
    };
    operands.into_iter().filter(|n| uses(n) == 1).filter_map(|n| op.operand(n)).collect()
}
