//! Fields that change the answer: each does what it says, streamed or not, on chats and completions.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::support::{Answer, CHAT, Server, TEXT, chat, frames, story, with};

/// The text of the first choice and why it ended, which are the same as a whole and as a stream.
fn text(server: &Server, path: &str, request: &Value) -> (String, String) {
    let whole = server.post(path, request).ok();
    let choice = &whole["choices"][0];
    let content = if path == CHAT { &choice["message"]["content"] } else { &choice["text"] };
    let content = content.as_str().expect("text").to_owned();
    let reason = choice["finish_reason"].as_str().expect("a reason").to_owned();
    let (mut streamed, mut ended) = (String::new(), Value::Null);
    for frame in frames(server.stream(path, &with(request.clone(), json!({"stream": true})))) {
        let choice = &frame["choices"][0];
        let delta = if path == CHAT { &choice["delta"]["content"] } else { &choice["text"] };
        streamed.push_str(delta.as_str().unwrap_or_default());
        if !choice["finish_reason"].is_null() {
            ended = choice["finish_reason"].clone();
        }
    }
    assert_eq!((&streamed, &ended), (&content, &json!(reason)), "{request}");
    (content, reason)
}

fn ids(server: &Server, text: &str) -> Vec<u64> {
    let asked = json!({"prompt": text, "add_special_tokens": false});
    let tokens = server.post("/tokenize", &asked).ok();
    tokens["tokens"].as_array().expect("tokens").iter().filter_map(Value::as_u64).collect()
}

#[test]
fn ends_come_where_they_are_asked_for() {
    let server = Server::start(&[]);
    for (path, request) in
        [(TEXT, story(24)), (CHAT, with(chat("What is 3 plus 4?"), json!({"max_tokens": 24})))]
    {
        let ask = |more: Value| text(&server, path, &with(request.clone(), more));
        let (plain, _) = ask(json!({}));
        // A token ends the text; it is told only where that is wanted.
        let logged = if path == CHAT { json!({"logprobs": true}) } else { json!({"logprobs": 0}) };
        let told = server.post(path, &with(request.clone(), logged)).ok();
        let logprobs = &told["choices"][0]["logprobs"];
        let spelt = |i: usize| match path {
            CHAT => logprobs["content"][i]["token"].as_str().expect("a token").to_owned(),
            _ => logprobs["tokens"][i].as_str().expect("a token").to_owned(),
        };
        let third = spelt(3);
        let before: String = (0..3).map(&spelt).collect();
        let all = ids(&server, &plain);
        let tokens: BTreeSet<u64> = all
            .iter()
            .copied()
            .filter(|id| {
                let text = server.post("/detokenize", &json!({"tokens": [id]})).ok();
                text["prompt"].as_str().map(str::trim) == Some(third.trim())
            })
            .collect();
        assert!(!tokens.is_empty() && !before.contains(&third), "{third:?} of {plain:?}");
        let stop = json!({"stop_token_ids": tokens});
        let (ended, reason) = ask(stop.clone());
        assert_eq!((ended.as_str(), reason.as_str()), (before.as_str(), "stop"));
        let (with_it, _) = ask(with(stop.clone(), json!({"include_stop_str_in_output": true})));
        assert_eq!(with_it, before.clone() + &third);
        assert_eq!(
            ask(with(stop.clone(), json!({"ignore_eos": true}))).0,
            before,
            "not its own end"
        );

        // Neither a token nor a string ends it before the least tokens.
        let least = json!({"min_tokens": 8});
        let (longer, _) = ask(with(stop, least.clone()));
        assert!(longer.len() > before.len() && longer.starts_with(&before), "{longer:?}");
        let word = json!({"stop": third.trim()});
        let (cut, reason) = ask(word.clone());
        assert!(cut.trim_end() == before.trim_end() && reason == "stop", "{cut:?}");
        let (kept, _) = ask(with(word.clone(), json!({"include_stop_str_in_output": true})));
        assert_eq!(kept, cut + third.trim());
        let (later, _) = ask(with(word, least));
        assert!(later.starts_with(&kept) && later.len() > kept.len(), "{later:?}");
        // One that begins in them and ends later is cut off whole, as vLLM has it.
        let straddling = json!({"stop": spelt(2) + &third});
        let (cut, reason) = ask(with(straddling.clone(), json!({"min_tokens": 3})));
        assert_eq!((cut, reason.as_str()), (spelt(0) + &spelt(1), "stop"));
        let (passed, _) = ask(with(straddling, json!({"min_tokens": 4})));
        assert!(passed.starts_with(&with_it) && passed.len() > with_it.len(), "{passed:?}");
        let usage =
            &server.post(path, &with(request.clone(), json!({"min_tokens": 24}))).ok()["usage"];
        assert_eq!(usage["completion_tokens"], 24, "the model's own end is kept out, too");
        let refused = with(request.clone(), json!({"min_tokens": 25}));
        server.post(path, &refused).error(422, Some("min_tokens"), Some("invalid_value"));
        // Many stop strings.
        let mut stops: Vec<String> = (0..63).map(|i| format!("never{i}")).collect();
        stops.push(third.trim().to_owned());
        assert_eq!(ask(json!({"stop": stops})).0.trim_end(), before.trim_end());
    }
}

