//! What the caches of published models take: what the arithmetic of their papers says.

use infernum::CacheSize;
use infernum_codegen::compile::{Limits, Options, compile};
use infernum_frontend_hf::spec::Library;
use infernum_frontend_hf::{Config, LowerOptions, Model};
use infernum_ir::Sym;
use infernum_passes::Pipeline;
use infernum_passes::data::Kernels;
use infernum_passes::fuse::CostTable;

const MIB: u64 = 1 << 20;

/// Of a model of this `config.json`, for one sequence of so many tokens, in steps of 128.
fn size(config: &str, max_length: u64) -> CacheSize {
    let config = Config::parse("config.json", config.as_bytes()).expect("a config");
    let model = Model::from_config(config, None, &Library::default()).expect("a shipped family");
    let pipeline = Pipeline::named("default", None).expect("a built-in pipeline");
    let costs = CostTable::named("cpu", None).expect("a built-in cost table");
    let kernels = Kernels::load(None, &[]).expect("the built-in fused ops and rules");
    let templates = infernum_codegen::cuda::Library::default();
    let options = Options {
        model: &model,
        lower: LowerOptions { dtype: None, max_length: Some(max_length), rows: Sym::B },
        pipeline: &pipeline,
        kernels: &kernels,
        costs: ("cpu", &costs),
        rules: None,
        adapters: None,
        kv_dtype: infernum_passes::KvDtype::Auto,
        explain: false,
        limits: Limits { chunk: 128, sequences: 1, max_length },
        templates: &templates,
        device: None,
    };
    let compiled = compile(&options, &mut |_, _, _| {}).unwrap_or_else(|e| panic!("{e}"));
    CacheSize::of(&compiled.plan, 128)
}

/// DeepSeek-V2-Lite: a latent of 512 values and a rotated key of 64 in each of 27 layers, bf16.
#[test]
fn latents_are_what_is_cached() {
    let config = r#"{
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "torch_dtype": "bfloat16",
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "first_k_dense_replace": 1,
        "kv_lora_rank": 512, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1,
        "topk_method": "greedy", "routed_scaling_factor": 1.0, "norm_topk_prob": false, "scoring_func": "softmax",
        "moe_layer_freq": 1, "hidden_act": "silu", "rms_norm_eps": 1e-06, "rope_theta": 10000,
        "max_position_embeddings": 163840, "tie_word_embeddings": false, "attention_bias": false
    }"#;
    let found = size(config, 32768);
    assert_eq!(found.paged_row, 27 * (512 + 64) * 2);
    assert_eq!(found.sequence, 27 * (512 + 64) * 2 * 32768);
    assert!(found.ring_rows.is_empty());
}

/// Gemma 3 27B: 52 of 62 layers see 1024 rows, and rows are of 16 heads of 128, keys and values.
#[test]
fn windows_bound_what_is_cached() {
    let config = r#"{
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "torch_dtype": "bfloat16",
        "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024,
        "sliding_window_pattern": 6, "vocab_size": 262208, "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-06, "rope_theta": 1000000, "rope_local_base_freq": 10000,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "max_position_embeddings": 131072
    }"#;
    let found = size(config, 32768);
    let row = 2 * 16 * 128 * 2;
    assert_eq!(found.paged_row, 10 * row);
    assert_eq!(found.ring_rows.into_iter().collect::<Vec<_>>(), [(1024, 52 * row)]);
    assert_eq!(found.all_rows, 15872 * MIB);
    // 10 layers of all rows, and 6 groups of 10 layers of 1024 rows, a step's, and blocks that are begun.
    assert_eq!(found.sequence, 31075 * MIB / 10);
}
