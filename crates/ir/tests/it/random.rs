//! Random well-typed graphs: whatever the type rules accept, from a pool of assorted parameters.

use std::collections::HashSet;

use infernum_ir::encoding::{Code, CodeKind, EncodingDef, Group, Stored};
use infernum_ir::expr::Expr;
use infernum_ir::interp::Tensor;
use infernum_ir::{
    Attr, AttrDef, AttrKind, CallSite, DType, Dim, Effect, Encoding, Graph, Loc, Module, NodeKind,
    Op, OpSet, Param, StateType, StepInput, Sym, TensorType, Type, ValueId, WeightRef, row_picks,
};

/// A small generator of our own, so that a number names a graph for ever.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n.max(1)
    }

    fn pick<T: Clone>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())].clone()
    }

    /// Within ±1, never 0.
    pub(crate) fn number(&mut self) -> f64 {
        (self.below(2000) as f64 - 999.5) / 1000.0
    }
}

/// One graph a number of `seeds`, each of which adds an op if one is found that fits.
pub(crate) fn module(seeds: &[u64]) -> Module {
    let mut graph = Graph::new("random");
    let mut pool = params(&mut graph);
    let mut written = HashSet::new();
    for (i, &seed) in seeds.iter().enumerate() {
        let mut rng = Rng(seed);
        let op = rng.pick(&Op::all().collect::<Vec<_>>());
        for _ in 0..400 {
            if let Some(results) = try_op(&mut graph, &mut rng, &pool, op, i, &written) {
                if op.effect == Effect::Writes {
                    written.insert(graph.operands(results[0].node)[0]);
                }
                // New values get their share of the picks.
                pool.extend(results.iter().chain(&results));
                break;
            }
        }
    }
    let last = pool.iter().rev().find(|&&v| is_activation(graph.ty(v))).copied();
    let states = pool
        .iter()
        .copied()
        .collect::<HashSet<_>>()
        .into_iter()
        .filter(|&v| matches!(graph.ty(v), Type::State(_)) && !written.contains(&Some(v)));
    let mut results: Vec<ValueId> = states.collect();
    results.sort();
    results.splice(0..0, last);
    graph.set_results(results);
    one_graph(graph)
}

fn is_activation(ty: &Type) -> bool {
    matches!(ty, Type::Tensor(t) if !t.constant)
}

fn params(graph: &mut Graph) -> Vec<ValueId> {
    let t = Dim::sym(Sym::T);
    let c = Dim::Const;
    let mut pool = Vec::new();
    for (input, name) in StepInput::ALL {
        pool.push(graph.param(name, Param::Step(input), input.ty(Sym::B)));
    }
    let table: Expr = "1 / (i + 1)".parse().unwrap();
    let op = Op::find("table").unwrap();
    let attrs = vec![Attr::Expr(table), Attr::Int(2)];
    pool.extend(graph.call(vec!["freqs".into()], op, &[], attrs, None).unwrap());
    for (i, (dtype, shape)) in [
        (DType::F32, &[1][..]),
        (DType::F32, &[2]),
        (DType::Bf16, &[4]),
        (DType::F16, &[8]),
        (DType::F32, &[64, 4]),
        (DType::Bf16, &[8, 4]),
        (DType::F32, &[4, 8]),
        (DType::Bf16, &[3, 8, 4]),
    ]
    .into_iter()
    .enumerate()
    {
        let weight = WeightRef { name: format!("w{i}.{{layer}}"), stack: None };
        let ty = TensorType::weight(dtype, shape);
        pool.push(graph.param(format!("w{i}"), Param::Weight(weight), ty));
    }
    let encoding = ops().encoding("q8_0").expect("an encoding").clone();
    let weight = WeightRef { name: "coded.{layer}".into(), stack: None };
    let ty = TensorType::encoded(encoding, &[2, 32]);
    pool.push(graph.param("coded", Param::Weight(weight), ty));
    for (bank, shape) in [("bank_a", [2, 1, 4]), ("bank_b", [2, 8, 1])] {
        let ty = TensorType::weight(DType::F32, &shape);
        // For `adapt` and its halves alone: no constant may be made of them.
        graph.param(bank, Param::Bank(format!("{bank}.{{layer}}")), ty);
    }
    for (plane, heads) in [("k", 2), ("v", 1)] {
        let ty = StateType::paged(DType::F32, heads, 4);
        pool.push(graph.param(plane, Param::State(plane.into()), ty));
    }
    for (slot, shape) in [("m", [2, 2]), ("n", [1, 4]), ("o", [3, 8])] {
        let ty = StateType::slot(DType::F32, &shape);
        pool.push(graph.param(slot, Param::State(slot.into()), ty));
    }
    // Only the embedding can start a chain of activations in a graph without carries.
    let embedding = Op::find("embedding").unwrap();
    let x = [graph.find("tokens"), graph.find("w4")];
    let x = graph.call(vec!["x".into()], embedding, &x, Vec::new(), None).unwrap()[0];
    pool.push(x);
    let rows = [Some(x), graph.find("output_rows")];
    let gathered =
        graph.call(vec!["last".into()], Op::find("gather_rows").unwrap(), &rows, Vec::new(), None);
    pool.extend(gathered.unwrap());
    for shape in [vec![t, c(1), c(4)], vec![t, c(2), c(2)], vec![t, c(4), c(1)]] {
        let name = format!("x{}", pool.len());
        let op = Op::find("reshape").unwrap();
        let view = graph.call(vec![name], op, &[Some(x)], vec![Attr::Dims(shape)], None);
        pool.extend(view.unwrap());
    }
    pool
}