#[test]
fn special_tokens_have_a_text_where_it_is_wanted() {
    let server = Server::start(&[]);
    let ask = |more: Value| text(&server, CHAT, &with(chat("What is 3 plus 4?"), more)).0;
    let plain = ask(json!({}));
    let end = json!({"skip_special_tokens": false, "include_stop_str_in_output": true});
    let shown = ask(end);
    assert!(shown.starts_with(&plain) && shown.len() > plain.len(), "{shown:?}");
    assert_eq!(
        ask(json!({"include_stop_str_in_output": true})),
        plain,
        "its end is a special token"
    );
    // Added tokens count.
    let count = |more: Value| {
        let answer = server.post(TEXT, &with(story(1), more)).ok();
        answer["usage"]["prompt_tokens"].as_u64().expect("a number")
    };
    assert_eq!(
        count(json!({"add_special_tokens": false})),
        ids(&server, "Once upon a time").len() as u64
    );
}

#[test]
fn prompts_tell_their_log_probabilities_as_vllm_does() {
    let server = Server::start(&[]);
    let tokens = server.post("/tokenize", &json!({"prompt": "Once upon a time"})).ok();
    let tokens: Vec<u64> =
        tokens["tokens"].as_array().expect("ids").iter().filter_map(Value::as_u64).collect();
    let request = with(story(3), json!({"prompt_logprobs": 2, "echo": true, "logprobs": 1}));
    let whole = server.post(TEXT, &request).ok();
    let told = whole["choices"][0]["prompt_logprobs"].as_array().expect("a list").clone();
    let echoed = &whole["choices"][0]["logprobs"];
    assert_eq!(told.len(), tokens.len());
    assert_eq!(told[0], Value::Null);
    for (i, token) in tokens.iter().enumerate().skip(1) {
        let all = told[i].as_object().expect("an object");
        let own = &all[&token.to_string()];
        assert_eq!(own["logprob"], echoed["token_logprobs"][i]);
        assert_eq!(echoed["top_logprobs"][i].as_object().expect("a map").len(), 1);
        let rank = own["rank"].as_u64().expect("a rank");
        assert!(all.len() == if rank <= 2 { 2 } else { 3 }, "{all:?}");
        let likelier = all.values().filter(|l| l["logprob"].as_f64() > own["logprob"].as_f64());
        assert_eq!(likelier.count() as u64, (rank - 1).min(2));
        assert!(own["decoded_token"].as_str().is_some_and(|t| !t.is_empty()));
    }
    // A stream tells them once, with the first piece.
    let all = frames(server.stream(TEXT, &with(request, json!({"stream": true}))));
    assert_eq!(all[0]["choices"][0]["prompt_logprobs"], Value::Array(told));
    assert!(all[1..].iter().all(|f| f["choices"][0].get("prompt_logprobs").is_none()));
    // A chat does it beside its choices.
    let question = with(chat("Hi"), json!({"prompt_logprobs": 0, "n": 2, "max_tokens": 2}));
    let whole = server.post(CHAT, &question).ok();
    let told = whole["prompt_logprobs"].as_array().expect("a list").clone();
    assert_eq!(told.len() as u64, whole["usage"]["prompt_tokens"].as_u64().expect("a number"));
    assert!(told[1..].iter().all(|l| l.as_object().is_some_and(|l| l.len() == 1)));
    let all = frames(server.stream(CHAT, &with(question, json!({"stream": true}))));
    let with_them: Vec<&Value> = all.iter().filter_map(|f| f.get("prompt_logprobs")).collect();
    assert_eq!(with_them, [&Value::Array(told)]);
    assert!(server.post(CHAT, &chat("Hi")).ok().get("prompt_logprobs").is_none());
}

