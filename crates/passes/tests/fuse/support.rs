//! What the tests share: rules of their own, small modules, and running both.

use std::collections::HashMap;
use std::path::Path;

use infernum_frontend_hf::spec::{Library, Source};
use infernum_frontend_hf::{LowerOptions, Model, ModelFiles};
use infernum_ir::interp::{Interpreter, Rounding, SeqShape, States, StepShape, Tensor};
use infernum_ir::{DType, Module, OpSet, Sym, Type, WeightRef, text, verify};
use infernum_passes::data::Kernels;
use infernum_passes::fuse::{self, Bucket, CostTable, FuseOptions, FusedModule, fuse};

/// Fused ops that the rules below make; all have kernels on a GPU.
const FUSED: &[&str] = &[
    r#"Fused(name: "t_add_rmsnorm", doc: "d", operands: ["a", "b", "w?"], attrs: ["eps", "offset"],
        body: { "sum": add(a: "a", b: "b"),
                "normed": rmsnorm(x: "sum", w: "w", eps: "eps", offset: "offset") },
        results: ["sum", "normed"], template: "t")"#,
    r#"Fused(name: "t_swiglu", doc: "d", operands: ["gate", "up"],
        body: { "act": silu(x: "gate"), "y": mul(a: "act", b: "up") },
        results: ["y"], template: "t")"#,
    r#"Fused(name: "t_scores", doc: "d", operands: ["q", "k"], attrs: ["scale: float", "causal: bool"],
        body: { "dots": scores(q: "q", k: "k"), "scaled": scale(x: "dots", by: "scale"),
                "masked": mask(x: "scaled", when: "causal") },
        results: ["masked"])"#,
    r#"Fused(name: "t_attention", doc: "d", operands: ["q", "k", "v", "k_state", "v_state"],
        attrs: ["scale: float"],
        body: { "k_new": kv_write(state: "k_state", x: "k"), "v_new": kv_write(state: "v_state", x: "v"),
                "keys": kv_read(state: "k_new"), "values": kv_read(state: "v_new"),
                "x": t_scores(q: "q", k: "keys", scale: "scale", causal: true),
                "p": softmax(x: "x"), "mixed": mix(p: "p", v: "values") },
        results: ["k_new", "v_new", "mixed"], template: "t")"#,
    r#"Fused(name: "t_write_scaled", doc: "d", operands: ["state", "x"],
        body: { "y": kv_write(state: "state", x: "x"), "z": scale(x: "x", by: 2) },
        results: ["y", "z"], template: "t")"#,
];

