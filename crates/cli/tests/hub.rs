//! Models by their names on the hub: a hub on this machine has them, and the binary runs them.
#![allow(missing_docs, reason = "tests")]

#[path = "../../hub/tests/mock/mod.rs"]
mod mock;
#[path = "serve/support.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::AtomicUsize;

use mock::{ID, Mock, Model};
use serde_json::json;
use support::{Server, TEXT, command};
use tempfile::TempDir;

const STORY: [&str; 4] = ["generate", "--max-tokens", "24", "Once upon a time"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A folder's files.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|e| e.expect("an entry").path());
    let named = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.to_owned();
        path.is_file().then(|| (name, std::fs::read(&path).expect("bytes")))
    };
    entries.filter_map(named).collect()
}

fn demo() -> Model {
    let mut files = files(&root().join("models/demo"));
    for name in ["README.md", "pytorch_model.bin", "onnx/model.onnx"] {
        files.push((name.to_owned(), vec![0; 5000]));
    }
    Model { files, ..Model::default() }
}

/// With the hub and a cache of its own.
fn set(command: &mut Command, mock: &Mock, home: &TempDir) {
    for name in [
        "HF_HUB_CACHE",
        "HF_TOKEN",
        "HF_HUB_OFFLINE",
        "http_proxy",
        "HTTP_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ] {
        command.env_remove(name);
    }
    command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command.env("HF_ENDPOINT", &mock.endpoint).env("HF_HOME", home.path());
}

fn run(args: &[&str], mock: &Mock, home: &TempDir, offline: bool) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_infernum"));
    set(&mut command, mock, home);
    if offline {
        command.env("HF_HUB_OFFLINE", "1");
    }
    command.args(args).output().expect("the binary runs")
}

fn stdout(output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_model_of_the_hub_generates_and_then_without_the_hub() {
    let model = Model { cuts: AtomicUsize::new(2), cut_after: 2_000_000, ..demo() };
    let (mock, home) = (Mock::start(model), tempfile::tempdir().expect("a folder"));
    let named: Vec<&str> = STORY.into_iter().chain(["--model", ID]).collect();
    let expected = stdout(&run(&STORY, &mock, &home, false));
    assert!(mock.seen().is_empty(), "nothing is asked of a hub without need");
    // Words do not need weights.
    stdout(&run(&["tokenize", "--model", ID], &mock, &home, false));
    assert!(!mock.seen().iter().any(|seen| seen.path.ends_with(".safetensors")));
    let missing = run(&named, &mock, &home, true);
    let message = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(!missing.status.success() && message.contains("HF_HUB_OFFLINE is set"), "{message}");
    assert!(
        message.contains("model.safetensors") || message.contains("*.safetensors"),
        "{message}"
    );

    assert_eq!(stdout(&run(&named, &mock, &home, false)), expected);
    let seen = mock.seen();
    for needless in ["README.md", "pytorch_model.bin", "model.onnx"] {
        assert!(!seen.iter().any(|s| s.path.ends_with(needless)), "{needless}");
    }
    assert_eq!(
        seen.iter().filter(|s| s.elsewhere && s.range.is_some()).count(),
        2,
        "it was cut twice"
    );
    assert_eq!(stdout(&run(&named, &mock, &home, true)), expected);
    assert_eq!(mock.seen().len(), seen.len(), "offline is offline");
}

#[test]
fn a_model_of_the_hub_is_served_by_its_name() {
    let (mock, home) = (Mock::start(demo()), tempfile::tempdir().expect("a folder"));
    let mut command = command(&["--model", ID]);
    set(&mut command, &mock, &home);
    let server = Server::spawn(command);
    support::wait("it is ready", || server.get("/health").status == 200);
    let listed = server.get(&format!("/v1/models/{ID}"));
    assert_eq!((listed.status, listed.json()["id"].as_str()), (200, Some(ID)));
    let answer =
        server.post(TEXT, &json!({"model": ID, "prompt": "Once upon a time", "max_tokens": 8}));
    assert_eq!(
        (answer.status, answer.json()["model"].as_str()),
        (200, Some(ID)),
        "{}",
        answer.text
    );
}

#[test]
fn shards_are_those_of_the_index() {
    let mut model =
        Model { files: files(&root().join("tests/fixtures/llama/sharded")), ..Model::default() };
    model.files.push(("other.safetensors".to_owned(), vec![0; 5000]));
    let (mock, home) = (Mock::start(model), tempfile::tempdir().expect("a folder"));
    let summary = stdout(&run(&["compile", "--model", ID], &mock, &home, false));
    assert!(summary.contains("stored in safetensors, 3 file(s)"), "{summary}");
    assert!(!mock.seen().iter().any(|seen| seen.path.ends_with("other.safetensors")));
}

#[test]
fn one_gguf_file_of_many_is_a_model() {
    let bytes =
        std::fs::read(root().join("tests/fixtures/gguf/llama__bias_gqa8.gguf")).expect("bytes");
    let file = |name: &str, bytes: &[u8]| (name.to_owned(), bytes.to_vec());
    let files = vec![
        file("m-Q8_0.gguf", &[0; 2000]),
        file("m-Q4_K_M.gguf", &bytes),
        file("mmproj.gguf", &[0; 2000]),
    ];
    let (mock, home) =
        (Mock::start(Model { files, ..Model::default() }), tempfile::tempdir().expect("a folder"));
    let name = format!("{ID}:Q4_K_M");
    let summary = stdout(&run(&["compile", "--model", &name], &mock, &home, false));
    assert!(summary.contains("stored in GGUF version 3, 1 file(s)"), "{summary}");
    assert!(!mock.seen().iter().any(|s| s.path.contains("Q8_0") || s.path.contains("mmproj")));
    let wrong = run(&["compile", "--model", &format!("{ID}:Q2_K")], &mock, &home, false);
    let message = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(
        message.contains("no GGUF file is `Q2_K`") && message.contains("m-Q8_0.gguf"),
        "{message}"
    );
}

#[test]
fn a_name_that_the_hub_does_not_have_is_an_error_in_words() {
    let (mock, home) = (Mock::start(demo()), tempfile::tempdir().expect("a folder"));
    let failed = run(&["generate", "--model", "org/nothing", "x"], &mock, &home, false);
    let message = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && message.contains("`org/nothing`"), "{message}");
}