#[test]
fn prompts_are_cut_and_answers_say_so() {
    let server = Server::start(&["--max-length", "64"]);
    let long = "The dog ran to the big tree. ".repeat(30);
    for (path, param, request) in [
        (TEXT, "prompt", with(story(4), json!({"prompt": long}))),
        (CHAT, "messages", with(chat(&long), json!({"max_tokens": 4}))),
    ] {
        server.post(path, &request).error(400, Some(param), Some("context_length_exceeded"));
        let count = |more: Value| {
            let usage = server.post(path, &with(request.clone(), more)).ok()["usage"].clone();
            usage["prompt_tokens"].as_u64().expect("a number")
        };
        assert_eq!(count(json!({"truncate_prompt_tokens": 10})), 10);
        assert_eq!(count(json!({"truncate_prompt_tokens": -1})), 60);
    }
    // The end of the prompt is what is taken, and echoed.
    let tokens = ids(&server, "Once upon a time");
    let cut = with(story(6), json!({"truncate_prompt_tokens": 2, "echo": true}));
    let echoed = text(&server, TEXT, &cut).0;
    let last = with(story(6), json!({"prompt": tokens[tokens.len() - 2..], "echo": true}));
    assert_eq!(echoed, text(&server, TEXT, &last).0);

    // More tokens than there is room for.
    let warning = |answer: &Answer| answer.header("x-infernum-warning").to_owned();
    let answer = server.post(TEXT, &with(story(4000), json!({"ignore_eos": true})));
    let used = answer.ok()["usage"].clone();
    assert_eq!(used["total_tokens"], 64);
    let room = used["completion_tokens"].as_u64().expect("a number");
    let expected = format!("max_tokens: 4000 were asked for, and there is room for {room}");
    assert_eq!(warning(&answer), expected);
    let answer = server.post(
        CHAT,
        &with(
            chat("Hi"),
            json!({"max_completion_tokens": 500, "stream": true, "store": true, "tint": 1}),
        ),
    );
    let said = warning(&answer);
    assert!(
        said.starts_with(
            "unknown fields were ignored: tint; without effect here: store; max_tokens: 500 were"
        ),
        "{said}"
    );
    assert_eq!(warning(&server.post(TEXT, &story(4))), "");
}

#[test]
fn what_is_not_built_is_refused_not_passed_over() {
    let server = Server::start(&[]);
    for (path, request) in [(TEXT, story(2)), (CHAT, with(chat("Hi"), json!({"max_tokens": 2})))] {
        let ask = |more: Value| server.post(path, &with(request.clone(), more));
        for (field, value) in [
            ("grammar", json!("root ::= x")),
            ("functions", json!([{"name": "f"}])),
            ("function_call", json!("auto")),
            ("modalities", json!(["text", "audio"])),
            ("audio", json!({"voice": "x"})),
            ("logits_processors", json!(["x"])),
            ("use_beam_search", json!(true)),
            ("thinking", json!(true)),
            ("web_search_options", json!({"a": 1})),
            ("bad_words", json!(["x"])),
        ] {
            ask(json!({field: value})).error(422, Some(field), Some("unsupported_value"));
            ask(json!({field: null})).ok();
        }
        let answer = ask(
            json!({"use_beam_search": false, "modalities": ["text"], "function_call": "none", "colour": 1}),
        );
        answer.ok();
        assert_eq!(answer.header("x-infernum-warning"), "unknown fields were ignored: colour");
    }
    server.post(CHAT, &with(chat("Hi"), json!({"best_of": 2}))).error(
        422,
        Some("best_of"),
        Some("unsupported_value"),
    );
}

