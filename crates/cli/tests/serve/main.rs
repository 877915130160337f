//! `infernum serve`, spoken to as clients do.
#![allow(missing_docs, reason = "tests")]

mod apart;
mod apis;
mod engines;
mod fields;
mod guards;
mod hostile;
mod killed;
mod operations;
mod structure;
mod support;
mod tools;
mod vectors;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;

use serde_json::{Value, json};
use support::{Answer, CHAT, Server, TEXT, chat, command, endless, frames, story, wait, with};

#[test]
fn errors_have_one_shape_and_say_what_is_wrong() {
    let server = Server::start(&["--max-body-bytes", "100000"]);
    server.get("/nope").error(404, None, Some("not_found"));
    server.get(CHAT).error(405, None, Some("method_not_allowed"));
    server.get("/v1/models/x").error(404, Some("model"), Some("model_not_found"));
    for path in [CHAT, TEXT, "/tokenize", "/detokenize"] {
        server.send(path, "{\"model\": ").error(400, None, None);
        server.send(path, "").error(400, None, None);
        server.send(path, "[1]").error(400, None, None);
        server.send(path, &"x".repeat(100_001)).error(413, None, Some("body_too_large"));
    }
    server.send(CHAT, "{\"model\": \"ember\"}").error(400, Some("messages"), None);
    server.send(CHAT, "{\"messages\": []}").error(422, Some("messages"), Some("invalid_value"));
    server.send(TEXT, "{\"model\": \"ember\"}").error(400, Some("prompt"), None);
    for path in [CHAT, TEXT] {
        let whole = if path == CHAT { chat("Hi") } else { story(4) };
        let found = |more: Value| server.post(path, &with(whole.clone(), more));
        found(json!({"model": "gpt"})).error(404, Some("model"), Some("model_not_found"));
        found(json!({"temperature": "hot"})).error(400, Some("temperature"), None);
        found(json!({"stop": 3})).error(400, Some("stop"), None);
        let invalid = Some("invalid_value");
        for (param, value) in [
            ("temperature", json!(2.1)),
            ("temperature", json!(-0.1)),
            ("top_p", json!(0)),
            ("top_p", json!(1.5)),
            ("top_k", json!(-2)),
            ("min_p", json!(2)),
            ("frequency_penalty", json!(3)),
            ("presence_penalty", json!(-3)),
            ("repetition_penalty", json!(0)),
            ("n", json!(0)),
            ("n", json!(129)),
            ("max_tokens", json!(-1)),
            ("priority", json!(1i64 << 40)),
            ("stop", json!(vec!["a"; 65])),
            ("stop", json!(["x".repeat((16 << 10) + 1)])),
            ("stop_token_ids", json!([999_999])),
            ("stop_token_ids", json!(vec![1; 257])),
            ("prompt_logprobs", json!(21)),
            ("truncate_prompt_tokens", json!(0)),
            ("truncate_prompt_tokens", json!(-2)),
            ("min_tokens", json!(-1)),
            ("logit_bias", json!({"1": 101})),
            ("logit_bias", json!({"word": 1})),
            ("logit_bias", json!({"999999": 1})),
            ("stream_options", json!({"include_usage": true})),
        ] {
            found(json!({param: value})).error(422, Some(param), invalid);
        }
    }
    let found = |more: Value| server.post(CHAT, &with(chat("Hi"), more));
    let unsupported = Some("unsupported_value");
    found(json!({"tools": [{"type": "function"}]})).error(400, Some("tools.0"), None);
    let tool = json!({"type": "function", "function": {"name": "f"}});
    found(json!({"tools": [tool]})).error(422, Some("tools"), unsupported);
    found(json!({"tool_choice": "required"})).error(
        422,
        Some("tool_choice"),
        Some("invalid_value"),
    );
    found(json!({"top_logprobs": 2})).error(422, Some("top_logprobs"), Some("invalid_value"));
    found(json!({"logprobs": true, "top_logprobs": 21})).error(
        422,
        Some("top_logprobs"),
        Some("invalid_value"),
    );
    found(json!({"messages": []})).error(422, Some("messages"), Some("invalid_value"));
    found(json!({"messages": [{"role": "user"}]})).error(400, Some("messages.0.content"), None);
    found(json!({"messages": [{"content": "x"}]})).error(400, Some("messages.0.role"), None);
    let image = json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]});
    found(image).error(422, Some("messages.0.content"), unsupported);
    found(json!({"messages": [{"role": "user", "content": "a ".repeat(5000)}]})).error(
        400,
        Some("messages"),
        Some("context_length_exceeded"),
    );
    let found = |more: Value| server.post(TEXT, &with(story(4), more));
    found(json!({"suffix": "x"})).error(422, Some("suffix"), unsupported);
    found(json!({"logprobs": 21})).error(422, Some("logprobs"), Some("invalid_value"));
    found(json!({"n": 3, "best_of": 2})).error(422, Some("best_of"), Some("invalid_value"));
    found(json!({"best_of": 2, "stream": true})).error(422, Some("best_of"), Some("invalid_value"));
    found(json!({"prompt": []})).error(422, Some("prompt"), Some("invalid_value"));
    found(json!({"prompt": [99_999]})).error(422, Some("prompt"), Some("invalid_value"));
    found(json!({"prompt": vec![5; 3000]})).error(
        400,
        Some("prompt"),
        Some("context_length_exceeded"),
    );
    found(json!({"prompt": [1.5]})).error(400, Some("prompt.0"), None);
    found(json!({"prompt": vec!["x"; 129]})).error(422, Some("prompt"), Some("invalid_value"));
    server.post("/detokenize", &json!({"tokens": [99_999]})).error(
        422,
        Some("tokens"),
        Some("invalid_value"),
    );
    server.post("/tokenize", &json!({})).error(400, Some("prompt"), None);
    // Nothing of this reached the engine, or stayed there.
    assert_eq!(server.metric("infernum:num_requests_running"), 0.0);
    assert_eq!(server.metric("infernum:num_requests_waiting"), 0.0);
    // It still answers.
    server.post(CHAT, &chat("Hi")).ok();
}

