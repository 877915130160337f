//! The page that `compile --html` writes.
#![allow(missing_docs, reason = "tests")]

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

/// The page of a fixture, written by the command.
fn page(fixture: &str, more: &[&str]) -> String {
    let out = tempfile::tempdir().expect("a temporary folder");
    let file = out.path().join("fusion.html");
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(fixture);
    let mut command = Command::new(env!("CARGO_BIN_EXE_infernum"));
    command.args(["compile", "--max-length", "128", "--model"]).arg(dir);
    let output = command.arg("--html").arg(&file).args(more).output().expect("the binary runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::read_to_string(&file).expect("the page")
}

/// What the page's script draws.
fn data(page: &str) -> Value {
    let (_, rest) = page.split_once(r#"<script type="application/json" id="data">"#).expect("data");
    let (data, _) = rest.split_once("</script>").expect("the end of the data");
    serde_json::from_str(data).expect("JSON")
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

#[test]
fn a_page_holds_all_it_needs() {
    let page = page("llama/f32", &[]);
    // A namespace is a name: nothing is fetched from it.
    let page = page.replace("http://www.w3.org/2000/svg", "");
    for outside in ["http:", "https:", "//cdn", " src=", " href=", "url(", "@import", "fetch("] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(page.contains("default-src 'none'") && page.contains("prefers-color-scheme: dark"));
    assert!(!page.contains("{{") && !page.contains("{%"), "the template is filled in");
    // Three scripts and styles that end: what opens is closed.
    for tag in ["html", "head", "body", "style", "script", "main", "section", "title"] {
        let opened =
            page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
        assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "{tag}");
    }
}

#[test]
fn a_page_shows_every_fused_op_and_what_it_replaced() {
    let data = data(&page("llama/f32", &["--target", "sm_90a"]));
    let bucket = &data["buckets"][0];
    let digest: Vec<Value> = list(&bucket["graphs"]).iter().map(digest).collect();
    let fused = digest[1]["after"].to_string();
    for op in ["linear_add", "paged_attention", "norm_linear_swiglu", "qkv_rope_kv_write"] {
        assert!(fused.contains(op), "{op}: {fused}");
    }
    let pretty = serde_json::to_string_pretty(&digest).expect("plain data");
    insta::assert_snapshot!("llama_decode", pretty);
}

/// A graph without places, types and lines.
fn digest(graph: &Value) -> Value {
    let nodes = |side: &str| -> Vec<String> {
        let node = |n: &Value| format!("{} {}", n["op"].as_str().unwrap_or("?"), n["groups"]);
        list(&graph[side]["nodes"]).iter().map(node).collect()
    };
    let record = |r: &Value| {
        let outcome = r["outcome"].as_object().and_then(|o| o.keys().next().cloned());
        let outcome = outcome.unwrap_or_else(|| "kept".to_owned());
        format!("{} {} {}", r["rule"].as_str().unwrap_or("?"), outcome, r["group"])
    };
    json!({
        "name": graph["name"],
        "calls": graph["calls"],
        "before": nodes("before"),
        "after": nodes("after"),
        "groups": list(&graph["groups"]).iter().map(|g| g["ops"].to_string()).collect::<Vec<_>>(),
        "fired": list(&graph["fired"]).iter().map(record).collect::<Vec<_>>(),
        "refused": list(&graph["refused"]).len(),
        "near_misses": list(&graph["near_misses"]).len(),
    })
}

/// Names come from files of the user's: none may become markup.
#[test]
fn names_stay_text() {
    let out = tempfile::tempdir().expect("a temporary folder");
    let hostile = out.path().join("<script>alert(1)<!--");
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/llama/f32");
    std::fs::create_dir(&hostile).expect("a folder");
    for file in std::fs::read_dir(from).expect("the fixture") {
        let file = file.expect("a file").path();
        let name = file.file_name().expect("a name");
        std::fs::copy(&file, hostile.join(name)).expect("copied");
    }
    // An absolute path replaces the folder of the fixtures.
    let page = page(hostile.to_str().expect("UTF-8"), &[]);
    assert!(!page.contains("<script>alert") && !page.contains("<!--"), "{}", &page[..600]);
    assert!(data(&page)["model"].as_str().is_some_and(|m| m.contains("<script>alert(1)<!--")));
}
