//! Extraction against optima that another solver found: `tests/fixtures/ilp.py`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use infernum_codegen::Limits;
use infernum_codegen::compile::{Options, compile};
use infernum_frontend_hf::spec::Library;
use infernum_frontend_hf::{Config, LowerOptions, Model};
use infernum_ir::{DType, Sym};
use infernum_passes::Pipeline;
use infernum_passes::data::Kernels;
use infernum_passes::fuse::{
    Bucket, CostTable, Extracted, ExtractionProblem, FuseOptions, extraction_problems,
};

use crate::support::root;

/// Targets and the pipelines that they run.
const TARGETS: [(&str, &str); 2] = [("cpu", "default"), ("sm_90a", "cuda")];

/// One family in the size of a small model of it.
struct Family {
    name: &'static str,
    config: &'static str,
}

const FAMILIES: [Family; 4] = [
    Family {
        name: "llama",
        config: r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": true, "vocab_size": 128256"#,
    },
    Family {
        name: "mistral",
        config: r#"{"architectures": ["MistralForCausalLM"], "model_type": "mistral",
            "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 4096, "vocab_size": 32000"#,
    },
    Family {
        name: "qwen2",
        config: r#"{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
            "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
            "num_key_value_heads": 2, "tie_word_embeddings": true, "vocab_size": 151936,
            "use_sliding_window": true, "sliding_window": 1024, "max_window_layers": 1"#,
    },
    Family {
        name: "qwen3",
        config: r#"{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
            "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": true, "vocab_size": 151936"#,
    },
];

const COMMON: &str = r#", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "num_hidden_layers": 2, "max_position_embeddings": 8192, "dtype": "bfloat16"}"#;

/// Every problem that the shipped families pose, by family, graph, steps and target.
fn problems() -> BTreeMap<String, (ExtractionProblem, Extracted)> {
    let kernels = Kernels::load(None, &[]).expect("the built-in fused ops and rules");
    let mut problems = BTreeMap::new();
    for (family, (target, pipeline)) in FAMILIES.iter().flat_map(|f| TARGETS.map(|t| (f, t))) {
        let pipeline = Pipeline::named(pipeline, None).expect("a built-in pipeline");
        let config = format!("{}{COMMON}", family.config);
        let config = Config::parse("config.json", config.as_bytes()).expect("a valid config");
        let model = Model::from_config(config, None, &Library::default())
            .unwrap_or_else(|e| panic!("{}: {e}", family.name));
        let costs = CostTable::named(target, None).expect("a built-in cost table");
        let options = Options {
            model: &model,
            lower: LowerOptions { dtype: Some(DType::Bf16), max_length: None, rows: Sym::B },
            pipeline: &pipeline,
            kernels: &kernels,
            costs: (target, &costs),
            rules: None,
            adapters: None,
            kv_dtype: infernum_passes::KvDtype::Auto,
            explain: false,
            limits: Limits { chunk: 512, sequences: 1, max_length: 8192 },
            templates: &infernum_codegen::cuda::Library::default(),
            device: None,
        };
        // Each bucket's module as fusion finds it: what the pass before left.
        let mut modules = BTreeMap::new();
        compile(&options, &mut |step, bucket, module| {
            if let (Some(bucket), "canonicalise") = (bucket, step) {
                modules
                    .entry((bucket.min, bucket.max, bucket.decode))
                    .or_insert((bucket, module.clone()));
            }
        })
        .unwrap_or_else(|e| panic!("{}: {e}", family.name));
        for (bucket, module) in modules.into_values() {
            let mut fuse = FuseOptions::new(target, costs.clone(), bucket);
            (fuse.numerics, fuse.context) = (pipeline.numerics, pipeline.context);
            for (problem, found) in
                extraction_problems(&module, &kernels, &fuse).unwrap_or_else(|e| panic!("{e}"))
            {
                let Bucket { min, max, decode } = bucket;
                let kind = if decode { "decode" } else { "mixed" };
                let graph = &problem.graph;
                let key = format!("{} {graph} T={min}..{max} {kind} {target}", family.name);
                assert!(problems.insert(key, (problem, found)).is_none());
            }
        }
    }
    problems
}

/// FNV-1a of what is written, so that an optimum of another problem is not taken for this one's.
fn hash(problem: &ExtractionProblem) -> String {
    let text = serde_json::to_string(problem).expect("plain data");
    let step = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3);
    format!("{:016x}", text.bytes().fold(0xcbf2_9ce4_8422_2325, step))
}

fn dump_path() -> PathBuf {
    root().join("../../target/ilp.json")
}

/// The first step of making the fixture again.
#[test]
#[ignore = "writes target/ilp.json, which tests/fixtures/ilp.py solves"]
fn dump_extraction_problems() {
    let dumped: BTreeMap<String, serde_json::Value> = problems()
        .into_iter()
        .map(|(key, (p, found))| {
            let value = serde_json::json!({"hash": hash(&p), "problem": p, "found": found.cost});
            (key, value)
        })
        .collect();
    let text = serde_json::to_string(&dumped).expect("plain data");
    std::fs::write(dump_path(), text).expect("target/ is there while tests run");
}

#[test]
fn extraction_equals_the_integer_programs_optima() {
    const AGAIN: &str = "cargo test -p infernum-tests --test suite -- --ignored \
                         dump_extraction_problems && python tests/fixtures/ilp.py";
    let text = std::fs::read(root().join("ilp.json")).expect("the fixture is committed");
    let optima: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(&text).expect("valid JSON");
    let problems = problems();
    let stale: Vec<&String> = problems
        .iter()
        .filter(|(key, (p, _))| optima.get(*key).is_none_or(|o| o["hash"] != hash(p)))
        .map(|(key, _)| key)
        .chain(optima.keys().filter(|key| !problems.contains_key(*key)))
        .collect();
    assert!(
        stale.is_empty(),
        "tests/fixtures/ilp.json holds optima of other e-graphs: rules, costs or specs have \
         changed. Solve them again: {AGAIN}\n{stale:#?}"
    );
    assert!(problems.len() >= FAMILIES.len() * TARGETS.len() * 3 * 3, "{}", problems.len());
    for (key, (_, found)) in &problems {
        let optimum = optima[key]["optimum_us"].as_f64().expect("microseconds");
        assert_eq!(found.gap, 0.0, "{key}: the search was cut off");
        // The solver's own feasibility tolerance is 1e-6 of the cost.
        let difference = (found.cost - optimum).abs();
        assert!(difference <= 1e-6 * optimum.max(1.0), "{key}: {} against {optimum}", found.cost);
    }
}
