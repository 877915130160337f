use serde_json::json;

use super::*;
use crate::chat::{ChatTemplate, Message, RenderOptions};
use crate::tokenizer::SpecialTokens;

fn all() -> Vec<Dialect> {
    Dialect::all(&Library::default()).expect("ours")
}

fn named(name: &str) -> Arc<Dialect> {
    Arc::new(all().into_iter().find(|d| d.name == name).expect(name))
}

fn tools() -> Arc<Tools> {
    let weather = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "unit": {"type": "string"}, "days": {"type": "integer"},
        "ratio": {"type": "number"}, "on": {"type": "boolean"}, "none": {"type": "null"},
        "list": {"type": "array"}, "code": {"type": "string"}}});
    Arc::new(Tools(vec![("get_weather".to_owned(), weather), ("now".to_owned(), json!({}))]))
}

/// What an answer is, however it was cut.
#[derive(Debug, Default, PartialEq)]
struct Answer {
    reasoning: String,
    content: String,
    calls: Vec<(String, String)>,
}

impl Answer {
    fn take(&mut self, parts: Vec<Part>) {
        for part in parts {
            match part {
                Part::Reasoning(text) => self.reasoning.push_str(&text),
                Part::Content(text) => self.content.push_str(&text),
                Part::Call(index, name) => {
                    assert_eq!(index, self.calls.len());
                    self.calls.push((name, String::new()));
                }
                Part::Arguments(index, text) => {
                    assert_eq!(index + 1, self.calls.len());
                    self.calls[index].1.push_str(&text);
                }
            }
        }
    }

    fn json(&self) -> Vec<(String, Value)> {
        let read =
            |text: &str| serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text:?}"));
        self.calls.iter().map(|(name, text)| (name.clone(), read(text))).collect()
    }
}

fn read<'a>(
    dialect: &Arc<Dialect>,
    prompt: &str,
    pieces: impl IntoIterator<Item = &'a str>,
) -> Answer {
    let (mut parser, mut answer) = (Parser::new(dialect, &tools(), prompt), Answer::default());
    pieces.into_iter().for_each(|piece| answer.take(parser.push(piece)));
    answer.take(parser.finish());
    assert_eq!(parser.calls(), answer.calls.len());
    answer
}

/// As [`read`], cut at every place, and at all of them.
fn read_anyhow(dialect: &Arc<Dialect>, prompt: &str, text: &str) -> Answer {
    let whole = read(dialect, prompt, [text]);
    let places: Vec<usize> = (0..=text.len()).filter(|at| text.is_char_boundary(*at)).collect();
    for at in &places {
        let (a, b) = text.split_at(*at);
        assert_eq!(read(dialect, prompt, [a, b]), whole, "{}: {a:?} and {b:?}", dialect.name);
    }
    let single = places.windows(2).map(|w| &text[w[0]..w[1]]);
    assert_eq!(read(dialect, prompt, single), whole, "{}: {text:?}", dialect.name);
    whole
}

fn arguments() -> Value {
    json!({"city": "São Paulo", "unit": "a \"b\"", "days": 3, "ratio": 0.5, "on": true, "list": [1, "x", {"y": false}]})
}

#[test]
fn every_dialect_is_read_and_there_are_enough() {
    let all = all();
    assert!(all.iter().filter(|d| d.calls.is_some() || d.channels.is_some()).count() >= 20);
    for dialect in &all {
        assert!(dialect.doc.ends_with('.'), "{}", dialect.name);
        // What stands in a dialect's own words of its template chooses it.
        for texts in &dialect.templates {
            let chosen = Dialect::of_template(&all, &texts.join(" … ")).expect("one of them");
            assert_eq!(chosen.name, dialect.name, "{texts:?}");
        }
    }
    let error = |text: &str| Dialect::read("x.ron", text).expect_err("wrong").to_string();
    assert!(
        error("Dialect(\n  name: 3)").starts_with("x.ron:2:"),
        "{}",
        error("Dialect(\n  name: 3)")
    );
    let empty = r#"Dialect(name: "x", doc: "x.", templates: [["x"]], calls: (begin: [""], form: Python()))"#;
    assert!(error(empty).contains("begin: expected texts"), "{}", error(empty));
}

