//! GGUF files that are written.

use std::path::Path;

use super::gguf::piped;
use super::{failure, fixture, json, stdout};

fn text(path: &Path) -> &str {
    path.to_str().expect("a path")
}

fn numbers(file: &Path) -> Vec<f32> {
    let bytes = std::fs::read(file).expect("a file");
    let (head, rest) = bytes.split_first_chunk::<8>().expect("a length");
    let data = &rest[u64::from_le_bytes(*head) as usize..];
    data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn logits(model: &Path, out: &Path) -> Vec<f32> {
    let tokens = "1,2,3,4,5,6,7,8,9";
    let args = ["--tokens", tokens, "--dtype", "f32", "--passes", "none"];
    let places = ["--model", text(model), "--out", text(out)];
    stdout(&[&["logits"][..], &args, &places].concat());
    numbers(out)
}

#[test]
fn what_loses_nothing_gives_the_same_tokens() {
    let dir = tempfile::tempdir().expect("a folder");
    let tell = |model: &[&str]| {
        // In f32 products of both are of the same numbers; CPUs with instructions for bf16 round products of bf16 otherwise.
        let args = ["generate", "Once upon a time", "--temperature", "0", "--dtype", "f32"];
        json(&[&args[..], &["--json", "--max-tokens", "40"], model].concat())["tokens"].clone()
    };
    let own = tell(&[]);
    for to in ["f32", "bf16"] {
        let file = dir.path().join(format!("{to}.gguf"));
        let said = stdout(&["quantise", "--to", to, "--out", text(&file)]);
        assert!(said.contains("42 matrices") && said.contains("error 0.00e0"), "{said}");
        assert_eq!(tell(&["--model", text(&file)]), own, "{to}");
    }
}

/// Each of these is written in another way: rows in another order, factors of frequencies, experts in one tensor, norms
/// with their offset, axes swapped, values changed, lists of factors.
#[test]
fn what_is_written_computes_what_the_folder_does() {
    let dir = tempfile::tempdir().expect("a folder");
    let (out, file) = (dir.path().join("logits"), dir.path().join("model.gguf"));
    for name in [
        "llama/bias_gqa8",
        "llama/llama3",
        "mixtral/top2",
        "gemma/gqa3",
        "gpt2/transposed",
        "mamba/tied",
        "phi3/longrope",
    ] {
        let folder = fixture(name);
        stdout(&["quantise", "--model", text(&folder), "--to", "f32", "--out", text(&file)]);
        let (own, read) = (logits(&folder, &out), logits(&file, &out));
        let squares =
            |a: &mut dyn Iterator<Item = f32>| a.map(|x| f64::from(x).powi(2)).sum::<f64>();
        let error = squares(&mut own.iter().zip(&read).map(|(a, b)| a - b));
        let error = error / squares(&mut own.iter().copied());
        assert!(own.len() == read.len() && error < 1e-12, "{name}: {error:e}");
    }
}

#[test]
fn eight_bits_cost_less_than_a_hundredth_of_perplexity() {
    let dir = tempfile::tempdir().expect("a folder");
    let (words, file) = (dir.path().join("text"), dir.path().join("q8_0.gguf"));
    let told =
        stdout(&["generate", "Once upon a time", "--temperature", "0", "--max-tokens", "96"]);
    std::fs::write(&words, told).expect("a file");
    stdout(&["quantise", "--to", "q8_0", "--out", text(&file)]);
    let perplexity = |model: &[&str]| {
        let args = ["perplexity", "--text", text(&words), "--dtype", "f32", "--json"];
        json(&[&args[..], model].concat())["perplexity"].as_f64().expect("a number")
    };
    let (own, coded) = (perplexity(&[]), perplexity(&["--model", text(&file)]));
    assert!((coded / own - 1.0).abs() < 0.01, "{own} becomes {coded}");
    // Of a GGUF file, too: its metadata stays, values that were exact stay so.
    let other = dir.path().join("bf16.gguf");
    let said = stdout(&["quantise", "--model", text(&file), "--to", "f32", "--out", text(&other)]);
    assert!(said.contains("42 matrices as f32") && said.contains("error 0.00e0"), "{said}");
    let tokens = |model: &[&str]| {
        piped(&[&["tokenize"], model].concat(), "A fox and 12 lanterns, isn't it?")
    };
    assert_eq!(tokens(&["--model", text(&other)]), tokens(&[]));
}

#[test]
fn a_text_says_which_columns_matter() {
    let dir = tempfile::tempdir().expect("a folder");
    let words = dir.path().join("text");
    let told =
        stdout(&["generate", "Once upon a time", "--temperature", "0", "--max-tokens", "96"]);
    std::fs::write(&words, told).expect("a file");
    let written = |name: &str, more: &[&str]| {
        let file = dir.path().join(name);
        stdout(&[&["quantise", "--to", "q3_k", "--out", text(&file)][..], more].concat());
        std::fs::read(&file).expect("a file")
    };
    let weighed = ["--importance", text(&words)];
    // The same name in each, as a file holds it.
    let (plain, first) = (written("a.gguf", &[]), written("a.gguf", &weighed));
    assert_eq!(plain.len(), first.len());
    assert_ne!(plain, first);
    assert_eq!(first, written("a.gguf", &weighed));
    let refused = |args: &[&str]| {
        let file = dir.path().join("b.gguf");
        failure(&[&["quantise", "--out", text(&file)][..], args].concat())
    };
    let error = refused(&["--to", "f16", "--importance", text(&words)]);
    assert!(error.contains("--importance: expected an encoding"), "{error}");
    let error = refused(&["--to", "q3_k", "--importance", "/no/such/text"]);
    assert!(error.contains("--importance: /no/such/text"), "{error}");
    // What is encoded already is not read as it is stored.
    let own = dir.path().join("a.gguf");
    let error = refused(&["--to", "q8_0", "--model", text(&own), weighed[0], weighed[1]]);
    assert!(error.contains("expected a checkpoint of plain floats"), "{error}");
    let codes = fixture("llama/gptq");
    let error = refused(&["--to", "q8_0", "--model", text(&codes), weighed[0], weighed[1]]);
    assert!(error.contains("expected a checkpoint of plain floats"), "{error}");
}

#[test]
fn what_cannot_be_written_is_named_and_leaves_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("model.gguf");
    let refused = |args: &[&str]| {
        let error = failure(&[&["quantise", "--out", text(&file)][..], args].concat());
        let left: Vec<_> = std::fs::read_dir(dir.path()).expect("a folder").collect();
        assert!(left.is_empty(), "{left:?}");
        error
    };
    let of = |name: &str| text(&fixture(name)).to_owned();
    let error = refused(&["--to", "fp8_row"]);
    assert!(error.contains("GGUF files have no type for fp8_row"), "{error}");
    let error = refused(&["--to", "iq2_s"]);
    assert!(error.contains("codes of several values share bits"), "{error}");
    let error = refused(&["--to", "f32", "--model", &of("gpt_neox/parallel")]);
    assert!(error.contains("gptneox.ron cannot be written"), "{error}");
    let error = refused(&["--to", "f32", "--model", &of("recurrent_gemma/window")]);
    assert!(error.contains("no file of models/gguf/ reads the architecture"), "{error}");
    let error = refused(&["--to", "q8_0", "--model", &of("llama/f32")]);
    assert!(error.contains("no matrix of this model's layers can be stored so"), "{error}");
}
