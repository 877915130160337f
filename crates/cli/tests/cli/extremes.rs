//! Files and flags at their extremes: an answer or an error, never a panic.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{failure, fixture, infernum, json};

/// The demo's family with another head: `body` goes on from the logits.
fn with_head(name: &str, body: &str) -> String {
    let spec = format!(
        r#"Family(name: "demo", doc: "", base: "qwen3.ron", architectures: [], blocks: {{
            "lm_head": Inline((
                doc: "", inputs: ["x"],
                weights: {{
                    "model.norm.weight": (shape: ["hidden"]),
                    "lm_head.weight": (
                        shape: ["vocab", "hidden"],
                        same_as: "tied ? 'model.embed_tokens.weight' : null",
                    ),
                }},
                body: {{
                    "rows": gather_rows(x: "x", rows: "output_rows"),
                    "normed": rmsnorm(x: "rows", w: "model.norm.weight", eps: "eps"),
                    {body}
                }},
                result: "y",
            )),
        }})"#
    );
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("head_{name}.ron"));
    std::fs::write(&path, spec).expect("a folder for tests");
    path.display().to_string()
}

const LOGITS: &str = r#""l": linear(x: "normed", w: "lm_head.weight", dtype: "f32"),"#;

fn say(spec: &str, more: &[&str]) -> Vec<String> {
    let args = ["generate", "Once", "--max-tokens", "4", "--json", "--spec", spec];
    args.iter().chain(more).map(|s| (*s).to_owned()).collect()
}