/// Templates of published models: those that the repository holds, and those beside it, if they are there.
fn published() -> Vec<(String, String)> {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders =
        ["../../tests/fixtures/chat-templates/templates", "../../../shared/real/chat-templates"];
    let files =
        folders.iter().filter_map(|folder| std::fs::read_dir(here.join(folder)).ok()).flatten();
    let mut all: Vec<(String, String)> = files
        .map(|file| file.expect("a file").path())
        .map(|path| {
            let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
            (name, std::fs::read_to_string(&path).expect("a template"))
        })
        .collect();
    all.sort();
    all.dedup();
    all
}

#[test]
fn templates_of_published_models_choose_their_dialect() {
    let expected = [
        ("command-r7b", Some("command_r")),
        ("GLM-4.6", Some("glm4_moe")),
        ("SmolLM3", Some("think")), // an edition without tools
        ("Kimi-K2", Some("kimi_k2")),
        ("Qwen2.5", Some("hermes")),
        ("Qwen3", Some("hermes")),
        ("DeepSeek-R1", Some("deepseek_v3")),
        ("DeepSeek-V3.1", Some("deepseek_v31")),
        ("gemma-2", None),
        ("granite-3.3", Some("granite")),
        ("Llama-3.1", Some("llama3_json")),
        ("Llama-3.2", Some("llama3_json")),
        ("Phi-3.5", None),
        ("Mistral-Nemo", Some("mistral")),
        ("gpt-oss", Some("gpt_oss")),
    ];
    let (all, published) = (all(), published());
    assert!(published.len() >= 11);
    for (name, text) in published {
        let (_, expected) = expected.iter().find(|(part, _)| name.contains(part)).expect(&name);
        let found = Dialect::of_template(&all, &text);
        assert_eq!(found.as_ref().map(|d| d.name.as_str()), *expected, "{name}");
    }
}

