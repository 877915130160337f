//! Chat templates of published models, held to what `transformers` renders from them.
#![allow(missing_docs, reason = "tests")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use infernum_frontend_hf::chat::{ChatError, ChatTemplate, Message, RenderOptions};
use infernum_frontend_hf::tokenizer::SpecialTokens;
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Deserialize)]
struct Case {
    name: String,
    messages: Vec<Message>,
    add_generation_prompt: bool,
    tools: Option<Vec<Value>>,
    #[serde(flatten)]
    extra: Map<String, Value>,
}

#[derive(Deserialize)]
struct Rendered {
    special: BTreeMap<String, String>,
    now: String,
    outcomes: Vec<Outcome>,
}

/// What `transformers` made of some cases: a prompt, the template's refusal, or Python's error.
#[derive(Deserialize)]
struct Outcome {
    cases: Vec<String>,
    text: Option<String>,
    refused: Option<String>,
    failed: Option<String>,
}

/// Where Python fails and we do not: to us `none` is an empty list in a `for`, as undefined is to both.
/// One template does that, when it gets documents and no tools.
const LENIENT: &str = "TypeError: 'NoneType' object is not iterable";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/chat-templates")
}

/// Templates whose licence lets us hold them, and, where that folder is, all others.
fn templates() -> Vec<PathBuf> {
    let elsewhere = std::env::var_os("INFERNUM_CHAT_TEMPLATES").map(PathBuf::from);
    let beside =
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/real/chat-templates");
    let folders = [Some(folder().join("templates")), Some(elsewhere.unwrap_or_else(beside))];
    let mut found = BTreeMap::new();
    for folder in folders.into_iter().flatten() {
        let Ok(files) = std::fs::read_dir(folder) else { continue };
        let files = files.map(|f| f.expect("a readable folder").path());
        let files = files.filter(|f| f.extension().is_some_and(|e| e == "jinja"));
        found.extend(files.filter_map(|f| Some((f.file_name()?.to_owned(), f))));
    }
    found.into_values().collect()
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> T {
    let text = std::fs::read_to_string(path).expect("a fixture");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// How our outcome differs from theirs, if it does.
fn difference(outcome: &Outcome, ours: &Result<String, ChatError>) -> Option<String> {
    let same = match (ours, outcome) {
        (Ok(ours), Outcome { text: Some(text), .. }) => ours == text,
        (Err(ChatError::Refused { message }), Outcome { refused: Some(refused), .. }) => {
            message == refused
        }
        (Err(ChatError::Render { .. }), Outcome { failed: Some(_), .. }) => true,
        (Ok(_), Outcome { failed: Some(error), .. }) => error == LENIENT,
        _ => false,
    };
    let theirs = [&outcome.text, &outcome.refused, &outcome.failed];
    (!same)
        .then(|| format!("  theirs: {:?}\n  ours:   {ours:?}", theirs.iter().find(|t| t.is_some())))
}

#[test]
fn templates_render_as_transformers_renders_them() {
    let cases: Vec<Case> = read(&folder().join("cases.json"));
    let (mut compared, mut wrong) = (0, Vec::new());
    let templates = templates();
    for path in &templates {
        let stem = path.file_stem().and_then(|s| s.to_str()).expect("a name");
        let rendered: Rendered = read(&folder().join(format!("rendered/{stem}.json")));
        let special = SpecialTokens::from_iter(rendered.special);
        let text = std::fs::read_to_string(path).expect("a template");
        let template = ChatTemplate::parse(&text, special).expect("the template compiles");
        for outcome in &rendered.outcomes {
            for name in &outcome.cases {
                let case = cases.iter().find(|c| c.name == *name).expect("the case");
                let options = RenderOptions {
                    add_generation_prompt: case.add_generation_prompt,
                    continue_final_message: false,
                    tools: case.tools.clone(),
                    extra: case.extra.clone(),
                    now: Some(rendered.now.parse().expect("a date and time")),
                };
                let ours = template.render(&case.messages, &options);
                wrong.extend(difference(outcome, &ours).map(|d| format!("{stem}: {name}\n{d}")));
                compared += 1;
            }
        }
    }
    assert_eq!(compared, templates.len() * cases.len(), "every case of every template");
    assert!(compared >= 11 * 100, "the fixtures are there");
    println!("{compared} outcomes of {} templates", templates.len());
    assert!(wrong.is_empty(), "{} of {compared} differ\n{}", wrong.len(), wrong.join("\n"));
}
