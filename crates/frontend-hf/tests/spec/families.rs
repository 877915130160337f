//! What the shipped families lower to.

use crate::{check, fixtures, lower_family};

/// The IR of a fixture, without the places in our files: those move whenever a line is added.
fn fixture_ir(family: &str, variant: &str) -> String {
    let all = fixtures();
    let fixture = all.iter().find(|f| f.family == family && f.dir.ends_with(variant));
    let text = check(&fixture.unwrap().lower());
    text.lines()
        .map(|line| line.split(" @ ").next().unwrap_or_default().to_owned() + "\n")
        .collect()
}

#[test]
fn lowered_ir_is_as_reviewed() {
    for (family, variant) in [
        ("llama", "bias_gqa8"),
        ("llama", "llama3"),
        ("mistral", "window"),
        ("qwen2", "tied"),
        ("qwen2", "old_windows"),
        ("qwen3", "layer_types"),
        ("gemma3", "text"),
        ("phi3", "packed"),
        ("gpt2", "transposed"),
        ("stablelm", "parallel"),
        ("bloom", "alibi"),
        ("ministral3", "temper"),
    ] {
        insta::assert_snapshot!(format!("{family}-{variant}"), fixture_ir(family, variant));
    }
}

#[test]
fn every_fixture_lowers_verifies_and_reads_back() {
    for fixture in fixtures() {
        check(&fixture.lower());
    }
}

/// Hundreds of layers cost a line of schedule, not a graph each.
#[test]
fn layers_share_the_graph_of_their_kind() {
    let config = r#"{"hidden_size": 64, "vocab_size": 9, "intermediate_size": 96,
        "num_attention_heads": 4, "num_hidden_layers": 126}"#;
    let module = lower_family("llama", config, 64);
    assert_eq!(module.graphs.len(), 3);
    assert_eq!(module.schedule.len(), 128);
}

const OLD: &str = r#"{
    "hidden_size": 64, "vocab_size": 9, "intermediate_size": 96, "num_attention_heads": 4,
    "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
    ROPE
}"#;

/// The same model, as either generation of config writes it.
#[test]
fn both_generations_of_config_mean_the_same() {
    let lower = |rope: &str| check(&lower_family("llama", &OLD.replace("ROPE", rope), 96));
    for (old, new) in [
        (
            r#""rope_theta": 5000.0, "rope_scaling": null"#,
            r#""rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}"#,
        ),
        (
            r#""rope_theta": 5000, "rope_scaling": {"type": "linear", "factor": 4}"#,
            r#""rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}"#,
        ),
        (
            r#""rope_theta": 5000.0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                "original_max_position_embeddings": 32, "attention_factor": null}"#,
            r#""rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0,
                "original_max_position_embeddings": 32}"#,
        ),
        (
            r#""rope_theta": 5000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32}"#,
            r#""rope_scaling": null, "rope_parameters": {"rope_type": "llama3", "factor": 8.0,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5000.0,
                "original_max_position_embeddings": 32}"#,
        ),
    ] {
        assert_eq!(lower(old), lower(new));
        assert_ne!(lower(old), lower(r#""rope_theta": 5001.0"#));
    }
}

/// An explicit null is the same as no key at all.
#[test]
fn nulls_are_absent() {
    let absent = r#"{"hidden_size": 64, "vocab_size": 9, "intermediate_size": 96,
        "num_attention_heads": 4, "num_hidden_layers": 2}"#;
    let nulls = absent.replace(
        '}',
        r#", "num_key_value_heads": null, "head_dim": null, "rope_scaling": null,
        "rope_parameters": null, "rope_theta": null, "attention_bias": null, "mlp_bias": null,
        "tie_word_embeddings": null, "sliding_window": null, "layer_types": null,
        "use_sliding_window": null, "max_window_layers": null, "hidden_act": null,
        "rms_norm_eps": null, "max_position_embeddings": null}"#,
    );
    for family in ["llama", "mistral", "qwen2"] {
        assert_eq!(lower_family(family, absent, 64), lower_family(family, &nulls, 64));
    }
}