#[test]
fn calls_that_real_templates_write_are_read_back() {
    let (all, mut read_back) = (all(), 0);
    let call = |id: &str, name: &str, arguments: &Value| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    for (name, text) in published() {
        let Some(dialect) = Dialect::of_template(&all, &text) else { continue };
        if dialect.calls.is_none() && dialect.channels.is_none() {
            continue;
        }
        let special = [("bos_token", "<s>"), ("eos_token", "</s>")];
        let special = SpecialTokens::from_iter(special.map(|(a, b)| (a.to_owned(), b.to_owned())));
        let template = ChatTemplate::parse(&text, special).expect("it compiles");
        let options = RenderOptions {
            tools: Some(vec![
                json!({"type": "function", "function": {"name": "now", "description": "x",
                "parameters": {"type": "object", "properties": {}}}}),
            ]),
            now: Some("2026-01-02T03:04:05".parse().expect("a time")),
            ..RenderOptions::default()
        };
        let user = Message::new("user", "Weather?");
        let (one, two) =
            (call("aaaaaaaaa", "get_weather", &arguments()), call("bbbbbbbbb", "now", &json!({})));
        for calls in [vec![one.clone()], vec![one, two]] {
            let fields = json!({"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "Hm."});
            let expected: Vec<(String, Value)> = calls
                .iter()
                .map(|c| {
                    (
                        c["function"]["name"].as_str().expect("a name").to_owned(),
                        c["function"]["arguments"].clone(),
                    )
                })
                .collect();
            let Value::Object(fields) = fields else { unreachable!("it is one") };
            let open = RenderOptions { add_generation_prompt: true, ..options.clone() };
            let prompt = template.render(std::slice::from_ref(&user), &open).expect(&name);
            let Ok(whole) = template.render(&[user.clone(), Message(fields)], &options) else {
                continue;
            };
            let same = prompt.char_indices().zip(whole.chars()).find(|((_, a), b)| a != b);
            let at = same.map_or(prompt.len(), |((at, _), _)| at).min(whole.len());
            let answer = read_anyhow(&dialect, &whole[..at], &whole[at..]);
            if answer.calls.is_empty()
                && ["granite", "deepseek_v3"].contains(&dialect.name.as_str())
            {
                continue; // these templates write calls where the content is null, or never
            }
            // A template that writes one call of several.
            let expected = if dialect.channels.is_some() { &expected[..1] } else { &expected[..] };
            assert_eq!(answer.json(), expected, "{name}: {:?}", &whole[at..]);
            read_back += 1;
        }
    }
    assert!(read_back >= 12, "{read_back}");
}

/// Two calls as models of each dialect write them, with what stands around them.
const WRITTEN: [(&str, &str); 25] = [
    (
        "hermes",
        "<think>\nHm.\n</think>\n\nBoth.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": OBJECT}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>",
    ),
    (
        "qwen3_coder",
        "Both.\n<tool_call>\n<function=get_weather>\nQWEN</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    (
        "seed_oss",
        "<seed:think>Hm.</seed:think>Both.<seed:tool_call>\n<function=get_weather>\nQWEN</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    ),
    (
        "llama3_json",
        "{\"name\": \"get_weather\", \"parameters\": OBJECT}; {\"type\": \"function\", \"name\": \"now\", \"parameters\": {}}",
    ),
    ("llama_pythonic", "[get_weather(PYTHON), now()]"),
    (
        "mistral",
        "Both.[TOOL_CALLS] [{\"name\": \"get_weather\", \"arguments\": OBJECT}, {\"name\": \"now\", \"arguments\": {}, \"id\": \"bbbbbbbbb\"}]",
    ),
    (
        "mistral_args",
        "[THINK]Hm.[/THINK]Both.[TOOL_CALLS]get_weather[ARGS]OBJECT[TOOL_CALLS]now[CALL_ID]bbbbbbbbb[ARGS]{}",
    ),
    (
        "deepseek_v3",
        "Both.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\nOBJECT\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "deepseek_v31",
        "Both.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>OBJECT<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "deepseek_v32",
        "Both.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\nDSML</｜DSML｜invoke>\n<｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Both.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>OBJECT<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
    ),
    (
        "glm4_moe",
        "\n<think>Hm.</think>\nBoth.\n<tool_call>get_weather\nGLM</tool_call>\n<tool_call>now\n</tool_call>",
    ),
    (
        "kimi_k2",
        "Both.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>OBJECT<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        "granite",
        "<think>Hm.</think><response>Both.</response><|tool_call|>[{\"name\": \"get_weather\", \"arguments\": OBJECT}, {\"name\": \"now\", \"arguments\": {}}]",
    ),
    (
        "granite_function",
        "Both. <function_call> {\"name\": \"get_weather\", \"arguments\": OBJECT} <function_call> {\"name\": \"now\", \"arguments\": {}}",
    ),
    (
        "command_r",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"get_weather\", \"parameters\": OBJECT},\n    {\"tool_call_id\": \"1\", \"tool_name\": \"now\", \"parameters\": {}}\n]<|END_ACTION|>",
    ),
    (
        "minimax_m2",
        "<think>\nHm.\n</think>\n\nBoth.\n<minimax:tool_call>\n<invoke name=\"get_weather\">\nMINIMAX</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>",
    ),
    ("lfm2", "<|tool_call_start|>[get_weather(PYTHON), now()]<|tool_call_end|>Both."),
    ("olmo3", "<function_calls>\nget_weather(PYTHON)\nnow()\n</function_calls>"),
    (
        "internlm2",
        "Both.<|action_start|><|plugin|>\n{\"name\": \"get_weather\", \"parameters\": OBJECT}<|action_end|><|action_start|><|plugin|>{\"name\": \"now\"}<|action_end|>",
    ),
    (
        "phi4_mini",
        "<|tool_call|>[{\"name\": \"get_weather\", \"arguments\": OBJECT}, {\"name\": \"now\", \"arguments\": {}}]<|/tool_call|>",
    ),
    (
        "nemotron_nano",
        "<TOOLCALL>[{\"name\": \"get_weather\", \"arguments\": OBJECT}, {\"name\": \"now\", \"arguments\": \"{}\"}]</TOOLCALL>",
    ),
    (
        "jamba",
        "<tool_calls>[\n{\"arguments\": OBJECT, \"name\": \"get_weather\"},\n{\"name\": \"now\", \"arguments\": {}}\n]</tool_calls>",
    ),
    ("function_tags", "Both.<function=get_weather>OBJECT</function><function=now>{}</function>"),
    (
        "longcat",
        "<longcat_tool_call>\n{\"name\": \"get_weather\", \"arguments\": OBJECT}\n</longcat_tool_call>\n<longcat_tool_call>{\"name\": \"now\", \"arguments\": {}}</longcat_tool_call>",
    ),
];

/// A text of [`WRITTEN`] with the arguments in its own form.
fn written(text: &str) -> String {
    let each = |write: &dyn Fn(&str, &Value) -> String| -> String {
        arguments()
            .as_object()
            .expect("an object")
            .iter()
            .map(|(key, value)| write(key, value))
            .collect()
    };
    let plain = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let python = |key: &str, value: &Value| {
        let text = value.to_string().replace("true", "True").replace("false", "False");
        format!("{key}={}, ", text.replace("\"x\"", "'x'"))
    };
    text.replace("OBJECT", &arguments().to_string())
        .replace("QWEN", &each(&|k, v| format!("<parameter={k}>\n{}\n</parameter>\n", plain(v))))
        .replace(
            "MINIMAX",
            &each(&|k, v| format!("<parameter name=\"{k}\">{}</parameter>\n", plain(v))),
        )
        .replace(
            "GLM",
            &each(&|k, v| format!("<arg_key>{k}</arg_key>\n<arg_value>{}</arg_value>\n", plain(v))),
        )
        .replace(
            "DSML</",
            &each(&|k, v| {
                format!(
                    "<｜DSML｜parameter name=\"{k}\" string=\"{}\">{}</｜DSML｜parameter>\n",
                    v.is_string(),
                    plain(v)
                )
            })
            .add("</"),
        )
        .replace("PYTHON", each(&python).trim_end_matches(", "))
}

trait Add {
    fn add(self, text: &str) -> String;
}

impl Add for String {
    fn add(self, text: &str) -> String {
        self + text
    }
}

#[test]
fn every_dialect_tells_calls_reasoning_and_content_apart_wherever_it_is_cut() {
    let expected = [("get_weather".to_owned(), arguments()), ("now".to_owned(), json!({}))];
    for dialect in all() {
        let written_by = WRITTEN.iter().find(|(name, _)| *name == dialect.name);
        let Some((name, text)) = written_by else {
            assert_eq!(dialect.name, "think", "a dialect without a test");
            continue;
        };
        let text = written(text);
        let answer = read_anyhow(&Arc::new(dialect), "", &text);
        assert_eq!(answer.json(), expected, "{name}: {text}\n{answer:?}");
        assert_eq!(answer.reasoning, if text.contains("Hm.") { "Hm." } else { "" }, "{name}");
        assert_eq!(answer.content, if text.contains("Both.") { "Both." } else { "" }, "{name}");
    }
}

#[test]
fn what_is_no_call_is_content() {
    let cases = [
        ("hermes", "Write <tool_call> in front. Or <b>.", "Write <tool_call> in front. Or <b>."),
        ("hermes", "a < b, <tool", "a < b, <tool"),
        (
            "llama3_json",
            "{\"answer\": 42, \"name\": \"now\"}",
            "{\"answer\": 42, \"name\": \"now\"}",
        ),
        (
            "llama3_json",
            "{\"name\": \"Bob\", \"parameters\": {}}",
            "{\"name\": \"Bob\", \"parameters\": {}}",
        ),
        ("llama3_json", "{ braces } are text.", "{ braces } are text."),
        ("llama_pythonic", "[1, 2, 3] is a list.", "[1, 2, 3] is a list."),
        ("llama_pythonic", "[see (above)] it", "[see (above)] it"),
        ("think", "a <think> b </think> c  ", "a c  "),
        ("gpt_oss", "no header at all", "no header at all"),
    ];
    for (name, text, content) in cases {
        let answer = read_anyhow(&named(name), "", text);
        assert_eq!((answer.content.as_str(), answer.calls.len()), (content, 0), "{name}: {text}");
    }
}

#[test]
fn reasoning_may_have_begun_in_the_prompt_and_end_with_the_text() {
    let dialect = named("hermes");
    let answer = read_anyhow(&dialect, "<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nYes.");
    assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("Hm.", "Yes."));
    let answer = read_anyhow(&dialect, "<think>\n\n</think>\n\n", "Yes.");
    assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("", "Yes."));
    let answer = read_anyhow(&dialect, "<think>", "Hm. And");
    assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("Hm. And", ""));
}