#[test]
fn errors_tell_little_of_what_was_sent_back() {
    let server = Server::start(&[]);
    let long = "z".repeat(50_000);
    let bodies = [
        (TEXT, with(story(2), json!({"model": long}))),
        (TEXT, with(story(2), json!({"temperature": long}))),
        (TEXT, with(story(2), json!({"logit_bias": {&long: 1}}))),
        (TEXT, with(story(2), json!({"stop": {"a": long}}))),
        (TEXT, with(story(2), json!({"prompt": [1, long]}))),
        (CHAT, with(chat("Hi"), json!({"tool_choice": long}))),
        (CHAT, json!({"messages": [{"role": "user", "content": [{"type": long}]}]})),
        (CHAT, json!({"messages": [{"role": long, "content": 5}]})),
        (CHAT, json!({"messages": [long]})),
        ("/tokenize", json!({"prompt": 5, "messages": long})),
        ("/detokenize", json!({"tokens": long})),
    ];
    for (path, body) in bodies {
        let answer = server.post(path, &body);
        assert!((400..500).contains(&answer.status), "{}", answer.text);
        let longest = answer.text.split(|c| c != 'z').map(str::len).max();
        assert!(longest < Some(201) && answer.text.len() < 1200, "{}", answer.text);
        for internal in ["untagged", "enum ", "struct ", "invalid type", "variant"] {
            assert!(!answer.text.contains(internal), "{}", answer.text);
        }
    }
    let answer = server.get(&format!("/{long}"));
    assert!(answer.status == 404 && answer.text.len() < 500);
}

#[test]
fn one_model_needs_no_name() {
    let server = Server::start(&[]);
    let question = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2});
    assert_eq!(server.post(CHAT, &question).ok()["model"], "ember");
    server.post(TEXT, &json!({"prompt": "Hi", "max_tokens": 2})).ok();
    server.post("/tokenize", &json!({"prompt": "Hi"})).ok();
    drop(server);
    let server = Server::start(&["--model", "a=demo", "--model", "b=demo", "--max-length", "64"]);
    for (path, body) in [
        (CHAT, question),
        (TEXT, json!({"prompt": "Hi"})),
        ("/tokenize", json!({"prompt": "Hi"})),
        ("/detokenize", json!({"tokens": [5]})),
    ] {
        server.post(path, &body).error(400, Some("model"), None);
    }
}

#[test]
fn options_are_described_as_they_are_checked() {
    let server = Server::start(&[]);
    let api = server.get("/openapi.json").ok();
    let fields = &api["components"]["schemas"]["SamplingFields"]["properties"];
    assert_eq!(fields["temperature"]["maximum"].as_f64(), Some(2.0));
    assert_eq!(fields["top_p"]["exclusiveMinimum"].as_f64(), Some(0.0));
    assert_eq!(fields["top_k"]["type"], json!(["integer", "null"]));
    for (name, field) in fields.as_object().expect("fields") {
        let high = field["maximum"].as_f64().expect("a bound");
        let beyond = with(story(1), json!({name: high * 4.0 + 1.0}));
        let answer = server.post(TEXT, &beyond);
        answer.error(422, Some(name), Some("invalid_value"));
        assert!(answer.json()["error"]["message"].as_str().is_some_and(|m| m.contains("expected")));
        if high < 1e9 {
            server.post(TEXT, &with(story(1), json!({name: high}))).ok();
        }
    }
}
