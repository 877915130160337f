//! Tools and reasoning, by the chat templates of published models over the demo's weights, which know nothing of them.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::support::*;

/// Templates and the dialects that they are of.
const TEMPLATES: [(&str, &str); 8] = [
    ("qwen3", "Qwen-Qwen3-0.6B"),
    ("glm", "GLM-4.6"),
    ("kimi", "Kimi-K2-Instruct"),
    ("deepseek", "deepseek-ai-DeepSeek-V3.1"),
    ("r1", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"),
    ("mistral", "mistralai-Mistral-Nemo-Instruct-2407"),
    ("granite", "ibm-granite-granite-3.3-2B-Instruct"),
    ("gpt-oss", "openai-gpt-oss-120b"),
];

/// The demo model with the templates of these names, all served together.
pub(crate) fn server(names: &[&str]) -> (Server, tempfile::TempDir) {
    let (root, folder) = (
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."),
        tempfile::tempdir().expect("a folder"),
    );
    let mut args: Vec<String> = Vec::new();
    for (name, template) in TEMPLATES.iter().filter(|(name, _)| names.contains(name)) {
        let model: PathBuf = folder.path().join(name);
        std::fs::create_dir(&model).expect("a folder");
        for entry in std::fs::read_dir(root.join("models/demo")).expect("the demo model") {
            let path = entry.expect("a file").path();
            if path.is_file() {
                std::fs::copy(&path, model.join(path.file_name().expect("a name")))
                    .expect("a copy");
            }
        }
        let templates = root.join("tests/fixtures/chat-templates/templates");
        std::fs::copy(
            templates.join(format!("{template}.jinja")),
            model.join("chat_template.jinja"),
        )
        .expect("a template");
        args.extend(["--model".to_owned(), format!("{name}={}", model.display())]);
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    (Server::start(&args), folder)
}

#[test]
fn reasoning_is_told_apart_and_counted() {
    let (server, _folder) = server(&TEMPLATES.map(|(name, _)| name));
    let ask = |more: Value| {
        server.post(CHAT, &with(chat("Hi"), with(json!({"model": "r1", "max_tokens": 12}), more)))
    };
    // Its template ends where reasoning has begun, and a story never ends it.
    let answer = ask(json!({})).ok();
    let message = &answer["choices"][0]["message"];
    assert!(message["reasoning_content"].as_str().is_some_and(|text| !text.is_empty()), "{answer}");
    assert_eq!(message["content"], "");
    let counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64();
    assert!(counted.is_some_and(|n| n > 0 && n <= 16), "{answer}");
    let grammar = "start: \"Hm.</think>Yes.\"";
    let answer = ask(json!({"guided_grammar": grammar, "max_tokens": 40})).ok();
    let message = &answer["choices"][0]["message"];
    assert_eq!(
        (&message["reasoning_content"], &message["content"]),
        (&json!("Hm."), &json!("Yes."))
    );
    let stream = json!({"guided_grammar": grammar, "max_tokens": 40, "stream": true, "stream_options": {"include_usage": true}});
    let streamed =
        frames(server.stream(CHAT, &with(chat("Hi"), with(json!({"model": "r1"}), stream))));
    let all = |key: &str| -> String {
        streamed.iter().filter_map(|f| f["choices"][0]["delta"][key].as_str()).collect()
    };
    assert_eq!((all("reasoning_content").as_str(), all("content").as_str()), ("Hm.", "Yes."));
    let usage = &streamed.last().expect("frames")["usage"]["completion_tokens_details"];
    assert!(usage["reasoning_tokens"].as_u64().is_some_and(|n| n > 0), "{usage}");
    // Variables of templates, by fields of their own.
    let hi = |more: Value| {
        server.post(CHAT, &with(chat("Hi"), with(json!({"max_tokens": 1}), more))).ok()
    };
    let tokens = |more: Value| hi(more)["usage"]["prompt_tokens"].as_u64().expect("a number");
    let (thinks, not) = (
        tokens(json!({"model": "qwen3"})),
        tokens(json!({"model": "qwen3", "enable_thinking": false})),
    );
    assert!(not > thinks, "{not} and {thinks}");
    assert_eq!(tokens(json!({"model": "qwen3", "reasoning_effort": "none"})), not);
    let (low, plain) = (
        json!({"model": "gpt-oss", "reasoning_effort": "extraordinarily high"}),
        json!({"model": "gpt-oss"}),
    );
    assert!(tokens(low) > tokens(plain));
}