#[test]
fn a_call_that_is_cut_keeps_what_it_has() {
    for (name, text) in WRITTEN {
        let (dialect, text) = (named(name), written(text));
        let ends = (0..text.len()).filter(|at| text.is_char_boundary(*at));
        for end in ends {
            let answer = read(&dialect, "", [&text[..end]]);
            let names: Vec<&str> = answer.calls.iter().map(|(name, _)| name.as_str()).collect();
            assert!(["get_weather", "now"].starts_with(&names), "{name}: {names:?}");
        }
    }
}

#[test]
fn what_follows_a_call_that_cannot_be_read_is_lost_however_it_comes() {
    let text = "Both.\n<tool_call>\n{\"name\": \"now\", uments\": {\"a\": \"x\"}}\nto";
    let answer = read_anyhow(&named("granite"), "", text);
    assert_eq!((answer.content.as_str(), answer.calls.len()), ("Both.", 1));
}

#[test]
fn a_call_without_a_value_or_with_a_long_name_is_content_and_what_follows_is_read() {
    let long = "E".repeat(300);
    for call in ["{\"name\" :,e]", &format!("{{\"{long}<think>\u{1}</think>\": 1}}")] {
        let text = format!("<tool_call>\n{call}<think>Hm.</think>");
        let answer = read_anyhow(&named("granite"), "", &text);
        assert!(answer.reasoning.ends_with("Hm.") && answer.calls.is_empty(), "{answer:?}");
    }
}