pub(crate) const RULES: &str = r#"[
    Rule(name: "t-add-rmsnorm", numerics: exact, vars: { "a": "[.., K]", "b": "[.., K]", "w": "const [K]?" },
        left: { "sum": add(a: "a", b: "b"),
                "normed": rmsnorm(x: "sum", w: "w", eps: "eps", offset: "offset") },
        right: { "sum, normed": t_add_rmsnorm(a: "a", b: "b", w: "w", eps: "eps", offset: "offset") }),
    Rule(name: "t-swiglu", numerics: rounds, vars: { "gate": "[.., F]", "up": "[.., F]" },
        left: { "act": silu(x: "gate"), "y": mul(a: "act", b: "up") },
        right: { "y": t_swiglu(gate: "gate", up: "up") },
        requires: ["gate.dtype == up.dtype"], when: ["tokens.max <= 64", "device.kind == 'cuda'"]),
    Rule(name: "t-pack", numerics: exact,
        vars: { "x": "[n, K]", "wa": "const [M, K]", "wb": "const [N, K]", "ba": "const [M]?", "bb": "const [N]?" },
        left: { "a": linear(x: "x", w: "wa", bias: "ba"), "b": linear(x: "x", w: "wb", bias: "bb"),
                "y": t_swiglu(gate: "a", up: "b") },
        right: { "w": concat(a: "wa", b: "wb", axis: 0),
                 "bias": concat(a: "ba", b: "bb", axis: 0, when: "ba != null"),
                 "packed": linear(x: "x", w: "w", bias: "bias"),
                 "a": slice(x: "packed", axis: 1, start: 0, len: "wa.shape[0]"),
                 "b": slice(x: "packed", axis: 1, start: "wa.shape[0]", len: "wb.shape[0]"),
                 "y": t_swiglu(gate: "a", up: "b") },
        requires: ["(ba == null) == (bb == null)"]),
    Rule(name: "t-scores", numerics: exact, vars: { "q": "[T, G*P, D]", "k": "[S, G, D]" },
        left: { "x": scores(q: "q", k: "k") },
        right: { "x": t_scores(q: "q", k: "k", scale: 1, causal: false) }),
    Rule(name: "t-scale", numerics: reassoc, vars: { "q": "[T, G*P, D]", "k": "[S, G, D]" },
        left: { "x": t_scores(q: "q", k: "k", scale: "scale", causal: false), "y": scale(x: "x", by: "by") },
        right: { "y": t_scores(q: "q", k: "k", scale: "scale * by", causal: false) }),
    Rule(name: "t-mask", numerics: exact, vars: { "q": "[T, G*P, D]", "k": "[S, G, D]" },
        left: { "x": t_scores(q: "q", k: "k", scale: "scale", causal: false), "y": mask(x: "x", window: None) },
        right: { "y": t_scores(q: "q", k: "k", scale: "scale", causal: true) }),
    Rule(name: "t-attention", numerics: rounds,
        vars: { "q": "[T, G*P, D]", "k": "[T, G, D]", "v": "[T, G, D]", "k_state": "state [G, D]", "v_state": "state [G, D]" },
        left: { "k_new": kv_write(state: "k_state", x: "k"), "v_new": kv_write(state: "v_state", x: "v"),
                "keys": kv_read(state: "k_new"), "values": kv_read(state: "v_new"),
                "x": t_scores(q: "q", k: "keys", scale: "scale", causal: true),
                "p": softmax(x: "x"), "mixed": mix(p: "p", v: "values") },
        right: { "k_new, v_new, mixed": t_attention(q: "q", k: "k", v: "v", k_state: "k_state",
                                                    v_state: "v_state", scale: "scale") }),
    Rule(name: "t-wrong-type", numerics: exact, vars: { "x": "[.., F]" },
        left: { "y": gelu(x: "x") }, right: { "y": cast(x: "x", dtype: "bf16") }),
    Rule(name: "t-write-scaled", numerics: exact, vars: { "s": "state [G, D]", "x": "[T, G, D]" },
        left: { "y": kv_write(state: "s", x: "x"), "r": kv_read(state: "y") },
        right: { "y, z": t_write_scaled(state: "s", x: "x"), "r": kv_read(state: "y") }),
]"#;

/// The fused ops and rules above, alone.
pub(crate) fn kernels(rules: &str) -> Kernels {
    let mut kernels = Kernels::default();
    let source = |(i, text): (usize, &&str)| Source::new(&format!("fused{i}.ron"), text);
    let sources = FUSED.iter().enumerate().map(source).collect();
    kernels.define_all(sources).unwrap_or_else(|e| panic!("{e}"));
    kernels.add_rules(&Source::new("rules.ron", rules)).unwrap_or_else(|e| panic!("{e}"));
    kernels
}

/// One decoded token on a GPU.
pub(crate) fn options() -> FuseOptions {
    on("sm_90a", Bucket { min: 1, max: 1, decode: true })
}

pub(crate) fn on(target: &str, bucket: Bucket) -> FuseOptions {
    let mut costs = CostTable::named(target, None).unwrap_or_else(|e| panic!("{e}"));
    if target != "cpu" {
        // Those of the tests too.
        costs.kernels = fuse::Kernels::Templates;
    }
    FuseOptions { explain: true, ..FuseOptions::new(target, costs, bucket) }
}

/// A module of one graph.
pub(crate) fn module(body: &str) -> Module {
    module_with(body, &OpSet::default())
}