#[test]
fn a_stream_is_what_the_whole_answer_is() {
    let server = Server::start(&[]);
    let question = chat("What is 3 plus 4?");
    let whole = server.post(CHAT, &question).ok();
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["choices"][0]["message"]["role"], "assistant");
    let text = whole["choices"][0]["message"]["content"].as_str().expect("text");
    assert_eq!(text.trim(), "3 plus 4 is 7.");
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    assert_eq!(whole["choices"][0]["logprobs"], Value::Null);
    let total =
        whole["usage"]["prompt_tokens"].as_u64().zip(whole["usage"]["completion_tokens"].as_u64());
    assert_eq!(total.map(|(a, b)| a + b), whole["usage"]["total_tokens"].as_u64());

    let usage = json!({"stream": true, "stream_options": {"include_usage": true}});
    let all = frames(server.stream(CHAT, &with(question.clone(), usage)));
    let (last, rest) = all.split_last().expect("frames");
    assert_eq!(last["choices"], json!([]));
    for key in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(last["usage"][key], whole["usage"][key]);
    }
    assert_eq!(last["usage"]["completion_tokens_details"]["reasoning_tokens"], 0);
    assert!(last["usage"]["prompt_tokens_details"]["cached_tokens"].is_u64());
    for frame in &all {
        assert_eq!(frame["id"], all[0]["id"]);
        assert_eq!(frame["created"], all[0]["created"]);
        assert_eq!(frame["object"], "chat.completion.chunk");
        assert_eq!(frame["model"], "ember");
    }
    assert!(
        rest.iter()
            .all(|f| f.as_object().expect("it").contains_key("usage") && f["usage"].is_null())
    );
    let (finish, deltas) = rest.split_last().expect("frames");
    assert_eq!(finish["choices"][0]["delta"], json!({}));
    assert_eq!(finish["choices"][0]["finish_reason"], "stop");
    assert_eq!(deltas[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let mut joined = String::new();
    for delta in &deltas[1..] {
        assert_eq!(delta["choices"][0]["finish_reason"], Value::Null);
        let delta = delta["choices"][0]["delta"].as_object().expect("an object");
        assert_eq!(delta.len(), 1);
        let piece = delta["content"].as_str().expect("text");
        assert!(!piece.is_empty());
        joined.push_str(piece);
    }
    assert!(deltas.len() > 4, "it came in pieces");
    assert_eq!(joined, text);

    // Without usage, its key is absent.
    let all = frames(server.stream(CHAT, &with(question, json!({"stream": true}))));
    assert!(all.iter().all(|f| f.get("usage").is_none() && f["choices"] != json!([])));

    let whole = server.post(TEXT, &story(12)).ok();
    assert_eq!(whole["object"], "text_completion");
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(whole["usage"]["completion_tokens"], 12);
    let all = frames(server.stream(TEXT, &with(story(12), json!({"stream": true}))));
    let (finish, deltas) = all.split_last().expect("frames");
    assert_eq!(finish["choices"][0]["finish_reason"], "length");
    assert_eq!(finish["choices"][0]["text"], "");
    let joined: String =
        deltas.iter().map(|f| f["choices"][0]["text"].as_str().expect("text")).collect();
    assert_eq!(joined, whole["choices"][0]["text"]);
    // OpenAI's default.
    let mut short = story(0);
    short.as_object_mut().expect("it").remove("max_tokens");
    assert_eq!(server.post(TEXT, &short).ok()["usage"]["completion_tokens"], 16);
}

#[test]
fn stop_strings_cut_across_tokens_and_are_never_shown() {
    let server = Server::start(&[]);
    let full = server.post(TEXT, &story(60)).ok();
    let full = full["choices"][0]["text"].as_str().expect("text");
    // From the middle of a word to the middle of the next, far in.
    let space = full.char_indices().filter(|(i, c)| *i > 60 && *c == ' ').nth(1).expect("words").0;
    let stop = &full[space - 2..space + 3];
    let expected = &full[..full.find(stop).expect("it is there")];
    for stops in [json!(stop), json!(["never there", stop])] {
        let request = with(story(60), json!({"stop": stops}));
        let whole = server.post(TEXT, &request).ok();
        assert_eq!(whole["choices"][0]["text"], expected);
        assert_eq!(whole["choices"][0]["finish_reason"], "stop");
        assert!(whole["usage"]["completion_tokens"].as_u64() < Some(60));
        let all = frames(server.stream(TEXT, &with(request, json!({"stream": true}))));
        let text = all.iter().map(|f| f["choices"][0]["text"].as_str().expect("text"));
        assert_eq!(text.collect::<String>(), expected);
        assert_eq!(all.last().expect("frames")["choices"][0]["finish_reason"], "stop");
    }
    // What only begins like a stop string is shown in the end.
    let request = with(story(60), json!({"stop": format!("{}#", &full[full.len() - 3..])}));
    assert_eq!(server.post(TEXT, &request).ok()["choices"][0]["text"], full);
    // The engine has let go of them.
    wait("nothing runs", || server.metric("infernum:num_requests_running") == 0.0);
    assert_eq!(
        server.metric(
            "infernum:request_success_total{model_name=\"ember\",finished_reason=\"stop\"}"
        ),
        4.0
    );
}

#[test]
fn choices_seeds_and_prompts() {
    let server = Server::start(&[]);
    let tell = |more: Value| {
        let answer = server.post(TEXT, &with(story(12), more)).ok();
        let choices = answer["choices"].as_array().expect("choices").clone();
        let indices: Vec<_> = choices.iter().map(|c| c["index"].clone()).collect();
        assert_eq!(indices, (0..choices.len()).map(|i| json!(i)).collect::<Vec<_>>());
        let text = |c: &Value| c["text"].as_str().expect("text").to_owned();
        (choices.iter().map(text).collect::<Vec<_>>(), answer["usage"].clone())
    };
    let (three, usage) = tell(json!({"n": 3, "temperature": 1, "seed": 5}));
    assert_eq!(tell(json!({"n": 3, "temperature": 1, "seed": 5})).0, three);
    assert_eq!(tell(json!({"temperature": 1, "seed": 5})).0, three[..1]);
    assert_ne!(tell(json!({"temperature": 1, "seed": 6})).0, three[..1]);
    assert!(three[0] != three[1] && three[1] != three[2] && three[0] != three[2], "{three:?}");
    let one = tell(json!({})).1["prompt_tokens"].clone();
    assert_eq!(usage["prompt_tokens"], one, "a prompt counts once");
    assert_eq!(usage["completion_tokens"], 36);

    let (greedy, _) = tell(json!({}));
    let (echoed, _) = tell(json!({"echo": true}));
    assert_eq!(echoed[0], format!("Once upon a time{}", greedy[0]));
    let (both, usage) = tell(json!({"prompt": ["Once upon a time", "The dog"], "n": 2}));
    assert_eq!(both[..2], [greedy[0].clone(), greedy[0].clone()]);
    assert_eq!(both[2], both[3]);
    assert_ne!(both[0], both[2]);
    assert_eq!(usage["completion_tokens"], 48);
    let tokens = server.post("/tokenize", &json!({"prompt": "Once upon a time"})).ok();
    assert_eq!(tokens["count"], one);
    assert_eq!(tokens["max_model_len"], 2048);
    assert_eq!(tell(json!({"prompt": tokens["tokens"]})).0, greedy);
    assert_eq!(tell(json!({"prompt": [tokens["tokens"], tokens["tokens"]]})).0.len(), 2);
    assert_eq!(tell(json!({"max_tokens": 12.0, "seed": 3.0})).0, greedy, "12.0 is a whole number");
    let bare = server
        .post("/tokenize", &json!({"prompt": "Once upon a time", "add_special_tokens": false}))
        .ok();
    let text = server.post("/detokenize", &json!({"tokens": bare["tokens"]})).ok();
    assert_eq!(text["prompt"].as_str().map(str::trim_start), Some("Once upon a time"));

    // Parts are texts, and a stream of several choices tells them apart.
    let parts = json!([{"type": "text", "text": "What is 3 plus 4?"}]);
    let question =
        with(chat(""), json!({"messages": [{"role": "user", "content": parts}], "n": 2}));
    let whole = server.post(CHAT, &question).ok();
    assert_eq!(whole["choices"][0]["message"], whole["choices"][1]["message"]);
    let mut texts = [String::new(), String::new()];
    for frame in frames(server.stream(CHAT, &with(question, json!({"stream": true})))) {
        let choice = &frame["choices"][0];
        let index = choice["index"].as_u64().expect("an index") as usize;
        texts[index].push_str(choice["delta"]["content"].as_str().unwrap_or_default());
    }
    assert!(texts.iter().all(|t| whole["choices"][0]["message"]["content"] == t.as_str()));
    // Room for the answer is what the model's length leaves.
    let long = server.post(CHAT, &with(chat("Tell me a story."), json!({"ignore_eos": true}))).ok();
    assert_eq!(long["usage"]["total_tokens"], 2048);
    assert_eq!(long["choices"][0]["finish_reason"], "length");
}

#[test]
fn log_probabilities() {
    let server = Server::start(&[]);
    let choice = |more: Value| server.post(TEXT, &with(story(6), more)).ok()["choices"][0].clone();
    let told = choice(json!({"logprobs": 3}));
    let (text, logprobs) = (told["text"].as_str().expect("text"), &told["logprobs"]);
    let tokens: Vec<&str> = logprobs["tokens"]
        .as_array()
        .expect("tokens")
        .iter()
        .map(|t| t.as_str().expect("text"))
        .collect();
    assert_eq!(tokens.concat(), text);
    let mut offset = 0;
    for (i, token) in tokens.iter().enumerate() {
        assert_eq!(logprobs["text_offset"][i], offset);
        offset += token.chars().count();
        let top = logprobs["top_logprobs"][i].as_object().expect("a map");
        assert_eq!(top.len(), 3);
        // Greedy: the token is the likeliest.
        assert_eq!(top[*token], logprobs["token_logprobs"][i]);
        assert!(top.values().all(|l| l.as_f64() <= logprobs["token_logprobs"][i].as_f64()));
    }
    assert_eq!(choice(json!({"logprobs": 0}))["logprobs"]["top_logprobs"][0], json!({}));

    // The prompt's: what was generated is as likely when it is given.
    let whole = format!("Once upon a time{text}");
    let echoed = choice(json!({"prompt": whole, "max_tokens": 0, "echo": true, "logprobs": 1}));
    assert_eq!(echoed["text"], whole);
    assert_eq!(echoed["logprobs"]["token_logprobs"][0], Value::Null);
    assert_eq!(echoed["logprobs"]["top_logprobs"][0], Value::Null);
    let all = echoed["logprobs"]["tokens"].as_array().expect("tokens").len();
    for i in 0..tokens.len() {
        let given = &echoed["logprobs"]["token_logprobs"][all - tokens.len() + i];
        // In bf16, and in one pass, whose sums are those of prompts.
        let told = logprobs["token_logprobs"][i].as_f64().expect("a number");
        assert!((given.as_f64().expect("a number") - told).abs() < 2e-2, "{given}, {told}");
    }

    // Chats tell bytes; a stream tells the same.
    let question = with(chat("What is 3 plus 4?"), json!({"logprobs": true, "top_logprobs": 2}));
    let whole = server.post(CHAT, &question).ok();
    let content = whole["choices"][0]["logprobs"]["content"].as_array().expect("content").clone();
    let mut bytes = Vec::new();
    for entry in &content {
        assert_eq!(entry["top_logprobs"].as_array().expect("a list").len(), 2);
        assert_eq!(entry["top_logprobs"][0]["token"], entry["token"]);
        bytes.extend(
            entry["bytes"].as_array().expect("bytes").iter().map(|b| b.as_u64().expect("it") as u8),
        );
    }
    assert_eq!(whole["choices"][0]["message"]["content"], String::from_utf8(bytes).expect("UTF-8"));
    let stream = frames(server.stream(CHAT, &with(question, json!({"stream": true}))));
    let streamed: Vec<Value> = stream
        .iter()
        .filter_map(|f| f["choices"][0]["logprobs"]["content"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(streamed, content);

    // A bias makes a token certain, or impossible.
    let id = server.post("/tokenize", &json!({"prompt": "7", "add_special_tokens": false})).ok();
    let id = id["tokens"].as_array().expect("ids").last().expect("one").to_string();
    let biased = with(chat("Hi"), json!({"logit_bias": {&id: 100}, "max_tokens": 3}));
    let said = server.post(CHAT, &biased).ok()["choices"][0]["message"]["content"].clone();
    assert!(said.as_str().expect("text").contains("77"), "{said}");
    // The best of several is as likely as the best.
    let best = choice(json!({"best_of": 4, "temperature": 1, "seed": 1, "logprobs": 0}));
    let all = server
        .post(TEXT, &with(story(6), json!({"n": 4, "temperature": 1, "seed": 1, "logprobs": 0})))
        .ok();
    let mean = |c: &Value| {
        let l: Vec<f64> = c["logprobs"]["token_logprobs"]
            .as_array()
            .expect("a list")
            .iter()
            .filter_map(Value::as_f64)
            .collect();
        l.iter().sum::<f64>() / l.len() as f64
    };
    let most =
        all["choices"].as_array().expect("choices").iter().map(mean).fold(f64::MIN, f64::max);
    assert!((mean(&best) - most).abs() < 1e-3);
}

#[test]
fn keys_are_asked_for() {
    let mut server = Server::launch(&["--api-key", "one", "--api-key", "two"]);
    wait("it is ready", || server.get("/health").status == 200);
    for path in ["/", "/docs", "/openapi.json", "/version", "/metrics", "/v1/models", "/nope"] {
        let answer = server.get(path);
        answer.error(401, None, Some("invalid_api_key"));
        assert!(answer.headers.get_all("www-authenticate").iter().any(|v| v == "Bearer"));
    }
    server.key = Some("three");
    server.post(CHAT, &chat("Hi")).error(401, None, Some("invalid_api_key"));
    server.key = Some("two");
    server.post(CHAT, &chat("Hi")).ok();
    assert_eq!(server.get("/v1/models").ok()["data"][0]["id"], "ember");
    assert_eq!(server.get("/").status, 200);
}

#[test]
fn a_client_that_leaves_frees_what_it_held() {
    let server = Server::start(&[]);
    for streaming in [true, false] {
        let request = with(endless(), json!({"stream": streaming, "n": 2}));
        let body = request.to_string();
        let mut socket = TcpStream::connect(("127.0.0.1", server.port)).expect("a connection");
        let head = format!(
            "POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        socket.write_all((head + &body).as_bytes()).expect("sent");
        wait("they run", || server.metric("infernum:num_requests_running") == 2.0);
        assert!(server.metric("infernum:kv_cache_usage_perc") > 0.0);
        drop(socket);
        wait("nothing runs", || server.metric("infernum:num_requests_running") == 0.0);
        assert_eq!(server.metric("infernum:num_requests_waiting"), 0.0);
    }
    let aborted = "infernum:request_success_total{model_name=\"ember\",finished_reason=\"abort\"}";
    wait("they are counted", || server.metric(aborted) == 4.0);
    assert!(server.metric("infernum:generation_tokens_total") < 4.0 * 2000.0);
}

#[test]
fn a_full_queue_says_when_to_come_back() {
    let server = Server::start(&["--max-sequences", "1", "--queue", "1"]);
    let mut first = server.stream(TEXT, &endless());
    let mut line = String::new();
    first.read_line(&mut line).expect("a line");
    let second = server.stream(TEXT, &endless());
    for request in [story(4), endless()] {
        let answer = server.post(TEXT, &request);
        answer.error(429, None, Some("queue_full"));
        assert!(answer.header("retry-after").parse::<u64>().is_ok_and(|s| s >= 1));
    }
    // What can never fit is no matter of waiting.
    server.post(TEXT, &with(story(4), json!({"n": 3}))).error(
        422,
        Some("n"),
        Some("invalid_value"),
    );
    drop((first, second));
    wait("there is room again", || server.post(TEXT, &story(4)).status == 200);
}

#[test]
fn it_drains_on_a_signal() {
    let mut server = Server::start(&[]);
    let stream = server.stream(TEXT, &with(endless(), json!({"max_tokens": 200})));
    wait("it runs", || server.metric("infernum:num_requests_running") == 1.0);
    server.signal("TERM");
    let all = frames(stream);
    wait("it listens no more", || TcpStream::connect(("127.0.0.1", server.port)).is_err());
    assert_eq!(all.last().expect("frames")["choices"][0]["finish_reason"], "length");
    assert_eq!(server.ended().code(), Some(0));

    // No longer than it may.
    let mut server = Server::start(&["--drain-timeout", "1"]);
    let stream = server.stream(TEXT, &with(endless(), json!({"n": 8})));
    server.signal("INT");
    assert_eq!(server.ended().code(), Some(0));
    drop(stream);

    // A second signal waits for nothing.
    let mut server = Server::start(&["--drain-timeout", "1000"]);
    let stream = server.stream(TEXT, &with(endless(), json!({"n": 8})));
    server.signal("TERM");
    wait("it drains", || server.get("/readyz").status == 503);
    server.signal("TERM");
    assert_eq!(server.ended().code(), Some(1));
    drop(stream);
}

#[test]
fn a_request_may_take_so_long() {
    let server = Server::start(&["--request-timeout", "1"]);
    let request = with(endless(), json!({"stream": false, "n": 16}));
    server.post(TEXT, &request).error(408, None, Some("request_timeout"));
    let all = frames(server.stream(TEXT, &with(endless(), json!({"n": 16}))));
    let (last, rest) = all.split_last().expect("frames");
    assert_eq!(last["error"]["code"], "request_timeout");
    assert!(last.get("choices").is_none() && rest.iter().all(|f| f.get("error").is_none()));
    wait("nothing runs", || server.metric("infernum:num_requests_running") == 0.0);
}

#[test]
fn several_models_and_what_operators_ask() {
    let server = Server::start(&[
        "--model",
        "a=demo",
        "--model",
        "b=demo",
        "--max-length",
        "256",
        "--metrics-compat",
        "vllm",
        "--cors-origin",
        "http://page.example",
    ]);
    let list = server.get("/v1/models").ok();
    let ids: Vec<_> = list["data"].as_array().expect("models").iter().map(|m| &m["id"]).collect();
    assert_eq!(ids, ["a", "b"]);
    assert_eq!(list["data"][0]["max_model_len"], 256);
    assert_eq!(server.get("/v1/models/b").ok()["id"], "b");
    for model in ["a", "b"] {
        let answer = server.post(TEXT, &with(story(4), json!({"model": model}))).ok();
        assert_eq!(answer["model"], model);
        let counted = format!("vllm:generation_tokens_total{{model_name=\"{model}\"}}");
        assert_eq!(server.metric(&counted), 4.0);
        let bucket = format!(
            "vllm:time_to_first_token_seconds_bucket{{model_name=\"{model}\",le=\"+Inf\"}}"
        );
        assert_eq!(server.metric(&bucket), 1.0);
        assert!(server.metric(&format!("vllm:cache_config_info{{model_name=\"{model}\"")) == 1.0);
    }
    assert_eq!(server.get("/version").ok()["version"], env!("CARGO_PKG_VERSION"));
    let api = server.get("/openapi.json").ok();
    assert!(api["paths"][CHAT]["post"].is_object());
    let schemas = &api["components"]["schemas"];
    assert_eq!(schemas["CommonFields"]["properties"]["model"]["enum"], json!(["a", "b"]));
    for path in ["/", "/docs"] {
        let page = server.get(path);
        assert!(page.status == 200 && page.text.contains("<!doctype html>"));
        assert!(!page.text.contains("https://"), "it works without network");
    }
    // Names of requests, and of fields that nobody knows.
    let answer =
        server.post(TEXT, &with(story(1), json!({"model": "a", "colour": 1, "user": "me"})));
    assert_eq!(answer.header("x-infernum-warning"), "unknown fields were ignored: colour");
    assert!(answer.header("x-request-id").starts_with("req-"));
    let request = server.agent.get(server.url("/version")).header("x-request-id", "mine");
    let request = request.header("origin", "http://page.example");
    let answer = Answer::of(request.call().expect("an answer"));
    assert_eq!(answer.header("x-request-id"), "mine");
    assert_eq!(answer.header("access-control-allow-origin"), "http://page.example");
    assert!(server.get("/version").headers.get("access-control-allow-origin").is_none());
    // A head without end.
    let mut socket = TcpStream::connect(("127.0.0.1", server.port)).expect("a connection");
    let head =
        format!("GET /version HTTP/1.1\r\nhost: localhost\r\nx-long: {}", "x".repeat(300_000));
    let _ = socket.write_all(head.as_bytes()); // it may stop reading before the end
    let mut line = String::new();
    BufReader::new(socket).read_line(&mut line).expect("a line");
    assert!(line.starts_with("HTTP/1.1 431"), "{line}");
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let fails = |args: &[&str]| {
        let output = command(args).output().expect("the binary runs");
        assert!(!output.status.success());
        String::from_utf8(output.stderr).expect("UTF-8")
    };
    assert!(fails(&["--kv", "off"]).contains("a prefix cache needs rows that are kept"));
    assert!(fails(&["--kv", "contiguous"]).contains("a prefix cache shares blocks"));
    assert!(fails(&["--policy", "lifo"]).contains("`decode_round_robin`"));
    assert!(
        fails(&["--model", "a=demo", "--model", "a=demo"]).contains("two models are named `a`")
    );
    assert!(fails(&["--model", "/no/such/folder"]).contains("/no/such/folder"));
    assert!(fails(&["--config", "/no/such/file"]).contains("/no/such/file"));
    let mut command = command(&[]);
    let output = command.env("INFERNUM_QUEUE", "many").output().expect("the binary runs");
    let text = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(text.contains("INFERNUM_QUEUE: `queue`: invalid value 'many'"), "{text}");
}