#[test]
fn quotes_around_a_call_are_no_content_however_they_come() {
    let text = "<function_calls>\nnow()  ` ``and so";
    let answer = read_anyhow(&named("olmo3"), "", text);
    assert_eq!((answer.content.as_str(), answer.calls.len()), ("and so", 1));
}

#[test]
fn arguments_in_a_text_that_is_no_json_are_told_as_they_are_however_they_come() {
    let text = "<tool_call>\n{\"name\": \"now\", \"arguments\":  \"\u{1}\"}\n</tool_call>";
    let answer = read_anyhow(&named("hermes"), "", text);
    assert_eq!(answer.calls, [("now".to_owned(), "\"\u{1}\"".to_owned())]);
}

#[test]
fn arguments_are_told_as_they_come() {
    let text = "<tool_call>\n{\"name\": \"now\", \"arguments\": {\"a\": \"bcd";
    let mut parser = Parser::new(&named("hermes"), &tools(), "");
    let parts = parser.push(text);
    let expected =
        [Part::Call(0, "now".to_owned()), Part::Arguments(0, "{\"a\": \"bcd".to_owned())];
    let mut answer = Answer::default();
    answer.take(parts);
    let mut told = Answer::default();
    told.take(expected.to_vec());
    assert_eq!(answer, told);
}

mod random {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        /// Markers, braces and words in any order, cut anywhere.
        #[test]
        fn whatever_comes_it_is_the_same_however_it_is_cut(
            which in any::<prop::sample::Index>(),
            picks in prop::collection::vec((any::<prop::sample::Index>(), 0..12usize), 0..14),
        ) {
            let all = all();
            let dialect = Arc::new(which.get(&all).clone());
            let words = ["{", "}", "[", "\"name\": \"now\"", "\"arguments\": {}", ", ", "now", "(", ")", "\n", "é x", ":"];
            let markers: Vec<String> = dialect.markers().into_iter().map(str::to_owned).collect();
            let text: String = picks.iter().map(|(index, word)| {
                if *word % 2 == 0 && !markers.is_empty() { index.get(&markers).clone() } else { words[*word].to_owned() }
            }).collect();
            read_anyhow(&dialect, "", &text);
        }
    }
}
