//! `infernum diff`: mistakes planted in a spec are named where they are.

use std::path::Path;

use super::{failure, fixture, infernum, json, stdout};
use infernum_frontend_hf::safetensors::{TensorData, TensorOut, write_safetensors};

const FIXTURE: &str = "gemma2/caps";

/// Hidden states of 7 tokens, by `infernum diff --script`.
fn dump() -> String {
    fixture("hidden/gemma2-caps.safetensors").display().to_string()
}

fn model() -> String {
    fixture(FIXTURE).display().to_string()
}

/// A spec that is Gemma 2 but for a parameter of its layers.
fn spec(name: &str, wrong: &str) -> String {
    let family = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/gemma2.ron");
    let family = family.display();
    let text = format!(
        "Family(name: \"gemma2\", doc: \"With a mistake.\", base: \"{family}\", architectures: [\"Gemma2ForCausalLM\"],\n\
         layer_params: {{ {wrong} }})"
    );
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.ron"));
    std::fs::write(&path, text).expect("a writable folder");
    path.display().to_string()
}

/// What is said of a spec with this mistake, and the report.
fn departs(name: &str, wrong: &str) -> (String, serde_json::Value) {
    let (model, dump, spec) = (model(), dump(), spec(name, wrong));
    let args = ["diff", "--model", &model, "--against", &dump, "--spec", &spec];
    let output = infernum(&[&args[..], &["--json"]].concat());
    let report = serde_json::from_slice(&output.stdout).expect("one JSON value");
    (failure(&args), report)
}

#[test]
fn what_is_right_agrees() {
    let (model, dump) = (model(), dump());
    let args = ["diff", "--model", &model, "--against", &dump];
    let table = stdout(&args);
    assert!(table.contains("layers.1     full_attention"), "{table}");
    assert!(!table.contains("  departs\n") && !table.contains("within"), "{table}");
    let report = json(&[&args[..], &["--json"]].concat());
    assert_eq!(report["first"], serde_json::Value::Null);
    assert_eq!(report["stages"].as_array().map(Vec::len), Some(4));
    let worst = |figure: &str| {
        let all = report["stages"].as_array().into_iter().flatten();
        all.map(|s| s["figures"][figure].as_f64().expect("a number")).fold(0.0, f64::max)
    };
    assert!(worst("nmse") < 1e-11, "{report}");
}

#[test]
fn the_first_op_that_departs_is_named() {
    // Layer 1 is the one of kind `full_attention`.
    let of_layer_1 = |wrong: &str, right: &str| {
        format!("\"{}\": \"layer_kind == 'full_attention' ? {wrong} : {right}\"", "PARAM")
    };
    let cases = [
        ("layer_theta", of_layer_1("5000", "null"), "x.attn.q_turned.rotated", "rope"),
        ("norm_offset", of_layer_1("0", "1"), "x.normed.y", "rmsnorm"),
        ("attention_cap", of_layer_1("null", "attn_logit_softcapping"), "x.attn.probs", "softmax"),
        ("window", of_layer_1("3", "sliding_window"), "x.attn.probs", "softmax"),
        ("activation", of_layer_1("'silu'", "'gelu_pytorch_tanh'"), "x.ffn.gated", "mul"),
    ];
    for (param, wrong, value, op) in cases {
        let (error, report) = departs(param, &wrong.replace("PARAM", param));
        assert!(error.contains("layer 1 (full_attention) is the first that departs"), "{error}");
        assert_eq!(report["first"], 2, "embed, layer 0, layer 1");
        let within = &report["within"];
        let first = &within["rows"][within["first"].as_u64().expect("a row") as usize];
        assert_eq!(
            (first["value"].as_str(), first["op"].as_str()),
            (Some(value), Some(op)),
            "{error}"
        );
        let suspects = within["suspects"].as_array().expect("a list");
        let names =
            suspects.iter().map(|i| &within["rows"][i.as_u64().expect("a row") as usize]["op"]);
        let names: Vec<_> = names.filter_map(|n| n.as_str()).collect();
        // What came of values that agree up to there: the culprit is among few.
        let expected: &[&str] = match param {
            "attention_cap" => &["scores", "scale", "mask", "softmax"],
            "window" => &["scores", "scale", "softcap", "mask", "softmax"],
            "activation" => &["silu", "mul"],
            _ => &[op],
        };
        assert_eq!(names, expected, "{param}");
        assert_eq!(error.contains("a mask"), param == "window", "{error}");
    }
}

#[test]
fn what_the_file_lacks_is_told() {
    let model = model();
    let case = |name: &str, tensors: &[(&str, &[u64], &[f32])], expected: &str| {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.safetensors"));
        let all = tensors.iter().map(|(name, shape, data)| TensorOut {
            name,
            shape,
            data: TensorData::F32(data),
        });
        write_safetensors(&path, &all.collect::<Vec<_>>()).expect("a file");
        let path = path.display().to_string();
        let error = failure(&["diff", "--model", &model, "--against", &path]);
        assert!(error.contains(expected), "{name}: {error}");
        assert!(error.contains("--script"), "{name}: {error}");
    };
    case("no-tokens", &[("embed", &[1, 48], &[0.0; 48])], "expected a tensor `tokens`");
    case("float-tokens", &[("tokens", &[2], &[1.0, 2.0])], "found F32 [2]");
    let missing = fixture("hidden/none.safetensors").display().to_string();
    let error = failure(&["diff", "--model", &model, "--against", &missing]);
    assert!(error.contains("none.safetensors"), "{error}");
    let config = fixture("gemma2/caps/config.json").display().to_string();
    let error = failure(&["diff", "--model", &model, "--against", &config]);
    assert!(error.contains("header"), "{error}");
    // Another model's: as many layers, other widths.
    let other = fixture("qwen2/tied").display().to_string();
    let error = failure(&["diff", "--model", &other, "--against", &dump()]);
    assert!(
        error.contains("expected a tensor `embed`") && error.contains("found F32 [7, 48]"),
        "{error}"
    );
    // What would change nothing is not taken.
    let refused = failure(&["diff", "--against", &dump(), "--disable", "pack-qkv"]);
    assert!(refused.contains("cannot be used with '--disable"), "{refused}");
    let script = stdout(&["diff", "--script"]);
    assert!(script.contains("apply_rotary_pos_emb") && script.contains("save_file"));
}