/// A module of one graph that may use what `ops` has.
pub(crate) fn module_with(body: &str, ops: &OpSet) -> Module {
    let text = format!("module m\n\ngraph g {{\n{body}}}\n\nschedule g 0..1\n");
    text::parse_with(&text, "test", ops).unwrap_or_else(|e| panic!("{e}"))
}

/// A fixture's model, without its weights.
pub(crate) fn fixture(name: &str, dtype: DType) -> Module {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name);
    let files = ModelFiles::folder(&dir).unwrap_or_else(|e| panic!("{e}"));
    let model = Model::without_weights(files, None, &Library::default());
    let options = LowerOptions { dtype: Some(dtype), max_length: Some(64), rows: Sym::T };
    let lowered = model.and_then(|m| m.lower(options, []));
    lowered.unwrap_or_else(|e| panic!("{name}: {e}")).module
}

pub(crate) fn fused(module: &Module, kernels: &Kernels, options: &FuseOptions) -> FusedModule {
    let fused = fuse(module, kernels, options).unwrap_or_else(|e| panic!("{e}"));
    verify(&fused.module).unwrap_or_else(|e| panic!("{e}"));
    fused
}

/// Numbers that depend on nothing but the name.
pub(crate) fn weights(weight: &WeightRef, layer: Option<u32>, ty: &Type) -> Result<Tensor, String> {
    let ty = ty.tensor()?;
    let shape: Vec<usize> = ty.shape.iter().map(|d| d.as_const().unwrap_or(1) as usize).collect();
    let mut seed = layer.map_or(7, u64::from) + 1;
    for byte in weight.name.bytes() {
        seed = (seed ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    let next = |_| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as f64 / f64::from(1u32 << 31) - 0.5
    };
    Ok(Tensor { data: (0..shape.iter().product()).map(next).collect(), shape })
}

/// A prefill of two sequences, then a token for each: what every call of both steps carried on.
pub(crate) fn run(module: &Module) -> Vec<Tensor> {
    let interpreter = Interpreter::new(&weights, Rounding::Exact);
    let mut states = States::default();
    let mut carried = Vec::new();
    let seq = |new, context| SeqShape { new, context };
    let mut steps =
        [StepShape::of(vec![seq(3, 3), seq(5, 5)]), StepShape::of(vec![seq(1, 4), seq(1, 6)])];
    // The second sequence has the second adapter, where there are some.
    steps.iter_mut().for_each(|step| step.adapters = vec![(1, 2)]);
    for step in &steps {
        let count = step.seqs.iter().map(|s| s.new).sum::<usize>() as u32;
        let tokens: Vec<u32> = (0..count).map(|i| i * 5 % 8).collect();
        interpreter
            .step(module, step, &tokens, &mut states, &mut |_, out| carried.extend(out.clone()))
            .unwrap_or_else(|e| panic!("{e}\n{}", text::print(module)));
    }
    carried
}

/// Mean squared difference over mean square.
pub(crate) fn nmse(found: &[Tensor], expected: &[Tensor]) -> f64 {
    let flat = |list: &[Tensor]| list.iter().flat_map(|t| t.data.clone()).collect::<Vec<f64>>();
    let (found, expected) = (flat(found), flat(expected));
    assert_eq!(found.len(), expected.len());
    let error: f64 = found.iter().zip(&expected).map(|(a, b)| (a - b).powi(2)).sum();
    // Also where all are zero, as the likeliest tokens may be.
    if error == 0.0 {
        return 0.0;
    }
    let error = error / expected.iter().map(|b| b * b).sum::<f64>();
    if error.is_nan() { f64::INFINITY } else { error }
}

/// How often each op is called, over all graphs.
pub(crate) fn calls(module: &Module) -> HashMap<&'static str, usize> {
    let mut calls = HashMap::new();
    for (_, node) in module.graphs.iter().flat_map(infernum_ir::Graph::nodes) {
        if let infernum_ir::NodeKind::Op { op, .. } = &node.kind {
            *calls.entry(op.name).or_default() += 1;
        }
    }
    calls
}
