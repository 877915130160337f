//! The APIs of Anthropic, of OpenAI's responses and of Ollama: the same answers, each in its own words.

use std::io::Read;

use serde_json::{Value, json};

use super::support::*;
use super::tools;

const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";
const OLLAMA: &str = "/api/chat";

/// Names and JSON of all events of a stream.
fn events(mut stream: impl Read) -> Vec<Value> {
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("UTF-8");
    let event = |frame: &str| {
        let (name, data) = frame.split_once("\ndata: ").expect(frame);
        let event: Value = serde_json::from_str(data).expect(data);
        assert_eq!(name.strip_prefix("event: "), event["type"].as_str(), "{frame}");
        event
    };
    text.split_terminator("\n\n").map(event).collect()
}

/// All of a text that stands under some key of events' deltas.
fn joined(events: &[Value], pointer: &str) -> String {
    events.iter().filter_map(|event| event.pointer(pointer)?.as_str()).collect()
}

/// Ends at a number of tokens, in the words of each API, and is always the same.
fn ask(path: &str, tokens: u64) -> Value {
    let mut ask = chat("Hi");
    match path {
        RESPONSES => {
            let said = json!({"input": "Hi", "max_output_tokens": tokens});
            ask = with(json!({"model": "ember", "temperature": 0}), said);
        }
        OLLAMA => ask["options"] = json!({"num_predict": tokens, "temperature": 0}),
        _ => ask["max_tokens"] = tokens.into(),
    }
    ask
}

#[test]
fn all_say_the_same() {
    let server = Server::start(&[]);
    let said = server.post(CHAT, &ask(CHAT, 5)).ok();
    let (text, usage) = (&said["choices"][0]["message"]["content"], &said["usage"]);
    let answer = server.post(MESSAGES, &ask(MESSAGES, 5)).ok();
    assert_eq!(answer["content"], json!([{"type": "text", "text": text}]));
    assert_eq!(
        (&answer["stop_reason"], &answer["stop_sequence"]),
        (&json!("max_tokens"), &Value::Null)
    );
    assert_eq!(answer["usage"]["output_tokens"], usage["completion_tokens"]);
    let stream = json!({"stream": true});
    let told = events(server.stream(MESSAGES, &with(ask(MESSAGES, 5), stream.clone())));
    assert_eq!(&json!(joined(&told, "/delta/text")), text);
    let response = server.post(RESPONSES, &ask(RESPONSES, 5)).ok();
    assert_eq!(&response["output"][0]["content"][0]["text"], text);
    assert_eq!(response["status"], "incomplete");
    assert_eq!(response["usage"]["total_tokens"], usage["total_tokens"]);
    let told = events(server.stream(RESPONSES, &with(ask(RESPONSES, 5), stream)));
    assert_eq!(&json!(joined(&told, "/delta")), text);
    let numbers: Vec<_> = told.iter().map(|event| event["sequence_number"].as_u64()).collect();
    assert_eq!(numbers, (0..told.len() as u64).map(Some).collect::<Vec<_>>());
    assert_eq!(told.last().expect("events")["type"], "response.incomplete");
    let lines = server.post(OLLAMA, &ask(OLLAMA, 5));
    assert_eq!((lines.status, lines.header("content-type")), (200, "application/x-ndjson"));
    let lines: Vec<Value> =
        lines.text.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    assert_eq!(&json!(joined(&lines, "/message/content")), text);
    let last = lines.last().expect("lines");
    assert_eq!((&last["done"], &last["done_reason"]), (&json!(true), &json!("length")));
    assert_eq!(last["prompt_eval_count"], usage["prompt_tokens"]);
    let whole = server.post(OLLAMA, &with(ask(OLLAMA, 5), json!({"stream": false}))).ok();
    assert_eq!(&whole["message"]["content"], text);
}

#[test]
fn responses_are_kept_until_they_are_deleted() {
    let server = Server::start(&["--max-responses", "2"]);
    let first = server.post(RESPONSES, &ask(RESPONSES, 4)).ok();
    let id = first["id"].as_str().expect("an id");
    let path = format!("{RESPONSES}/{id}");
    assert_eq!(server.get(&path).ok(), first);
    let more = json!({"previous_response_id": id});
    let second = server.post(RESPONSES, &with(ask(RESPONSES, 4), more.clone())).ok();
    let tokens = |of: &Value| of["usage"]["input_tokens"].as_u64();
    assert!(tokens(&second) > tokens(&first));
    let delete = || Answer::of(server.agent.delete(server.url(&path)).call().expect("an answer"));
    assert_eq!(delete().ok(), json!({"id": id, "object": "response", "deleted": true}));
    let gone = Some("response_not_found");
    delete().error(404, None, gone);
    server.get(&path).error(404, None, gone);
    let refused = server.post(RESPONSES, &with(ask(RESPONSES, 4), more));
    refused.error(404, Some("previous_response_id"), gone);
    // Two are kept: of three more, the first is gone.
    let ids: Vec<Value> =
        (0..3).map(|_| server.post(RESPONSES, &ask(RESPONSES, 1)).ok()["id"].take()).collect();
    let status =
        |id: &Value| server.get(&format!("{RESPONSES}/{}", id.as_str().expect("an id"))).status;
    assert_eq!(ids.iter().map(status).collect::<Vec<_>>(), [404, 200, 200]);
    let unkept = server.post(RESPONSES, &with(ask(RESPONSES, 1), json!({"store": false}))).ok();
    assert_eq!(status(&unkept["id"]), 404);
}

