//! GGUF files where a model is asked for, and `infernum tokenize`.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::{failure, fixture, stdout};

/// What a command writes that is given this input.
pub(super) fn piped(args: &[&str], input: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_infernum"));
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary runs");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(input.as_bytes()).expect("an input");
    drop(stdin);
    let output = child.wait_with_output().expect("an end");
    assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"));
    let text = if output.status.success() { output.stdout } else { output.stderr };
    String::from_utf8(text).expect("UTF-8")
}

#[test]
fn texts_become_tokens_and_tokens_texts() {
    let text = "Once upon a time, 中文 🙂\n";
    let ids = piped(&["tokenize"], text);
    assert_eq!(piped(&["tokenize", "--decode"], &ids), format!("<|bos|>{text}\n"));
    let bare = piped(&["tokenize", "--no-bos"], text);
    assert_eq!(ids.strip_prefix("0 "), Some(bare.as_str()));
    let lines = piped(&["tokenize", "--lines", "--no-bos"], "a b\n\nc\n");
    assert_eq!(lines.lines().count(), 3);
    assert_eq!(piped(&["tokenize", "--lines", "--decode"], &lines), "a b\n\nc\n");
    // A GGUF file that holds nothing but a vocabulary is enough, and so is a folder with nothing but a tokenizer.json.
    let file = fixture("gguf/tokenizers/spm-llama.gguf").display().to_string();
    let found = piped(&["tokenize", "--model", &file], "the model\n");
    let folder = tempfile::tempdir().expect("a folder");
    let json = fixture("gguf/tokenizers/spm-llama.json");
    std::fs::copy(json, folder.path().join("tokenizer.json")).expect("a copy");
    let folder = folder.path().display().to_string();
    assert_eq!(found, piped(&["tokenize", "--model", &folder], "the model\n"));
    assert!(found.starts_with("1 "), "{found}");
    let error = piped(&["tokenize", "--decode"], "3 4\n5 x\n");
    assert!(
        error.contains("line 2: expected a token's id, a whole number below 1536, found `x`"),
        "{error}"
    );
    let error = piped(&["tokenize", "--decode"], "1536");
    assert!(error.contains("found `1536`"), "{error}");
}

#[test]
fn a_gguf_file_is_a_model() {
    let file = fixture("gguf/llama__bias_gqa8.gguf").display().to_string();
    let summary = stdout(&["compile", "--model", &file]);
    assert!(summary.contains("stored in GGUF version 3, 1 file(s): bf16 16 ("), "{summary}");
    let folder = fixture("llama/f32").display().to_string();
    assert!(
        stdout(&["compile", "--model", &folder]).contains("stored in safetensors, 1 file(s): f32")
    );
    let out = tempfile::tempdir().expect("a folder");
    let out = out.path().join("logits.safetensors").display().to_string();
    stdout(&["logits", "--model", &file, "--tokens", "1,2,3", "--out", &out, "--device", "cpu"]);
    let error =
        failure(&["compile", "--model", &fixture("llama/f32/config.json").display().to_string()]);
    assert!(error.contains("is a file, not a folder, and no GGUF file"), "{error}");
    // A vocabulary is no model.
    let vocabulary = fixture("gguf/tokenizers/qwen2.gguf").display().to_string();
    let error = failure(&["compile", "--model", &vocabulary]);
    assert!(error.contains("qwen2.gguf"), "{error}");
}
