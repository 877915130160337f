//! A plan of one module, or of several that compute the same for steps of different kinds.

use std::collections::HashMap;

use infernum_ir::{
    Dim, Dims, Graph, Module, Param, StepInput, Sym, Task, TensorType, Type, takes_whole,
    token_rows, verify,
};
use infernum_passes::Bucket;

use crate::layout;
use crate::lower::{Lowering, PlanError, tensor_results};
use crate::plan::{
    Plan, Program, ProgramCall, Region, Schedule, StateSpec, TargetKind, VERSION, Weight,
};
use crate::planner::aligned;
use crate::recipe;

/// Arena sizes beyond this are mistakes (or limits that no machine holds).
pub(crate) const MAX_ARENA: u64 = 1 << 42;

/// Compiles a module for steps of at most `limits`.
pub fn plan(module: &Module, target: TargetKind, limits: Dims) -> Result<Plan, PlanError> {
    build(&[(Bucket::ALL, module)], target, limits)
}

/// Compiles modules of one model, each for the steps of its bucket, to one plan that holds every
/// step of at most `limits`. They share the arena, the weights and the cache, so that they must
/// have the same planes; programs that come out the same are kept once.
pub fn plan_buckets(
    modules: &[(Bucket, Module)],
    target: TargetKind,
    limits: Dims,
) -> Result<Plan, PlanError> {
    let modules: Vec<_> = modules.iter().map(|(bucket, module)| (*bucket, module)).collect();
    build(&modules, target, limits)
}

fn build(
    modules: &[(Bucket, &Module)],
    target: TargetKind,
    limits: Dims,
) -> Result<Plan, PlanError> {
    modules.iter().try_for_each(|(_, m)| verify(m).map_err(Box::new))?;
    let (slots, slots_end) = carry_slots(modules, &limits);
    let mut plan = Plan {
        version: VERSION,
        module: modules.first().map_or_else(String::new, |(_, m)| m.name.clone()),
        target,
        task: Task::default(),
        limits,
        arena_bytes: slots_end,
        programs: Vec::new(),
        schedules: Vec::new(),
        weights: Vec::new(),
        states: Vec::new(),
        reproducible: false,
        takes_whole: modules.iter().any(|(_, m)| takes_whole(m)),
        output_rows: output_rows(modules)?,
        token_rows: modules.iter().filter_map(|(_, m)| token_rows(m)).min(),
        device: None,
        kernels: Vec::new(),
        feed: None,
        repacks: Vec::new(),
        adapters: 0,
    };
    let mut binder = Binder::default();
    for (bucket, module) in modules {
        let mut graphs = Vec::new();
        for (i, graph) in module.graphs.iter().enumerate() {
            let mut lowering = Lowering::new(graph, &limits, is_called(module, i));
            lowering.places()?;
            let (program, end) = lowering.finish(&slots, slots_end, is_last(module, i));
            plan.arena_bytes = plan.arena_bytes.max(end);
            let (weights, states) = (lowering.weights, lowering.states);
            graphs.push(Lowered { program: add_program(&mut plan, program), weights, states });
        }
        let calls = binder.calls(module, &graphs, &mut plan)?;
        let reads_adapters =
            |(_, param, _): (_, &Param, _)| *param == Param::Step(StepInput::Adapters);
        let adapts = module.graphs.iter().any(|g| g.params().any(reads_adapters));
        plan.schedules.push(Schedule { bucket: *bucket, adapts, calls });
    }
    if plan.arena_bytes > MAX_ARENA {
        return Err(PlanError::TooLarge { bytes: plan.arena_bytes, limits });
    }
    layout::share(&mut plan.weights);
    same_planes(&plan)?;
    covers(&plan)?;
    Ok(plan)
}

/// A graph's program and what it needs from its call: constants, and planes of the cache.
struct Lowered {
    program: u32,
    weights: Vec<infernum_ir::ValueId>,
    states: Vec<(Option<u32>, String, infernum_ir::StateType)>,
}

fn add_program(plan: &mut Plan, program: Program) -> u32 {
    let known = plan.programs.iter().position(|p| *p == program);
    let index = known.unwrap_or(plan.programs.len());
    if known.is_none() {
        plan.programs.push(program);
    }
    index as u32
}

/// The verifier has seen what is carried to a graph only if something calls it.
fn is_called(module: &Module, graph: usize) -> bool {
    module.schedule.iter().any(|s| s.graph == graph)
}

/// Whether nothing is called after a graph.
fn is_last(module: &Module, graph: usize) -> bool {
    let before = module.schedule.split_last().map_or(&[][..], |(_, before)| before);
    before.iter().all(|s| s.graph != graph)
}

