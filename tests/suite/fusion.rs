//! Fusion of the shipped families: what comes out, and that it means the same.

use std::collections::BTreeSet;
use std::path::Path;

use infernum_codegen::Limits;
use infernum_codegen::compile::{Compiled, Options, compile};
use infernum_codegen::cuda::{Device, Library, TunedVariants, attach};
use infernum_codegen::{CacheLayout, Recipe, Run};
use infernum_frontend_hf::{Config, LowerOptions, Model, spec};
use infernum_ir::interp::{Interpreter, Rounding, States, StepShape, Tensor};
use infernum_ir::{DType, Module, NodeKind, Sym, Type, WeightRef, text};
use infernum_passes::check::check_rule;
use infernum_passes::data::Kernels;
use infernum_passes::fuse::{Bucket, CostTable, FuseOptions, fuse};
use infernum_passes::{Adapters, KvDtype, Pipeline};

use crate::ir_fixtures::{self, LAYERS};
use crate::support::{Fixture, names, nmse, root};

/// Compiles a fixture for a target; with steps of up to 64 tokens.
fn compiled(fixture: &Fixture, target: &str, explain: bool) -> Compiled {
    compiled_with(fixture, target, explain, "default", None)
}

/// As [`compiled`], with another pipeline and the data files of a folder of the user's.
fn compiled_with(
    fixture: &Fixture,
    target: &str,
    explain: bool,
    pipeline: &str,
    data: Option<&Path>,
) -> Compiled {
    compiled_for(fixture, target, explain, pipeline, data, None)
}

/// The same, with room for adapters.
fn compiled_for(
    fixture: &Fixture,
    target: &str,
    explain: bool,
    pipeline: &str,
    data: Option<&Path>,
    adapters: Option<&Adapters>,
) -> Compiled {
    let pipeline = Pipeline::named(pipeline, None).expect("a built-in pipeline");
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
        kv_dtype: KvDtype::Auto,
        adapters,
        explain,
        limits: Limits { chunk: 64, sequences: 1, max_length: fixture.max_length },
        templates: &Library::default(),
        device: None,
    };
    compile(&options, &mut |_, _, _| {}).unwrap_or_else(|e| panic!("{}: {e}", fixture.name))
}

/// A fixture of each family.
const FAMILIES: [&str; 4] = ["llama/gqa3", "mistral/window", "qwen2/windows", "qwen3/gqa3_tied"];

/// Fused ops that larger ones go on from wherever these stand, with a layer in which they do, and the
/// larger ones.
const STEPPING_STONES: [(&str, &str, &[&str]); 3] = [
    ("add_rmsnorm", "gemma2", &["rmsnorm_add", "norm_linear", "norm_linear_geglu"]),
    ("attention", "gemma2", &["paged_attention"]),
    ("rope_kv_write", "gemma2", &["qk_rope_kv_write", "pack-qkv"]),
];

/// What logits of the same meaning may differ by: tokens are picked from logits rounded to f32.
const PICKED: f64 = 1e-14;

