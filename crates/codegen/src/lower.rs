//! Graphs become programs: values get places, nodes become launches.

use std::collections::HashMap;

use infernum_ir::{
    Dim, Dims, Effect, Graph, Module, NodeKind, Op, Param, Pointwise, StateType, StepInput, Sym,
    TensorType, Type, ValueId, VerifyError, verify,
};

use crate::plan::{
    Arg, Call, Carried, Launch, Plan, Program, Region, StateSpec, TargetKind, VERSION, Value,
    Weight,
};
use crate::planner::{Storage, aligned, place};
use crate::recipe;

/// Arena sizes beyond this are mistakes (or limits that no machine holds).
const MAX_ARENA: u64 = 1 << 42;

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
}

/// Compiles a module for steps of at most `limits`.
pub fn plan(module: &Module, target: TargetKind, limits: Dims) -> Result<Plan, PlanError> {
    verify(module).map_err(Box::new)?;
    let (slots, slots_end) = carry_slots(module, &limits);
    let mut plan = Plan {
        version: VERSION,
        module: module.name.clone(),
        target,
        limits,
        arena_bytes: slots_end,
        programs: Vec::new(),
        calls: Vec::new(),
        weights: Vec::new(),
        states: Vec::new(),
        output_rows: output_rows(module)?,
    };
    let mut bindings = Vec::new();
    for (i, graph) in module.graphs.iter().enumerate() {
        let mut lowering = Lowering::new(graph, &limits, is_called(module, i));
        lowering.places()?;
        let (program, end) = lowering.finish(&slots, slots_end);
        plan.arena_bytes = plan.arena_bytes.max(end);
        plan.programs.push(program);
        bindings.push((lowering.weights, lowering.states));
    }
    if plan.arena_bytes > MAX_ARENA {
        return Err(PlanError::TooLarge { bytes: plan.arena_bytes, limits });
    }
    bind_calls(module, &bindings, &mut plan)?;
    Ok(plan)
}

/// The verifier has seen what is carried to a graph only if something calls it.
fn is_called(module: &Module, graph: usize) -> bool {
    module.schedule.iter().any(|s| s.graph == graph)
}

/// One fixed region for each carried value, large enough for it in every graph.
fn carry_slots(module: &Module, limits: &Dims) -> (Vec<Region>, u64) {
    let mut sizes: Vec<u64> = Vec::new();
    let mut need = |i: usize, ty: &Type| {
        if let Type::Tensor(ty) = ty {
            if sizes.len() <= i {
                sizes.resize(i + 1, 0);
            }
            sizes[i] = sizes[i].max(ty.bytes(limits));
        }
    };
    for graph in module.graphs.iter().enumerate().filter(|g| is_called(module, g.0)).map(|g| g.1) {
        tensor_results(graph).enumerate().for_each(|(i, v)| need(i, graph.ty(v)));
    }
    let mut end = 0u64;
    let slots = sizes.into_iter().map(|bytes| {
        let slot = Region { offset: end, bytes };
        end = aligned(end.saturating_add(bytes));
        slot
    });
    (slots.collect(), end)
}

fn tensor_results(graph: &Graph) -> impl Iterator<Item = ValueId> + '_ {
    graph.results().iter().copied().filter(|&v| matches!(graph.ty(v), Type::Tensor(_)))
}

fn output_rows(module: &Module) -> Result<Option<Sym>, PlanError> {
    let mut found = None;
    for (_, param, ty) in module.graphs.iter().flat_map(Graph::params) {
        if *param != Param::Step(StepInput::OutputRows) {
            continue;
        }
        let sym = match ty {
            Type::Tensor(TensorType { shape, .. }) => match shape[..] {
                [Dim::Sym { sym: sym @ (Sym::B | Sym::T), times: 1 }] => Some(sym),
                _ => None,
            },
            Type::State(_) => None,
        };
        if sym.is_none() || (found.is_some() && found != sym) {
            return Err(PlanError::OutputRows { found: ty.to_string() });
        }
        found = sym;
    }
    Ok(found)
}

/// What a program needs from its call: constants, and planes of the cache.
type Bindings = (Vec<ValueId>, Vec<(String, StateType)>);

/// Makes the calls, sharing constants and planes between them.
fn bind_calls(module: &Module, bindings: &[Bindings], plan: &mut Plan) -> Result<(), PlanError> {
    let mut weights: HashMap<Weight, u32> = HashMap::new();
    let mut states: HashMap<StateSpec, u32> = HashMap::new();
    for site in &module.schedule {
        let graph = &module.graphs[site.graph];
        let mut call = Call {
            program: site.graph as u32,
            layer: site.layer,
            weights: Vec::new(),
            states: Vec::new(),
        };
        for &value in &bindings[site.graph].0 {
            let weight = recipe::weight(graph, value, site.layer).ok_or_else(|| {
                let (graph, value) = (graph.name.clone(), graph.value_name(value).to_owned());
                PlanError::Recipe { graph, value }
            })?;
            let next = weights.len() as u32;
            call.weights.push(*weights.entry(weight.clone()).or_insert_with(|| {
                plan.weights.push(weight);
                next
            }));
        }
        for (plane, ty) in &bindings[site.graph].1 {
            let spec = StateSpec { layer: site.layer, plane: plane.clone(), ty: ty.clone() };
            let next = states.len() as u32;
            call.states.push(*states.entry(spec.clone()).or_insert_with(|| {
                plan.states.push(spec);
                next
            }));
        }
        plan.calls.push(call);
    }
    Ok(())
}

