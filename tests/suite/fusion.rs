//! Fusion of the shipped families: what comes out, and that it means the same.

use std::path::Path;

use infernum_codegen::Limits;
use infernum_codegen::compile::{Compiled, Options, compile};
use infernum_frontend_hf::LowerOptions;
use infernum_ir::interp::{Interpreter, Rounding, States, Step, Tensor};
use infernum_ir::{DType, Module, Sym, Type, WeightRef, text};
use infernum_passes::Pipeline;
use infernum_passes::check::check_rule;
use infernum_passes::data::Kernels;
use infernum_passes::fuse::CostTable;

use crate::support::{Fixture, names, nmse, root};

/// Compiles a fixture for a target; with steps of up to 64 tokens.
fn compiled(fixture: &Fixture, target: &str, explain: bool) -> Compiled {
    compiled_with(fixture, target, explain, None)
}

/// As [`compiled`], with the data files of a folder of the user's.
fn compiled_with(fixture: &Fixture, target: &str, explain: bool, data: Option<&Path>) -> Compiled {
    let pipeline = Pipeline::named("default", None).expect("a built-in pipeline");
    let kernels = Kernels::load(data, &[]).unwrap_or_else(|e| panic!("{e}"));
    let costs = CostTable::named(target, None).expect("a built-in cost table");
    let options = Options {
        model: &fixture.model,
        lower: LowerOptions {
            dtype: Some(DType::Bf16),
            max_length: Some(fixture.max_length),
            rows: Sym::B,
        },
        pipeline: &pipeline,
        kernels: &kernels,
        costs: (target, &costs),
        rules: None,
        explain,
        limits: Limits { chunk: 64, sequences: 1, max_length: fixture.max_length },
        device: None,
    };
    compile(&options, &mut |_, _, _| {}).unwrap_or_else(|e| panic!("{}: {e}", fixture.name))
}

/// A fixture of each family.
const FAMILIES: [&str; 4] = ["llama/gqa3", "mistral/window", "qwen2/windows", "qwen3/gqa3_tied"];

/// The logits that a module's reference semantics give, exactly.
fn interpreted(fixture: &Fixture, module: &Module) -> Vec<f64> {
    let checkpoint = fixture.model.checkpoint.as_ref().expect("a fixture has weights");
    let weights = |weight: &WeightRef, layer: Option<u32>, ty: &Type| -> Result<Tensor, String> {
        let name = &weight.tensors(layer)[0];
        let view = checkpoint.tensor(name).ok_or_else(|| format!("{name} is missing"))?;
        let halves = view.data.chunks_exact(2).map(|b| u32::from(u16::from_le_bytes([b[0], b[1]])));
        let data = halves.map(|bits| f64::from(f32::from_bits(bits << 16))).collect();
        let shape = ty.tensor()?.sizes(&infernum_ir::Dims::default());
        Ok(Tensor { shape, data })
    };
    let tokens = &fixture.tokens[..24.min(fixture.tokens.len())];
    let step = Step::one(tokens.len(), tokens.len());
    let interpreter = Interpreter::new(&weights, Rounding::Exact);
    let carried = interpreter
        .step(module, &step, tokens, &mut States::default(), &mut |_, _| {})
        .unwrap_or_else(|e| panic!("{}: {e}", fixture.name));
    carried[0].data.clone()
}

#[test]
fn fused_modules_mean_the_same() {
    for name in names() {
        let fixture = Fixture::open(&name);
        if fixture.model.dtype().expect("a dtype") != DType::Bf16 {
            continue; // the weights above are read as bf16
        }
        let lowered = fixture
            .model
            .lower(LowerOptions { rows: Sym::B, ..fixture.options(DType::Bf16) })
            .expect("a shipped family");
        let expected = interpreted(&fixture, &lowered.module);
        for bucket in compiled(&fixture, "sm_90a", false).buckets {
            let error = nmse(&interpreted(&fixture, &bucket.module), &expected);
            assert!(error <= 1e-20, "{name}, {:?}: NMSE {error:.2e}", bucket.bucket);
        }
    }
}

