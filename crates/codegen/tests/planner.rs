//! Runs plans of random modules on a memory of tags instead of numbers: a tag names the whole
//! expression that made a value, so that any buffer overwritten too early shows.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use infernum_codegen::{Arg, Launch, Plan, TargetKind, Value, plan};
use infernum_ir::{
    Attr, CallSite, DType, Dim, Dims, Effect, Graph, Module, NodeKind, Op, Param, StepInput, Sym,
    TensorType, Type, ValueId, WeightRef,
};
use proptest::prelude::*;

const LIMITS: Dims = Dims { t: 3, b: 1, s: 3, pairs: 9, seqs: 1 };

fn hidden() -> TensorType {
    TensorType::act(DType::F32, [Dim::sym(Sym::T), Dim::Const(24)])
}

/// One random op: (which, operand, operand), operands counted back from the newest value.
type BodyStep = (u8, usize, usize);

fn body(name: &str, carries: usize, steps: &[BodyStep], results: &[usize]) -> Graph {
    let mut g = Graph::new(name);
    let mut values: Vec<ValueId> =
        (0..carries).map(|i| g.param(format!("c{i}"), Param::Carry(i as u32), hidden())).collect();
    let w = WeightRef { name: format!("{name}.{{layer}}.w"), stack: None };
    let w = g.param("w", Param::Weight(w), TensorType::weight(DType::F32, &[24, 24]));
    for (i, &(which, a, b)) in steps.iter().enumerate() {
        let pick = |n: usize| values[values.len() - 1 - n % values.len()];
        let (a, b) = (pick(a), pick(b));
        let mut call = |op: &str, operands: &[Option<ValueId>], attrs| {
            let op = Op::find(op).expect("op");
            let name = format!("v{}", g.len());
            g.call(vec![name], op, operands, attrs, None).expect("typed")[0]
        };
        let v = match which % 5 {
            0 => call("add", &[Some(a), Some(b)], vec![]),
            1 => call("silu", &[Some(a)], vec![]),
            2 => call("linear", &[Some(a), Some(w), None], vec![Attr::None]),
            3 => {
                let shape = vec![Dim::sym(Sym::T), Dim::Const(4), Dim::Const(6)];
                let view = call("reshape", &[Some(a)], vec![Attr::Dims(shape)]);
                let x = if i % 2 == 0 { call("silu", &[Some(view)], vec![]) } else { view };
                call("reshape", &[Some(x)], vec![Attr::Dims(hidden().shape)])
            }
            _ => call("rmsnorm", &[Some(a), None], vec![Attr::Float(0.0), Attr::Float(0.0)]),
        };
        values.push(v);
    }
    let results = results.iter().map(|&r| values[r % values.len()]).collect();
    g.set_results(results);
    g
}

fn start(carries: usize) -> Graph {
    let mut g = Graph::new("start");
    let tokens = TensorType::act(DType::U32, [Dim::sym(Sym::T)]);
    let tokens = g.param("tokens", Param::Step(StepInput::Tokens), tokens);
    let results = (0..carries).map(|i| {
        let w = Param::Weight(WeightRef { name: format!("e{i}"), stack: None });
        let w = g.param(format!("w{i}"), w, TensorType::weight(DType::F32, &[5, 24]));
        let op = Op::find("embedding").expect("op");
        g.call(vec![format!("x{i}")], op, &[Some(tokens), Some(w)], vec![], None).expect("typed")[0]
    });
    let results = results.collect();
    g.set_results(results);
    g
}

fn tag(parts: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    hasher.finish()
}

/// What every call should carry.
fn expected(module: &Module) -> Vec<Vec<u64>> {
    let mut carried: Vec<u64> = Vec::new();
    let run = |site: &CallSite| {
        let graph = &module.graphs[site.graph];
        let mut tags: HashMap<ValueId, u64> = HashMap::new();
        for (i, node) in graph.nodes() {
            let t = match &node.kind {
                NodeKind::Param(Param::Carry(c)) => carried[*c as usize],
                NodeKind::Param(Param::Weight(w)) => tag(&w.tensors(site.layer)[0]),
                NodeKind::Param(p) => tag(p),
                NodeKind::Op { op, .. } => {
                    let operands: Vec<u64> =
                        graph.operands(i).iter().flatten().map(|v| tags[v]).collect();
                    if op.effect == Effect::View { operands[0] } else { tag((op.name, operands)) }
                }
            };
            tags.insert(ValueId { node: i, result: 0 }, t);
        }
        carried = graph.results().iter().map(|v| tags[v]).collect();
        carried.clone()
    };
    module.schedule.iter().map(run).collect()
}

struct Memory(Vec<u64>);