/// Logits are of any float type; what is no distribution over known tokens is an error, never a token.
#[test]
fn heads_give_a_distribution_or_an_error() {
    let narrow = r#""y": linear(x: "normed", w: "lm_head.weight"),"#;
    let args = say(&with_head("bf16", narrow), &["--temperature", "0"]);
    let answer = json(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let expected = json(&["generate", "Once", "--max-tokens", "4", "--json", "--temperature", "0"]);
    assert_eq!(answer["tokens"], expected["tokens"], "rounding changes no likeliest token here");
    let cases = [
        ("nan", r#""y": map(a: "l", expr: "sqrt(0 - 1 - abs(a))")"#, "logits are not numbers"),
        ("never", r#""y": map(a: "l", expr: "log(0 * a)")"#, "logits are not numbers"),
        ("some_nan", r#""y": map(a: "l", expr: "sqrt(a)")"#, "logits are not numbers"),
        ("wide", r#""y": concat(a: "l", b: "l", axis: 1)"#, "pick from a table of 1536 row(s)"),
        ("ids", r#""y": argmax(x: "l")"#, "expected the head to give logits"),
        ("third", r#""y": reshape(x: "l", shape: ["B", 2, "vocab / 2"])"#, "to give logits"),
        ("again", r#""y": gather_rows(x: "l", rows: "tokens")"#, "to give logits"),
        ("outside", r#""y": gather_rows(x: "l", rows: "output_rows")"#, "rows of the step"),
    ];
    for (name, body, expected) in cases {
        for more in [&["--temperature", "0"][..], &["--temperature", "1", "--top-p", "0.9"]] {
            let args = say(&with_head(name, &format!("{LOGITS}{body}")), more);
            let error = failure(&args.iter().map(String::as_str).collect::<Vec<_>>());
            assert!(error.contains(expected), "{name}: {error}");
        }
    }
}

/// Every number that a user may give, at its extremes: an answer or an error, never a panic.
#[test]
fn no_flag_panics() {
    let (most, whole) = ("18446744073709551615", ["0", "18446744073709551615"]);
    let real = ["nan", "inf", "-1", "0", "1e39"];
    let generate = &["generate", "Once", "--passes", "none"][..];
    let logits = &["logits", "--tokens", "1,2", "--out", "/dev/null", "--passes", "none"][..];
    let bench = &["bench", "--passes", "none"][..];
    let engine = &["bench-engine", "--passes", "none"][..];
    let serve = &["serve", "--port", "0", "--passes", "none"][..];
    let integers = [
        (generate, &["--max-length", "--chunk", "--threads", "--top-k", "--seed"][..]),
        (logits, &["--max-length", "--chunk", "--tokens"]),
        (bench, &["--prompt", "--batch", "--generate", "--chunk"]),
        (engine, &["--requests", "--input", "--output", "--sequences", "--chunks"]),
        (
            serve,
            &[
                "--max-length",
                "--chunk",
                "--threads",
                "--kv-blocks",
                "--kv-tokens",
                "--max-sequences",
            ],
        ),
    ];
    let mut runs: Vec<Vec<&str>> = Vec::new();
    for (command, flags) in integers {
        for flag in flags {
            for value in whole {
                // What would run for good with them is left out: 0 means "as is best".
                let works =
                    value == "0" && (command[0] == "serve" || command[0].starts_with("bench-"));
                if !works {
                    runs.push([command, &[flag, value]].concat());
                }
            }
        }
    }
    let reals =
        ["--temperature", "--top-p", "--min-p", "--repetition-penalty", "--frequency-penalty"];
    for flag in reals {
        runs.extend(real.map(|value| [generate, &["--max-tokens", "1", flag, value]].concat()));
    }
    runs.push([generate, &["--max-tokens", most, "--max-length", "8"]].concat());
    for args in runs {
        let mut args = args;
        if args[0] == "generate" && !args.contains(&"--max-tokens") {
            args.extend(["--max-tokens", "1"]);
        }
        // What a server takes for good it serves until it is told to end.
        let (code, errors) =
            within(&args, Duration::from_secs(if args[0] == "serve" { 20 } else { 300 }));
        let ended = matches!(code, Some(0..=2)) || (code.is_none() && args[0] == "serve");
        assert!(ended && !errors.contains("panicked"), "{args:?}: {code:?} {errors}");
    }
}

/// The status with which a command ends, `None` if it is killed after so long, and what it says of errors.
fn within(args: &[&str], most: Duration) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_infernum"));
    command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR")).args(args);
    let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary runs");
    let start = Instant::now();
    while start.elapsed() < most && child.try_wait().expect("a status").is_none() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = child.kill();
    let output = child.wait_with_output().expect("its output");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Sizes in a config.json that no machine holds.
#[test]
fn no_config_panics() {
    let config = std::fs::read_to_string(fixture("../../models/demo/config.json")).expect("JSON");
    let config: Value = serde_json::from_str(&config).expect("JSON");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("absurd_config.json");
    let shown = path.display().to_string();
    for key in [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "max_position_embeddings",
    ] {
        for value in [0, 1, 1 << 40, 1u64 << 62, u64::MAX] {
            // One token of context and one layer's worth of anything else are cheap; so is a refusal.
            let mut absurd = config.clone();
            absurd["num_hidden_layers"] = 1.into();
            absurd[key] = value.into();
            std::fs::write(&path, absurd.to_string()).expect("a folder for tests");
            let args =
                ["bench", "--config", &shown, "--prompt", "1", "--generate", "1", "--runs", "1"];
            let output = infernum(&[&args[..], &["--passes", "none", "--json"]].concat());
            let errors = String::from_utf8_lossy(&output.stderr);
            let code = output.status.code();
            assert!(
                matches!(code, Some(0..=2)) && !errors.contains("panicked"),
                "{key} {value}: {errors}"
            );
        }
    }
}

/// A model's folder in which one file is not what it should be.
#[test]
fn no_file_panics() {
    let demo = fixture("../../models/demo");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("odd_model");
    std::fs::create_dir_all(&folder).expect("a folder for tests");
    let shown = folder.display().to_string();
    let files = [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    let large = r#"{"model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}, "added_tokens": []}"#;
    let cases = [
        (
            "model.safetensors",
            &["", "\0\0\0\0\0\0\0\0", "\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}{}"][..],
        ),
        ("tokenizer.json", &["", "null", "[]", "{}", r#"{"model": {}}"#, large]),
        ("tokenizer_config.json", &["", "null", "[]", "7", r#"{"eos_token": {"content": 3}}"#]),
        ("config.json", &["", "null", "[]", "{}", r#"{"architectures": [7]}"#]),
        (
            "generation_config.json",
            &[
                "",
                "null",
                "[]",
                r#"{"eos_token_id": -1}"#,
                r#"{"temperature": 1e400, "do_sample": true}"#,
            ],
        ),
        (
            "model.safetensors.index.json",
            &["", "[]", r#"{"weight_map": 3}"#, r#"{"weight_map": {"a": "../x"}}"#],
        ),
    ];
    for (name, contents) in cases {
        for content in contents {
            for file in files {
                let _ = std::fs::remove_file(folder.join(file));
                std::fs::copy(demo.join(file), folder.join(file)).expect("a copy");
            }
            std::fs::write(folder.join(name), content).expect("a file");
            let args =
                ["generate", "Once", "--max-tokens", "1", "--passes", "none", "--model", &shown];
            let output = infernum(&args);
            let _ = std::fs::remove_file(folder.join(name));
            let errors = String::from_utf8_lossy(&output.stderr);
            let code = output.status.code();
            assert!(
                matches!(code, Some(0..=2)) && !errors.contains("panicked"),
                "{name} {content:?}: {errors}"
            );
        }
    }
}