/// One fixed region for each carried value, large enough for it in every graph.
fn carry_slots(modules: &[(Bucket, &Module)], limits: &Dims) -> (Vec<Region>, u64) {
    let mut sizes: Vec<u64> = Vec::new();
    let mut need = |i: usize, ty: &Type| {
        if let Type::Tensor(ty) = ty {
            if sizes.len() <= i {
                sizes.resize(i + 1, 0);
            }
            sizes[i] = sizes[i].max(ty.bytes(limits));
        }
    };
    for (_, module) in modules {
        let carries = |i: usize| is_called(module, i) && !is_last(module, i);
        for (_, graph) in module.graphs.iter().enumerate().filter(|g| carries(g.0)) {
            tensor_results(graph).enumerate().for_each(|(i, v)| need(i, graph.ty(v)));
        }
    }
    let mut end = 0u64;
    let slots = sizes.into_iter().map(|bytes| {
        let slot = Region { offset: end, bytes };
        end = aligned(end.saturating_add(bytes));
        slot
    });
    (slots.collect(), end)
}

fn output_rows(modules: &[(Bucket, &Module)]) -> Result<Option<Sym>, PlanError> {
    let mut found = None;
    let graphs = modules.iter().flat_map(|(_, m)| &m.graphs);
    for (_, param, ty) in graphs.flat_map(Graph::params) {
        if !matches!(param, Param::Step(StepInput::OutputRows | StepInput::Picks)) {
            continue;
        }
        let sym = match ty {
            Type::Tensor(TensorType { shape, .. }) => match shape[..] {
                [Dim::Sym { sym: sym @ (Sym::B | Sym::T), times: 1 }, ..] => Some(sym),
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

/// Shares constants and planes between calls.
#[derive(Default)]
struct Binder {
    weights: HashMap<Weight, u32>,
    states: HashMap<StateSpec, u32>,
}

impl Binder {
    fn calls(
        &mut self,
        module: &Module,
        graphs: &[Lowered],
        plan: &mut Plan,
    ) -> Result<Vec<ProgramCall>, PlanError> {
        let call = |site: &infernum_ir::CallSite| {
            let (graph, lowered) = (&module.graphs[site.graph], &graphs[site.graph]);
            let weights = lowered.weights.iter().map(|&value| {
                let weight = recipe::weight(graph, value, site.layer).ok_or_else(|| {
                    let (graph, value) = (graph.name.clone(), graph.value_name(value).to_owned());
                    PlanError::Recipe { graph, value }
                })?;
                Ok(*self.weights.entry(weight).or_insert_with_key(|weight| {
                    plan.weights.push(weight.clone());
                    plan.weights.len() as u32 - 1
                }))
            });
            let weights = weights.collect::<Result<_, PlanError>>()?;
            let states = lowered.states.iter().map(|(of, plane, ty)| {
                let layer = of.or(site.layer);
                let spec = StateSpec { layer, plane: plane.clone(), ty: ty.clone() };
                *self.states.entry(spec).or_insert_with_key(|spec| {
                    plan.states.push(spec.clone());
                    plan.states.len() as u32 - 1
                })
            });
            let states = states.collect();
            Ok(ProgramCall { program: lowered.program, layer: site.layer, weights, states })
        };
        module.schedule.iter().map(call).collect()
    }
}

/// What one step leaves in the cache another one reads, in whichever bucket.
fn same_planes(plan: &Plan) -> Result<(), PlanError> {
    for schedule in &plan.schedules {
        let used = |i: usize| schedule.calls.iter().any(|c| c.states.contains(&(i as u32)));
        if let Some(i) = (0..plan.states.len()).find(|i| !used(*i)) {
            let StateSpec { layer, plane, .. } = &plan.states[i];
            return Err(PlanError::Planes {
                bucket: schedule.bucket,
                plane: layer.map_or_else(|| plane.clone(), |l| format!("{plane} of layer {l}")),
            });
        }
    }
    Ok(())
}

/// Every step within the limits has a schedule. One token is always one sequence's only one.
pub(crate) fn covers(plan: &Plan) -> Result<(), PlanError> {
    // The step's tokens change kind only where a bucket begins or ends.
    let edges = plan.schedules.iter().flat_map(|s| [s.bucket.min, s.bucket.max.saturating_add(1)]);
    let mut edges: Vec<u64> = edges.chain([1, 2]).collect();
    edges.sort_unstable();
    for tokens in edges.into_iter().filter(|t| (1..=plan.limits.t).contains(t)) {
        let kinds: &[bool] = if tokens == 1 { &[true] } else { &[false, true] };
        // Where greedy steps have schedules of their own, or those with adapters, all of them do.
        let all = plan.schedules.iter().enumerate().map(|(i, s)| (plan.yields(i), s.adapts));
        let lacks = |kind: &&bool| {
            let missing = |form| plan.most_specific(tokens, **kind, form).is_none();
            all.clone().any(missing) || plan.schedules.is_empty()
        };
        if let Some(&decode_only) = kinds.iter().find(lacks)
            && (!decode_only || tokens <= plan.limits.seqs)
        {
            return Err(PlanError::Gap { tokens, decode_only });
        }
    }
    Ok(())
}