/// The time after the last launch, at which results must still be there.
const END: usize = usize::MAX;

/// One graph on its way to a program.
///
/// Buffer indices are storages: the values that share memory (views, results in place) share one.
struct Lowering<'a> {
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
    weights: Vec<ValueId>,
    states: Vec<(String, StateType)>,
}

impl<'a> Lowering<'a> {
    fn new(graph: &'a Graph, limits: &'a Dims, is_called: bool) -> Self {
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
    fn places(&mut self) -> Result<(), PlanError> {
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
                    self.check_state(id, &operands, &mut versions, op.effect)?;
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
                        let arg = match ty {
                            Type::Tensor(ty) => Arg::Buffer(self.storage(ty)),
                            Type::State(_) => args[0].unwrap_or(Arg::State(0)),
                        };
                        self.args.insert(ValueId { node: i, result }, arg);
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
            (Param::State(plane), Type::State(ty)) => {
                self.args.insert(id, Arg::State(self.states.len() as u32));
                self.states.push((plane.clone(), ty.clone()));
                versions.push(id);
            }
            // Constants get a place when a launch asks for one.
            _ => {}
        }
    }

    /// A cache plane is written in place, so only its newest version can be used.
    fn check_state(
        &self,
        id: ValueId,
        operands: &[Option<ValueId>],
        versions: &mut [ValueId],
        effect: Effect,
    ) -> Result<(), PlanError> {
        for &state in operands.iter().flatten() {
            if !matches!(self.graph.ty(state), Type::State(_)) {
                continue;
            }
            match versions.iter_mut().find(|v| **v == state) {
                Some(version) if effect == Effect::Writes => *version = id,
                Some(_) => {}
                None => {
                    return Err(PlanError::StaleState {
                        graph: self.graph.name.clone(),
                        value: self.graph.value_name(id).to_owned(),
                        state: self.graph.value_name(state).to_owned(),
                    });
                }
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

    /// Lets result 0 of elementwise launches take the place of operand 0 where that dies.
    fn share_in_place(&mut self) {
        for (i, &node) in self.order.iter().enumerate() {
            let now = i + 1;
            let operands = self.graph.operands(node);
            let result = ValueId { node, result: 0 };
            let (Some(Some(x)), NodeKind::Op { op, .. }) =
                (operands.first().copied(), &self.graph.node(node).kind)
            else {
                continue;
            };
            let (Some(Arg::Buffer(from)), Some(Arg::Buffer(to))) =
                (self.args.get(&x).copied(), self.args.get(&result).copied())
            else {
                continue;
            };
            let dies = self.storages[from as usize].last == now;
            let used_twice = operands[1..].iter().flatten().any(|v| {
                self.args.get(v) == Some(&Arg::Buffer(from))
            });
            let same = self.graph.ty(x) == self.graph.ty(result);
            if may_alias(*op) && dies && same && !used_twice {
                self.storages[from as usize].last = self.storages[to as usize].last;
                let moved = self.args.values_mut().filter(|a| **a == Arg::Buffer(to));
                moved.for_each(|a| *a = Arg::Buffer(from));
                // Nothing lives there any more.
                self.storages[to as usize].bytes = 0;
            }
        }
    }

    /// Fixes what is carried to its slots, places the rest after them, and writes the launches.
    fn finish(&mut self, slots: &[Region], base: u64) -> (Program, u64) {
        let mut fixed: HashMap<u32, usize> = self.carries.iter().map(|(&i, &s)| (s, i)).collect();
        let mut launches: Vec<Launch> =
            (0..self.order.len()).map(|i| self.launch(self.order[i])).collect();
        let results = self.carry_results(&mut fixed, &mut launches);
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
            NodeKind::Op { op, attrs } => (op.name, attrs.clone()),
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
            operands,
            results,
            name: n.names[0].clone(),
            loc: n.loc.as_ref().map(ToString::to_string),
            frees: Vec::new(),
        }
    }

    /// Sees to it that result `i` ends in slot `i`: computed there when what was carried in is
    /// dead by then, or copied there at the end.
    fn carry_results(
        &mut self,
        fixed: &mut HashMap<u32, usize>,
        launches: &mut Vec<Launch>,
    ) -> Vec<Carried> {
        let graph = self.graph;
        let values: Vec<ValueId> =
            tensor_results(graph).filter(|v| self.live[v.node]).collect();
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
            operands: vec![Some(Value { arg: from, ty: ty.clone() })],
            results: vec![Value { arg: Arg::Buffer(to), ty }],
            name: what.name.clone(),
            loc: None,
            frees: Vec::new(),
        });
        to
    }
}

fn is_constant(ty: &Type) -> bool {
    matches!(ty, Type::Tensor(t) if t.constant)
}

/// Whether a kernel can write its result over operand 0 of the same type: each part of the
/// result depends on the same part of the operand.
fn may_alias(op: Op) -> bool {
    op.pointwise != Pointwise::No
        || matches!(op.name, "mask" | "softmax" | "rmsnorm" | "layernorm" | "rope")
}