#[test]
fn calls_are_told_in_the_words_of_each() {
    let (server, _folder) = tools::server(&["qwen3"]);
    let schema = json!({"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"],
        "additionalProperties": false});
    let called = |path: &str, body: &Value, done: &dyn Fn(&Value) -> Option<(String, Value)>| {
        // Weights that know nothing of calls may go on instead.
        let found = (0..8).find_map(|seed| {
            let body =
                with(body.clone(), json!({"model": "qwen3", "temperature": 1.5, "seed": seed}));
            done(&server.post(path, &body).ok())
        });
        assert_eq!(found, Some(("f".to_owned(), json!({"city": "Oslo"}))), "{path}");
    };
    let messages = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "thinking": {"type": "disabled"},
        "tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any", "disable_parallel_tool_use": true}});
    called(MESSAGES, &messages, &|answer| {
        let call =
            answer["content"].as_array()?.last().filter(|_| answer["stop_reason"] == "tool_use")?;
        Some((call["name"].as_str()?.to_owned(), call["input"].clone()))
    });
    let responses = json!({"input": "Hi", "max_output_tokens": 200, "reasoning": {"effort": "none"}, "parallel_tool_calls": false,
        "tools": [{"type": "function", "name": "f", "parameters": schema}], "tool_choice": "required"});
    called(RESPONSES, &responses, &|answer| {
        let call =
            answer["output"].as_array()?.last().filter(|_| answer["status"] == "completed")?;
        let arguments = serde_json::from_str(call["arguments"].as_str()?).expect("JSON");
        Some((call["name"].as_str()?.to_owned(), arguments))
    });
}

#[test]
fn refusals_are_told_in_the_words_of_each() {
    let mut server = Server::start(&["--api-key", "one"]);
    let error = |server: &Server, path: &str, body: &Value| {
        let answer = server.post(path, body);
        (answer.status, answer.json())
    };
    let (status, keyless) = error(&server, MESSAGES, &ask(MESSAGES, 1));
    assert_eq!((status, &keyless["type"]), (401, &json!("error")));
    assert_eq!(keyless["error"]["type"], "authentication_error");
    let (status, keyless) = error(&server, OLLAMA, &ask(OLLAMA, 1));
    assert!(status == 401 && keyless["error"].is_string(), "{keyless}");
    let bare = server.agent.post(server.url(MESSAGES)).header("x-api-key", "one");
    let bare = bare.header("content-type", "application/json");
    let bare = bare.send(ask(MESSAGES, 1).to_string()).expect("an answer");
    assert_eq!(bare.status(), 200);
    assert!(bare.headers().contains_key("request-id"));
    server.key = Some("one");
    let missing = with(chat("Hi"), json!({}));
    let (status, answer) = error(&server, MESSAGES, &missing);
    assert_eq!(status, 400);
    let expected = json!({"type": "invalid_request_error", "message": "max_tokens: is missing"});
    assert_eq!(answer, json!({"type": "error", "error": expected}));
    let image =
        json!({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]});
    let (status, answer) = error(&server, MESSAGES, &with(ask(MESSAGES, 1), image));
    assert_eq!((status, &answer["error"]["type"]), (422, &json!("invalid_request_error")));
    let robot = json!({"messages": [{"role": "user", "content": "x", "images": ["AA=="]}]});
    let (status, answer) = error(&server, OLLAMA, &with(ask(OLLAMA, 1), robot));
    assert!(status == 422 && answer["error"].is_string(), "{answer}");
    let none = json!({"model": "none"});
    assert_eq!(error(&server, OLLAMA, &with(ask(OLLAMA, 1), none.clone())).0, 404);
    let (status, answer) = error(&server, MESSAGES, &with(ask(MESSAGES, 1), none));
    assert_eq!((status, &answer["error"]["type"]), (404, &json!("not_found_error")));
    server.post(RESPONSES, &with(ask(RESPONSES, 1), json!({"background": true}))).error(
        422,
        Some("background"),
        Some("unsupported_value"),
    );
}