impl Memory {
    fn range(plan: &Plan, program: usize, buffer: u32, ty: &TensorType) -> std::ops::Range<usize> {
        let region = plan.programs[program].buffers[buffer as usize];
        let bytes = ty.bytes(&LIMITS);
        assert!(bytes <= region.bytes && region.offset + region.bytes <= plan.arena_bytes);
        region.offset as usize / 4..(region.offset + bytes) as usize / 4
    }

    fn read(&self, range: std::ops::Range<usize>) -> u64 {
        let words = &self.0[range];
        if words.iter().all(|w| *w == words[0]) { words[0] } else { 0 }
    }
}

fn run(plan: &Plan) -> Vec<Vec<u64>> {
    let mut memory = Memory(vec![0; plan.arena_bytes as usize / 4]);
    let mut out = Vec::new();
    for call in &plan.schedules[0].calls {
        let index = call.program as usize;
        let program = &plan.programs[index];
        for launch in &program.launches {
            let read = |v: &Value| match (v.arg, &v.ty) {
                (Arg::Buffer(b), Type::Tensor(ty)) => {
                    memory.read(Memory::range(plan, index, b, ty))
                }
                (Arg::Weight(slot), _) => {
                    let weight = &plan.weights[call.weights[slot as usize] as usize];
                    let infernum_codegen::Recipe::Tensor(name) = &weight.recipe else {
                        panic!("{weight:?}")
                    };
                    tag(name)
                }
                (Arg::Step(input), _) => tag(Param::Step(input)),
                other => panic!("{other:?}"),
            };
            let operands: Vec<u64> = launch.operands.iter().flatten().map(read).collect();
            let t = if launch.op == Launch::COPY {
                operands[0]
            } else {
                tag((launch.op.as_str(), operands))
            };
            let (Arg::Buffer(b), Type::Tensor(ty)) = (launch.results[0].arg, &launch.results[0].ty)
            else {
                panic!("{launch:?}")
            };
            memory.0[Memory::range(plan, index, b, ty)].fill(t);
            for &freed in &launch.frees {
                let region = program.buffers[freed as usize];
                let words = region.offset as usize / 4..(region.offset + region.bytes) as usize / 4;
                memory.0[words].fill(0);
            }
        }
        let carried = program.results.iter();
        out.push(
            carried.map(|c| memory.read(Memory::range(plan, index, c.buffer, &c.ty))).collect(),
        );
    }
    out
}

proptest! {
    #[test]
    fn no_value_is_overwritten_before_its_last_use(
        carries in 1usize..4,
        steps in prop::collection::vec((any::<u8>(), 0usize..6, 0usize..6), 0..14),
        other in prop::collection::vec((any::<u8>(), 0usize..6, 0usize..6), 0..6),
        results in prop::collection::vec(0usize..20, 4),
    ) {
        let a = body("a", carries, &steps, &results[..carries]);
        let b = body("b", carries, &other, &results[1..=carries]);
        let site = |graph, layer| CallSite { graph, layer };
        let module = Module {
            name: "random".to_owned(),
            graphs: vec![start(carries), a, b],
            schedule: vec![
                site(0, None), site(1, Some(0)), site(1, Some(1)), site(2, Some(2)), site(1, Some(3)),
            ],
        };
        let plan = plan(&module, TargetKind::Cpu, LIMITS).expect("a plan");
        prop_assert_eq!(run(&plan), expected(&module));
    }
}

fn residual() -> Module {
    let steps = [(4, 0, 0), (2, 0, 0), (0, 0, 2), (4, 0, 0), (2, 0, 0), (0, 0, 2)];
    Module {
        name: "residual".to_owned(),
        graphs: vec![start(1), body("layer", 1, &steps, &[6])],
        schedule: (0..4)
            .map(|i: u32| CallSite { graph: usize::from(i > 0), layer: i.checked_sub(1) })
            .collect(),
    }
}

#[test]
fn a_residual_stream_stays_in_one_place() {
    let plan = plan(&residual(), TargetKind::Cpu, LIMITS).expect("a plan");
    let layer = &plan.programs[1];
    assert!(layer.launches.iter().all(|l| l.op != Launch::COPY));
    // Both additions write over the stream.
    assert_eq!(layer.launches.iter().filter(|l| l.op == "add" && l.is_in_place()).count(), 2);
    assert_eq!(layer.buffers[layer.results[0].buffer as usize].offset, 0);
    // The stream, and one input and one output of a linear.
    assert_eq!(plan.arena_bytes, 3 * 320);
}

#[test]
fn a_plan_survives_text_and_is_the_same_each_time() {
    let first = plan(&residual(), TargetKind::Cpu, LIMITS).expect("a plan");
    let text = serde_json::to_string(&first).expect("text");
    assert_eq!(serde_json::from_str::<Plan>(&text).expect("a plan"), first);
    let again = plan(&residual(), TargetKind::Cpu, LIMITS).expect("a plan");
    assert_eq!(serde_json::to_string(&again).expect("text"), text);
    assert_eq!(first.summary().weights, 4);
}