/// The logits that a module's reference semantics give, exactly.
pub(crate) fn interpreted(fixture: &Fixture, module: &Module) -> Vec<f64> {
    let checkpoint = fixture.model.checkpoint.as_ref().expect("a fixture has weights");
    let weights = |weight: &WeightRef, layer: Option<u32>, ty: &Type| -> Result<Tensor, String> {
        let mut data = Vec::new();
        for name in &weight.tensors(layer) {
            let view = checkpoint.tensor(name).ok_or_else(|| format!("{name} is missing"))?;
            match view.dtype.ir() {
                Some(DType::Bf16) => data.extend(view.data.chunks_exact(2).map(|b| {
                    f64::from(f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
                })),
                Some(DType::F32) => data.extend(
                    view.data
                        .chunks_exact(4)
                        .map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
                ),
                _ => return Err(format!("{name} is {}", view.dtype)),
            }
        }
        let shape = ty.tensor()?.sizes(&infernum_ir::Dims::default());
        Ok(Tensor { shape, data })
    };
    let tokens = &fixture.tokens[..24.min(fixture.tokens.len())];
    let step = StepShape::one(tokens.len(), tokens.len());
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
            .lower(LowerOptions { rows: Sym::B, ..fixture.options(DType::Bf16) }, [])
            .expect("a shipped family");
        let expected = interpreted(&fixture, &lowered.module);
        for bucket in compiled(&fixture, "sm_90a", false).buckets {
            let error = nmse(&interpreted(&fixture, &bucket.module), &expected);
            assert!(error <= PICKED, "{name}, {:?}: NMSE {error:.2e}", bucket.bucket);
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

/// A shape that ships, compiled for an H100 as it is served.
fn shape(name: &str) -> Compiled {
    shape_with(name, KvDtype::Auto, None, None)
}

/// The same with room for adapters.
fn adapted_shape(name: &str) -> Compiled {
    shape_with(name, KvDtype::Auto, Some(&Adapters { slots: 16, rank: 16, targets: None }), None)
}

/// The same, with a cache of this type, room for these adapters and matrices in this encoding.
fn shape_with(
    name: &str,
    kv_dtype: KvDtype,
    adapters: Option<&Adapters>,
    encoding: Option<&str>,
) -> Compiled {
    let path = root().join(format!("../../bench/shapes/{name}.json"));
    let text = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let config = Config::parse("config.json", &text).expect("a valid config");
    let mut model = Model::from_config(config, None, &spec::Library::default())
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    model.random_encoding = encoding.map(str::to_owned);
    let costs = CostTable::named("sm_90a", None).expect("a built-in cost table");
    let options = Options {
        model: &model,
        lower: LowerOptions { dtype: Some(DType::Bf16), max_length: None, rows: Sym::B },
        pipeline: &Pipeline::named("cuda", None).expect("a built-in pipeline"),
        kernels: &Kernels::load(None, &[]).expect("the built-in fused ops and rules"),
        costs: ("sm_90a", &costs),
        rules: None,
        kv_dtype,
        adapters,
        explain: false,
        limits: Limits { chunk: 8192, sequences: 256, max_length: 8192 },
        templates: &Library::default(),
        device: None,
    };
    compile(&options, &mut |_, _, _| {}).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// The launches of a shape's first layer on an H100, for each kind of step.
fn launches_at_every_size(name: &str) -> String {
    launches_of(&shape(name))
}

fn launches_of(compiled: &Compiled) -> String {
    let layer = |b: &infernum_codegen::compile::CompiledBucket| {
        let layer = b.report.graphs.iter().find(|g| g.graph == "decoder").expect("a layer");
        let ops: Vec<&str> = layer.calls.iter().map(|c| c.op.as_str()).collect();
        format!("{:?}: {} {}", b.bucket, layer.launches.1, ops.join(" "))
    };
    compiled.buckets.iter().map(layer).collect::<Vec<_>>().join("\n")
}

#[test]
fn launches_of_a_layer_at_every_size() {
    insta::assert_snapshot!(launches_at_every_size("llama-3.1-8b"));
}

/// With tens of tokens launches are those that a layer has without adapters.
#[test]
fn launches_of_an_adapted_layer_at_every_size() {
    insta::assert_snapshot!(launches_of(&adapted_shape("llama-3.1-8b")));
}

/// A cache of codes is a launch more at most, where the packed projection of a few tokens would have written it, and takes little
/// more than half of the memory.
#[test]
fn a_cache_of_codes_costs_a_launch_at_most() {
    let compiled =
        [KvDtype::Auto, KvDtype::Fp8].map(|dtype| shape_with("llama-3.1-8b", dtype, None, None));
    insta::assert_snapshot!(launches_of(&compiled[1]));
    let launches = |c: &Compiled, i: usize| {
        c.buckets[i].report.graphs.iter().find(|g| g.graph == "decoder").map(|g| g.launches.1)
    };
    for bucket in 0..compiled[0].buckets.len() {
        let [plain, codes] = [0, 1].map(|i| launches(&compiled[i], bucket).expect("a layer"));
        assert!(codes <= plain + 1, "{:?}: {plain}, {codes}", compiled[0].buckets[bucket].bucket);
    }
    let bytes = compiled.map(|c| CacheLayout::of(&c.plan, 16).row_bytes());
    assert_eq!(bytes, [32 * 2 * 8 * 128 * 2, 32 * 2 * 8 * (128 + 4)]);
}

/// Latent attention is five launches, whatever the step: none makes keys or values of the context.
#[test]
fn launches_of_a_latent_layer_at_every_size() {
    insta::assert_snapshot!(launches_at_every_size("deepseek-v2-lite"));
}

/// No buffer of latent attention grows with the context, which may be long and of many sequences.
#[test]
fn latent_attention_needs_no_memory_for_its_context() {
    for bucket in shape("deepseek-v2-lite").buckets {
        for (graph, node) in
            bucket.module.graphs.iter().flat_map(|g| g.nodes().map(move |n| (g, n.1)))
        {
            for ty in &node.types {
                let grows = ty.tensor().is_ok_and(|t| t.shape.contains(&Sym::S.into()));
                assert!(
                    !grows || matches!(node.kind, NodeKind::Param(_)),
                    "{:?}, {}: {ty}",
                    bucket.bucket,
                    graph.name
                );
            }
        }
    }
}

/// Norms, each after the product that makes what it norms and before one that takes it.
const PRE_NORM: &str = "module pre_norm
graph g {
  %x = carry 0 : bf16[T, 4096]
  %heads = carry 1 : bf16[T, 64]
  %o = weight \"o\" : const bf16[4096, 64]
  %norm = weight \"norm\" : const bf16[4096]
  %gate = weight \"gate\" : const bf16[192, 4096]
  %up = weight \"up\" : const bf16[192, 4096]
  %down = weight \"down\" : const bf16[4096, 192]
  %last = weight \"last\" : const bf16[64, 4096]
  %a = linear(%heads, %o, _) {dtype: none} : bf16[T, 4096]
  %mid = add(%x, %a) : bf16[T, 4096]
  %n = rmsnorm(%mid, %norm) {eps: 1e-5, offset: 1} : bf16[T, 4096]
  %g = linear(%n, %gate, _) {dtype: none} : bf16[T, 192]
  %u = linear(%n, %up, _) {dtype: none} : bf16[T, 192]
  %act = gelu_tanh(%g) : bf16[T, 192]
  %gated = mul(%act, %u) : bf16[T, 192]
  %d = linear(%gated, %down, _) {dtype: none} : bf16[T, 4096]
  %out = add(%mid, %d) : bf16[T, 4096]
  %m = rmsnorm(%out, _) {eps: 1e-5, offset: 0} : bf16[T, 4096]
  %y = linear(%m, %last, _) {dtype: f32} : f32[T, 64]
  return %out, %y
}
schedule
";

/// A module fused for steps of 17 to 64 tokens on an H100.
fn tens_of_tokens(module: &str) -> Module {
    let kernels = Kernels::load(None, &[]).expect("the built-in fused ops and rules");
    let module = text::parse_with(module, "module", &kernels.ops).unwrap_or_else(|e| panic!("{e}"));
    let costs = CostTable::named("sm_90a", None).expect("a built-in cost table");
    let bucket = Bucket { min: 17, max: 64, decode: true };
    let fused = fuse(&module, &kernels, &FuseOptions::new("sm_90a", costs, bucket));
    fused.unwrap_or_else(|e| panic!("{e}")).module
}

/// With tens of tokens no launch norms: products do, before and after.
#[test]
fn norms_between_products_are_parted() {
    let ops: Vec<&str> = fused_ops(&tens_of_tokens(PRE_NORM)).collect();
    assert_eq!(ops, ["linear_add_rms", "rms_linear_geglu", "linear_add_rms", "rms_linear"]);
}

#[test]
fn fused_ir_and_explanations() {
    for name in FAMILIES.into_iter().chain(["deepseek_v2/lite"]) {
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

/// The fused ops in a module.
fn fused_ops(module: &Module) -> impl Iterator<Item = &'static str> {
    let nodes = module.graphs.iter().flat_map(infernum_ir::Graph::nodes);
    let ops = nodes.filter_map(|(_, n)| match &n.kind {
        NodeKind::Op { op, .. } if op.fused.is_some() => Some(op.name),
        _ => None,
    });
    ops.collect::<Vec<_>>().into_iter()
}

/// Under the pipeline `greedy` the head yields tokens: in one launch where a GPU has few of them.
#[test]
fn a_greedy_head_yields_tokens() {
    for name in FAMILIES {
        let fixture = Fixture::open(name);
        let lowered = fixture
            .model
            .lower(LowerOptions { rows: Sym::B, ..fixture.options(DType::Bf16) }, [])
            .expect("a shipped family");
        let logits = interpreted(&fixture, &lowered.module);
        let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let token = logits.iter().position(|l| *l == most).expect("a largest") as f64;
        for b in compiled_with(&fixture, "sm_80", false, "greedy", None).buckets {
            assert_eq!(interpreted(&fixture, &b.module), [token], "{name}, {:?}", b.bucket);
            let head = b.report.graphs.iter().find(|g| g.graph == "head").expect("a head");
            let ops: Vec<&str> = head.calls.iter().map(|c| c.op.as_str()).collect();
            if b.bucket.max <= 16 {
                assert_eq!(ops, ["gather_norm_linear_argmax"], "{name}, {:?}", b.bucket);
            } else {
                let last = if b.bucket.max <= 128 { "linear_argmax" } else { "argmax" };
                assert!(ops.contains(&last), "{name}: {ops:?}");
            }
        }
        // The CPU runs the head in its parts.
        for b in compiled_with(&fixture, "cpu", false, "greedy", None).buckets {
            assert_eq!(interpreted(&fixture, &b.module), [token], "{name}, {:?}", b.bucket);
            assert!(fused_ops(&b.module).all(|op| !op.ends_with("argmax")), "{name}");
        }
    }
}

/// Shapes of real models, which have room for kernels that fixtures are too small for.
const SHAPES: [&str; 7] = [
    "llama-3.1-8b",
    "deepseek-v2-lite",
    "qwen3.5-4b",
    "nemotron-3-nano-30b-a3b",
    "kimi-linear-48b-a3b",
    "recurrentgemma-2b",
    "falcon-mamba-7b",
];

/// Every fused op that has a kernel somewhere is what some shipped family or layer comes to: a rule
/// puts it there and its cost keeps it there.
#[test]
fn every_fused_op_is_chosen_somewhere() {
    let mut chosen = BTreeSet::new();
    for (name, target) in FAMILIES.iter().flat_map(|n| [(n, "sm_80"), (n, "cpu")]) {
        for pipeline in ["default", "greedy"] {
            let compiled = compiled_with(&Fixture::open(name), target, false, pipeline, None);
            chosen.extend(compiled.buckets.iter().flat_map(|b| fused_ops(&b.module)));
        }
    }
    for (name, max) in LAYERS.iter().flat_map(|n| [(n, 1), (n, 512)]) {
        let module = ir_fixtures::fused(name, Bucket { min: max, max, decode: max == 1 }, &[]);
        chosen.extend(fused_ops(&module));
    }
    for name in SHAPES {
        chosen.extend(shape(name).buckets.iter().flat_map(|b| fused_ops(&b.module)));
    }
    for name in ["llama-3.1-8b", "llama-3.2-1b"] {
        chosen.extend(adapted_shape(name).buckets.iter().flat_map(|b| fused_ops(&b.module)));
    }
    for (name, encoding) in [("llama-3.1-8b", "fp8_block"), ("gpt-oss-20b", "mxfp4")] {
        let encoded = shape_with(name, KvDtype::Auto, None, Some(encoding));
        chosen.extend(encoded.buckets.iter().flat_map(|b| fused_ops(&b.module)));
    }
    chosen.extend(fused_ops(&tens_of_tokens(PRE_NORM)));
    let room = Adapters { slots: 2, rank: 4, targets: None };
    let llama = Fixture::open("llama/gqa3");
    let adapted = compiled_for(&llama, "sm_80", false, "default", None, Some(&room));
    chosen.extend(adapted.buckets.iter().flat_map(|b| fused_ops(&b.module)));
    let kernels = Kernels::load(None, &[]).expect("the built-in fused ops and rules");
    let all = kernels.ops.fused().filter(|op| op.cuda.is_some()).map(|op| op.name);
    let never: Vec<&str> = all.filter(|op| !chosen.contains(op)).collect();
    assert_eq!(never, STEPPING_STONES.map(|(op, ..)| op), "of {chosen:?}");
    for (op, layer, larger) in STEPPING_STONES {
        let bucket = Bucket { min: 16, max: 16, decode: false };
        let module = ir_fixtures::fused(layer, bucket, larger);
        assert!(fused_ops(&module).any(|o| o == op), "{op}: {}", text::print(&module));
    }
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

/// Packed projections, as Phi 3 and GLM 4 have them: their parts are products of sliced weights, which
/// pack again. Launches of a layer at one token, as the spec writes it and fused.
#[test]
fn packed_projections_fuse_as_well_as_parted_ones() {
    for (name, launches) in [
        ("phi3/packed", 5),
        ("glm/packed", 5),
        // Norms after attention and network, which add the residual.
        ("glm4/packed", 7),
    ] {
        let fixture = Fixture::open(name);
        let compiled = compiled_with(&fixture, "sm_90a", false, "cuda", None);
        let layer = |b: &infernum_codegen::compile::CompiledBucket| {
            let found = b.report.graphs.iter().find(|g| g.graph == "decoder");
            found.expect("a layer").launches
        };
        let found: Vec<_> = compiled.buckets.iter().map(|b| (b.bucket, layer(b))).collect();
        println!("{name}: {found:?}");
        assert_eq!(found[0].1.1, launches, "{name}: {found:?}");
        let lowered = fixture
            .model
            .lower(LowerOptions { rows: Sym::B, ..fixture.options(DType::Bf16) }, [])
            .expect("a shipped family");
        let expected = interpreted(&fixture, &lowered.module);
        for b in &compiled.buckets {
            assert!(nmse(&interpreted(&fixture, &b.module), &expected) <= PICKED, "{name}");
        }
        // What is packed in the checkpoint is read where it lies: nothing is stored twice.
        let packed = |w: &infernum_codegen::Weight| matches!(&w.recipe, Recipe::Tensor(n) if n.contains("gate_up_proj"));
        assert_eq!(compiled.plan.weights.iter().filter(|w| packed(w)).count(), 2, "{name}");
        let held =
            fixture.model.checkpoint.as_ref().map_or(0, infernum_frontend_hf::Checkpoint::data_len);
        assert!(compiled.plan.stored_bytes() <= held + 64 * 4, "{name}");
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
        let compiled = compiled_with(&fixture, "cpu", true, "default", Some(&data));
        for b in &compiled.buckets {
            let fired = b.report.fired.iter().filter(|f| f.rule == rule).count();
            assert!(fired > 0, "{rule} did not fire: {}", b.report);
            let text = text::print(&b.module);
            // Without a kernel the attention runs in its parts; the sum runs as one loop.
            assert_eq!(text.contains(&format!(" = {op}(")), op == "map", "{text}");
        }
        let lowered = fixture
            .model
            .lower(LowerOptions { rows: Sym::B, ..fixture.options(DType::Bf16) }, [])
            .expect("the example's spec");
        let expected = interpreted(&fixture, &lowered.module);
        for b in &compiled.buckets {
            assert!(nmse(&interpreted(&fixture, &b.module), &expected) <= 1e-20);
        }
    }
}

/// The example's op runs on PTX that Triton made, where that is admitted.
#[test]
fn a_foreign_kernel_is_a_file() {
    let data = root().join("../../examples/foreign-kernel");
    let spec = root().join("../../examples/new-architecture/granite.ron");
    let fixture = Fixture::with_spec("granite/multipliers", Some(&spec));
    let kernels = Kernels::load(Some(&data), &[]).unwrap_or_else(|e| panic!("{e}"));
    let device = Device::named("sm_90a").expect("a known architecture");
    let mut plan = compiled_with(&fixture, "sm_90a", false, "default", Some(&data)).plan;
    let library = Library::new(Some(&data));
    attach(&mut plan, &kernels.ops, &library, &device, &TunedVariants::default())
        .unwrap_or_else(|e| panic!("{e}"));
    let ptx: Vec<&str> =
        plan.kernels.iter().filter(|k| k.is_ptx).map(|k| k.name.as_str()).collect();
    assert_eq!(ptx, ["scaled_add"]);
    let launches = plan.programs.iter().flat_map(|p| &p.launches);
    let mut foreign = launches.filter(|l| l.op == "scaled_add").map(|l| match &l.run {
        Some(Run::Kernel(k)) => k.arguments.as_ref().map(Vec::len),
        _ => None,
    });
    assert!(foreign.all(|arguments| arguments == Some(7)));
}

/// Whatever a checkpoint is encoded in, and however small it is, each call has a kernel on every GPU.
#[test]
fn encoded_checkpoints_have_kernels_on_every_gpu() {
    let (kernels, library) =
        (Kernels::load(None, &[]).expect("built-in files"), Library::default());
    let is_encoded = |name: &String| {
        let config = std::fs::read_to_string(root().join(name).join("config.json"));
        config.is_ok_and(|config| config.contains("\"quantization_config\""))
    };
    let encoded: Vec<String> = names().into_iter().filter(is_encoded).collect();
    assert!(encoded.len() >= 15, "{encoded:?}");
    for name in encoded {
        let fixture = Fixture::open(&name);
        for target in ["sm_75", "sm_80", "sm_90a"] {
            let device = Device::named(target).expect("a device");
            let mut plan = compiled_with(&fixture, target, false, "cuda", None).plan;
            attach(&mut plan, &kernels.ops, &library, &device, &TunedVariants::default())
                .unwrap_or_else(|e| panic!("{name}, {target}: {e}"));
        }
    }
}
