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

/// The demo model with other templates, all served together.
fn server() -> (Server, tempfile::TempDir) {
    let (root, folder) = (
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."),
        tempfile::tempdir().expect("a folder"),
    );
    let mut args: Vec<String> = Vec::new();
    for (name, template) in TEMPLATES {
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

fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": {
            "type": "object", "required": ["city", "days"], "additionalProperties": false, "properties": {
                "city": {"type": "string", "enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "exact": {"type": "boolean"}}}}},
        {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {
            "type": "object", "properties": {}, "additionalProperties": false}}},
    ])
}

fn is_call(call: &Value, named: Option<&str>) {
    let text = call["function"]["arguments"].as_str().expect("text");
    let arguments: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {call}"));
    assert!(arguments.is_object() && call["type"] == "function", "{call}");
    assert!(call["id"].as_str().is_some_and(|id| id.len() >= 9), "{call}");
    let name = call["function"]["name"].as_str().expect("a name");
    assert!(named.is_none_or(|named| named == name), "{call}");
    match name {
        "get_weather" => {
            assert!(
                ["Paris", "Oslo"].contains(&arguments["city"].as_str().expect("a city")),
                "{call}"
            );
            assert!((1..10).contains(&arguments["days"].as_i64().expect("a number")), "{call}");
        }
        "now" => assert_eq!(arguments, json!({})),
        other => panic!("no tool: {other}"),
    }
}

#[test]
fn what_must_be_called_is_called_in_every_dialect() {
    let (server, _folder) = server();
    let weather = json!({"type": "function", "function": {"name": "get_weather"}});
    for (model, _) in TEMPLATES {
        let ask = with(
            chat("The weather, please."),
            json!({"model": model, "tools": tools(), "max_tokens": 400,
            "temperature": 2.0, "n": 3, "chat_template_kwargs": {"enable_thinking": false}}),
        );
        for (seed, (choice, named)) in
            [(json!("required"), None), (weather.clone(), Some("get_weather"))].iter().enumerate()
        {
            let ask = with(
                ask.clone(),
                json!({"tool_choice": choice, "seed": seed, "parallel_tool_calls": seed == 0}),
            );
            let answer = server.post(CHAT, &ask).ok();
            let mut ended = 0;
            for choice in answer["choices"].as_array().expect("choices") {
                if choice["finish_reason"] == "length" {
                    continue; // it thought, or called, without end
                }
                ended += 1;
                assert_eq!(choice["finish_reason"], "tool_calls", "{model}: {choice}");
                let calls = choice["message"]["tool_calls"].as_array().expect("calls");
                assert!(
                    !calls.is_empty() && (named.is_none() || calls.len() == 1),
                    "{model}: {choice}"
                );
                calls.iter().for_each(|call| is_call(call, *named));
                assert!(choice["message"]["content"].is_null(), "{model}: {choice}");
            }
            assert!(
                ended > 0 || answer.to_string().contains("reasoning_content"),
                "{model}: {answer}"
            );
            // The stream says the same.
            let streamed = frames(server.stream(CHAT, &with(ask, json!({"stream": true, "n": 1}))));
            let (mut calls, mut finish) = (Vec::<Value>::new(), Value::Null);
            for frame in streamed.iter().filter(|f| f["choices"][0].is_object()) {
                let choice = &frame["choices"][0];
                for delta in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
                    let index = delta["index"].as_u64().expect("an index") as usize;
                    if index == calls.len() {
                        calls.push(delta.clone());
                        continue;
                    }
                    let more = delta["function"]["arguments"].as_str().expect("text");
                    let so_far = calls[index]["function"]["arguments"].as_str().expect("text");
                    calls[index]["function"]["arguments"] = (so_far.to_owned() + more).into();
                }
                finish = choice["finish_reason"].clone();
            }
            if finish == "tool_calls" {
                calls.iter().for_each(|call| is_call(call, *named));
                let whole = answer["choices"][0]["message"]["tool_calls"].as_array().map(Vec::len);
                assert_eq!(whole, Some(calls.len()), "{model}");
            }
        }
    }
}

#[test]
fn turns_with_calls_are_rendered_and_what_cannot_be_is_refused() {
    let (server, _folder) = server();
    let turn = |arguments: Value| {
        json!([{"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "aaaaaaaaa", "type": "function", "function": {"name": "now", "arguments": arguments}}]},
            {"role": "tool", "tool_call_id": "aaaaaaaaa", "content": [{"type": "text", "text": "noon"}]}])
    };
    for model in ["qwen3", "glm", "kimi", "deepseek", "mistral", "r1"] {
        let ask = |messages: Value| {
            let common = json!({"model": model, "max_tokens": 2, "tools": tools()});
            server.post(CHAT, &with(common, json!({"messages": messages})))
        };
        ask(turn(json!("{\"zone\": \"UTC\"}"))).ok();
        ask(turn(json!({"zone": "UTC"}))).ok();
        ask(turn(json!("{"))).error(400, Some("messages.1.tool_calls"), None);
    }
    let ask =
        |more: Value| server.post(CHAT, &with(with(chat("Hi"), json!({"model": "qwen3"})), more));
    let invalid = Some("invalid_value");
    ask(json!({"tools": [{"type": "function", "function": {"name": "a b"}}]})).error(
        422,
        Some("tools"),
        invalid,
    );
    ask(json!({"tools": vec![&tools()[0]; 129]})).error(422, Some("tools"), invalid);
    ask(json!({"tools": tools(), "tool_choice": "any"})).error(400, Some("tool_choice"), None);
    let missing = json!({"type": "function", "function": {"name": "nothing"}});
    ask(json!({"tools": tools(), "tool_choice": missing})).error(422, Some("tool_choice"), invalid);
    let both = json!({"tools": tools(), "tool_choice": "required", "response_format": {"type": "json_object"}});
    ask(both).error(400, Some("response_format"), None);
    let mut broken = tools();
    broken[1]["function"]["parameters"] = json!({"type": "nonsense"});
    ask(json!({"tools": broken, "tool_choice": "required"})).error(
        400,
        Some("tools"),
        Some("invalid_grammar"),
    );
    // A template that raises.
    let two = json!([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]);
    server.post(CHAT, &json!({"model": "mistral", "messages": two})).error(
        400,
        Some("messages"),
        None,
    );
    // Without tools, and where none is to be called, calls are text.
    let plain = ask(json!({"max_tokens": 4, "tools": tools(), "tool_choice": "none"})).ok();
    assert!(plain["choices"][0]["message"].get("tool_calls").is_none());
}

#[test]
fn reasoning_is_told_apart_and_counted() {
    let (server, _folder) = server();
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