fn try_op(
    graph: &mut Graph,
    rng: &mut Rng,
    pool: &[ValueId],
    op: Op,
    index: usize,
    written: &HashSet<Option<ValueId>>,
) -> Option<Vec<ValueId>> {
    let mut operands = Vec::new();
    for def in op.operands {
        let absent = def.optional && rng.below(2) == 0;
        // Ops of several operands of their own would hardly ever find them all.
        let step = match def.name {
            "ids" if op.name != "expert_slots" => graph.find("tokens"),
            "rows" => graph.find("output_rows"),
            "picks" => graph.find("picks"),
            "slots" => graph.find("adapters"),
            // Their sizes go together.
            "state" if op.name == "causal_conv" => graph.find("o"),
            "w" if op.name == "causal_conv" => graph.find("w5"),
            "a" if op.name == "adapt" => graph.find("bank_a"),
            "b" if op.name == "adapt" => graph.find("bank_b"),
            _ => None,
        };
        // Numbers of adapters are not followed to where they come from, as those of rows are.
        let usual = step.filter(|_| ["slots", "a", "b"].contains(&def.name) || rng.below(2) == 0);
        operands.push((!absent).then(|| usual.unwrap_or_else(|| rng.pick(pool))));
    }
    if matches!(op.effect, Effect::Writes) && written.contains(&operands[0]) {
        return None;
    }
    // What was not written in this step is not there to be read.
    let is_unwritten =
        |v: &ValueId| matches!(graph.node(v.node).kind, NodeKind::Param(Param::State(_)));
    if op.effect == Effect::Reads && operands.iter().flatten().any(is_unwritten) {
        return None;
    }
    let attrs: Vec<Attr> = op.attrs.iter().map(|def| attr(rng, def)).collect();
    let types: Vec<_> = operands.iter().map(|v| v.map(|v| graph.ty(v))).collect();
    let results = op.infer(&types, &attrs).ok()?;
    let is_empty = |ty: &Type| ty.tensor().is_ok_and(|t| t.shape.contains(&Dim::Const(0)));
    if results.iter().any(is_empty) {
        return None;
    }
    let results = results.len();
    let names = (0..results).map(|r| format!("{}.{index}_{r}", op.name)).collect();
    let loc = (rng.below(2) == 0).then(|| Loc {
        file: rng.pick(&["a b.ron", "dir/é:1.ron", " \"", ""]).into(),
        line: rng.below(100) as u32,
        col: rng.below(100) as u32,
    });
    let mut longer = graph.clone();
    let values = longer.call(names, op, &operands, attrs, loc).ok()?;
    // Nor are rows beyond a table.
    let mut module = one_graph(longer);
    if row_picks(&module).into_iter().any(|pick| pick.fault().is_some()) {
        return None;
    }
    *graph = module.graphs.pop()?;
    Some(values)
}