#[test]
fn layers_fuse_to_few_launches() {
    for name in FAMILIES {
        let fixture = Fixture::open(name);
        for b in compiled(&fixture, "sm_90a", false).buckets {
            let most = if b.bucket.max == 1 { 7 } else { 9 };
            for graph in b.report.graphs.iter().filter(|g| g.graph != "embed" && g.graph != "head")
            {
                assert!(graph.launches.1 <= most, "{name}, {:?}: {graph:?}", b.bucket);
                assert_eq!(graph.gap_us, 0.0, "{name}: the extraction is exact");
            }
            assert!(b.report.warnings.is_empty(), "{:?}", b.report.warnings);
        }
    }
}

#[test]
fn fused_ir_and_explanations() {
    for name in FAMILIES {
        let fixture = Fixture::open(name);
        let compiled = compiled(&fixture, "sm_90a", true);
        let shown: Vec<String> = compiled
            .buckets
            .iter()
            .map(|b| format!("// {:?}\n{}", b.bucket, without_places(&text::print(&b.module))))
            .collect();
        let stem = name.replace('/', "_");
        insta::assert_snapshot!(format!("{stem}_fused"), shown.join("\n"));
        let explained = without_places(&compiled.buckets[0].report.to_string());
        insta::assert_snapshot!(format!("{stem}_explained"), explained);
    }
}

/// Places in our own files move with every edit: leave them out.
fn without_places(text: &str) -> String {
    let line = |l: &str| {
        let l = l.split(" @ ").next().unwrap_or_default();
        l.split(" (models/").next().unwrap_or_default().to_owned()
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn compiling_is_deterministic() {
    let fixture = Fixture::open("qwen2/windows");
    let once = || {
        let compiled = compiled(&fixture, "sm_90a", true);
        let modules: Vec<String> =
            compiled.buckets.iter().map(|b| text::print(&b.module)).collect();
        let reports: Vec<String> = compiled.buckets.iter().map(|b| b.report.to_string()).collect();
        (modules, reports, serde_json::to_string(&compiled.plan).expect("plain data"))
    };
    let first = once();
    for _ in 0..19 {
        assert!(once() == first, "two compilations of one model differ");
    }
}

/// The two examples: their rules are right, and fire where they say.
#[test]
fn fusions_of_ones_own_are_files() {
    let examples = root().join("../../examples");
    let granite = examples.join("new-architecture/granite.ron");
    let sigmoid = examples.join("new-attention/models/sigmoid.ron");
    for (data, spec, rule, op) in [
        ("new-fusion", &granite, "scaled-add", "map"),
        ("new-attention", &sigmoid, "sigmoid-attention", "sigmoid_attention"),
    ] {
        let data = examples.join(data);
        let kernels = Kernels::load(Some(&data), &[]).unwrap_or_else(|e| panic!("{e}"));
        let found = kernels.rules.iter().find(|r| r.name == rule).expect("the example's rule");
        let verdict = check_rule(found, 1, 100);
        assert!(verdict.passed() && verdict.planted >= 100, "{verdict}");

        // Granite's weights serve both: sigmoid attention has Llama's.
        let fixture = Fixture::with_spec("granite/multipliers", Some(spec));
        let compiled = compiled_with(&fixture, "cpu", true, Some(&data));
        for b in &compiled.buckets {
            let fired = b.report.fired.iter().filter(|f| f.rule == rule).count();
            assert!(fired > 0, "{rule} did not fire: {}", b.report);
            let text = text::print(&b.module);
            // Without a kernel the attention runs in its parts; the sum runs as one loop.
            assert_eq!(text.contains(&format!(" = {op}(")), op == "map", "{text}");
        }
        let lowered = fixture
            .model
            .lower(LowerOptions { rows: Sym::B, ..fixture.options(DType::Bf16) })
            .expect("the example's spec");
        let expected = interpreted(&fixture, &lowered.module);
        for b in &compiled.buckets {
            assert!(nmse(&interpreted(&fixture, &b.module), &expected) <= 1e-20);
        }
    }
}