fn one_graph(graph: Graph) -> Module {
    let schedule = vec![CallSite { graph: 0, layer: Some(3) }];
    Module { name: "any".into(), graphs: vec![graph], schedule }
}

fn attr(rng: &mut Rng, def: &AttrDef) -> Attr {
    if rng.below(3) == 0
        && let Some(default) = def.default_value()
    {
        return default;
    }
    let dims = [1u64, 2, 4, 8].map(Dim::Const).into_iter();
    let dims: Vec<Dim> =
        dims.chain(Sym::ALL.map(Dim::sym)).chain([Dim::Sym { sym: Sym::T, times: 2 }]).collect();
    match def.kind {
        AttrKind::Bool => Attr::Bool(rng.below(2) == 0),
        AttrKind::Int => Attr::Int(rng.below(4) as i64),
        AttrKind::Float => Attr::Float(rng.pick(&[1.0, -0.5, 1e-6, 3e20, 0.1])),
        AttrKind::Enum(names) => Attr::Enum(rng.pick(names).to_owned()),
        AttrKind::DType => Attr::DType(rng.pick(&DType::ALL)),
        AttrKind::Dims => Attr::Dims((0..=rng.below(4)).map(|_| rng.pick(&dims)).collect()),
        AttrKind::Recurrence => {
            let text = rng.pick(&[
                "s[a, b], x[a, b] -> y[a]: s[a, b] = s * 0.5 + x; y[a] = sum(s * x)",
                "s[a, b], x[a, b], w[b] -> y[b, a]: y[b, a] = max(s, x); s[a, b] = x - w;",
                "s[a, b], x[b] -> y[b]: s[a, b] = x / (1 + abs(s)); t[b] = sum(s); y[b] = exp(-t)",
            ]);
            Attr::Recurrence(text.parse().unwrap())
        }
        AttrKind::Expr => {
            let text = rng.pick(&["a", "b > 0 ? a : -b", "i ** 2", "a * b + c", "[1, -2][a]"]);
            Attr::Expr(text.parse().unwrap())
        }
    }
}

/// Weights that depend on their name only.
pub(crate) fn weight(weight: &WeightRef, layer: Option<u32>, ty: &Type) -> Result<Tensor, String> {
    let names = weight.tensors(layer);
    let shape = ty.tensor()?.sizes(&infernum_ir::Dims::default());
    let each = shape.iter().product::<usize>() / names.len().max(1);
    let mut data = Vec::new();
    for name in names {
        let seed = name.bytes().fold(7, |h: u64, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
        let mut rng = Rng(seed);
        data.extend((0..each).map(|_| rng.number()));
    }
    Ok(Tensor { shape, data })
}

/// The primitives, and an encoding.
pub(crate) fn ops() -> OpSet {
    let field = |name: &str, ty: &str| (name.to_owned(), ty.to_owned());
    let encoding = Encoding::new(EncodingDef {
        name: "q8_0".to_owned(),
        doc: String::new(),
        stored: Stored::Blocks {
            values: 32,
            fields: vec![field("d", "f16"), field("q", "i8 [32]")],
        },
        tables: Vec::new(),
        constants: Vec::new(),
        lets: Vec::new(),
        zero: None,
        group: Group { n: Some(1), k: Some(32) },
        code: Code { kind: CodeKind::Signed, bits: 8, value: "q[k % 32]".to_owned() },
        scale: "d".to_owned(),
        minimum: None,
        when: None,
        activations: None,
        gguf: None,
        packed: false,
    });
    let mut ops = OpSet::default();
    ops.define_encoding(encoding.expect("a definition"));
    ops
}
