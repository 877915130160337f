//! Texts that are held to schemas, expressions, choices and grammars.

use serde_json::{Value, json};

use super::support::*;

const WILD: f64 = 2.0;

type Check<'a> = &'a dyn Fn(&str);

fn person() -> Value {
    json!({"type": "object", "additionalProperties": false, "required": ["name", "age"], "properties":
        {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}}})
}

fn is_person(text: &str) {
    let value: Value = serde_json::from_str(text).expect(text);
    assert!(value["name"].is_string() && value["age"].as_u64().is_some_and(|n| n <= 120), "{text}");
}

#[test]
fn texts_are_held_to_what_is_asked_in_every_way() {
    let server = Server::start(&[]);
    let format = json!({"type": "json_schema", "json_schema": {"name": "p", "strict": true, "schema": person()}});
    let (is_choice, is_date) = (
        |text: &str| assert!(["yes", "no"].contains(&text), "{text}"),
        |text: &str| assert!(text.len() == 7 && &text[4..5] == "-", "{text}"),
    );
    let is_object =
        |text: &str| assert!(serde_json::from_str::<Value>(text).expect(text).is_object());
    let cases: [(Value, Check<'_>); 10] = [
        (json!({"response_format": format}), &is_person),
        (json!({"response_format": {"type": "json_object"}}), &is_object),
        (json!({"guided_json": person()}), &is_person),
        (json!({"guided_json": person().to_string()}), &is_person),
        (json!({"guided_regex": "[0-9]{4}-[0-9]{2}"}), &is_date),
        (json!({"guided_choice": ["yes", "no"]}), &is_choice),
        (json!({"guided_grammar": "start: \"yes\" | \"no\""}), &is_choice),
        (json!({"structured_outputs": {"json": person()}}), &is_person),
        (
            json!({"structured_outputs": {"choice": ["yes", "no"]}, "response_format": {"type": "text"}}),
            &is_choice,
        ),
        (json!({"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}}), &is_date),
    ];
    for (i, (fields, check)) in cases.iter().enumerate() {
        let more = json!({"temperature": WILD, "seed": i, "max_tokens": 300, "n": 3});
        for (path, request) in [(TEXT, story(1)), (CHAT, chat("Hi"))] {
            let request = with(with(request, more.clone()), fields.clone());
            let answer = server.post(path, &request).ok();
            for choice in answer["choices"].as_array().expect("choices") {
                let text = choice["text"].as_str().or(choice["message"]["content"].as_str());
                if choice["finish_reason"] == "stop" {
                    check(text.expect("a text"));
                }
            }
            let ended = |c: &&Value| c["finish_reason"] == "stop";
            let all = answer["choices"].as_array().expect("choices");
            // An object may have any keys, without end.
            let bounded = fields["response_format"]["type"] != "json_object";
            assert!(!bounded || all.iter().any(|c| ended(&c)), "{fields}: {answer}");
        }
    }
}

#[test]
fn streams_log_probabilities_and_stops_go_with_a_schema() {
    let server = Server::start(&[]);
    let ask = with(
        chat("Hi"),
        json!({"temperature": WILD, "seed": 3, "max_tokens": 300, "guided_json": person()}),
    );
    let plain = server.post(CHAT, &ask).ok();
    let whole = plain["choices"][0]["message"]["content"].as_str().expect("text");
    is_person(whole);
    let streamed = frames(server.stream(CHAT, &with(ask.clone(), json!({"stream": true}))));
    let deltas = streamed.iter().filter_map(|f| f["choices"][0]["delta"]["content"].as_str());
    assert_eq!(deltas.collect::<String>(), whole);
    // What a grammar forces is picked where log-probabilities are told: each token has one.
    let told =
        server.post(CHAT, &with(ask.clone(), json!({"logprobs": true, "top_logprobs": 2}))).ok();
    let choice = &told["choices"][0];
    let content = choice["logprobs"]["content"].as_array().expect("tokens");
    let spelt: String = content.iter().filter_map(|t| t["token"].as_str()).collect();
    let text = choice["message"]["content"].as_str().expect("text");
    is_person(text);
    assert_eq!(spelt.trim_start(), text.trim_start());
    assert!(content.iter().any(|t| t["logprob"] == 0.0), "some token is the only one");
    let stopped = server.post(CHAT, &with(ask.clone(), json!({"stop": [":"]}))).ok();
    let text = stopped["choices"][0]["message"]["content"].as_str().expect("text");
    assert!(!text.contains(':') && whole.starts_with(text), "{text}");
    let cut = server.post(CHAT, &with(ask, json!({"max_tokens": 3}))).ok();
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
    assert!(whole.starts_with(cut["choices"][0]["message"]["content"].as_str().expect("text")));
}

#[test]
fn a_grammar_that_cannot_be_is_refused_with_its_reason() {
    let server = Server::start(&[]);
    let code = Some("invalid_grammar");
    let deep = (0..90).fold(json!({}), |inner, _| json!({"type": "array", "items": inner}));
    for (path, request) in [(TEXT, story(2)), (CHAT, chat("Hi"))] {
        let ask = |more: Value| server.post(path, &with(request.clone(), more));
        ask(json!({"guided_json": {"type": "nonsense"}})).error(400, Some("guided_json"), code);
        ask(json!({"guided_json": deep})).error(400, Some("guided_json"), code);
        ask(json!({"guided_json": 3})).error(400, Some("guided_json"), code);
        ask(json!({"guided_json": "{"})).error(400, Some("guided_json"), None);
        ask(json!({"guided_regex": "("})).error(400, Some("guided_regex"), code);
        ask(json!({"guided_choice": []})).error(400, Some("guided_choice"), code);
        ask(json!({"guided_grammar": "root ::= x"})).error(400, Some("guided_grammar"), code);
        ask(json!({"structured_outputs": {"regex": "["}})).error(
            400,
            Some("structured_outputs"),
            code,
        );
        ask(json!({"structured_outputs": {"regex": 3}})).error(
            400,
            Some("structured_outputs.regex"),
            None,
        );
        ask(json!({"response_format": {"type": "xml"}})).error(
            400,
            Some("response_format.type"),
            None,
        );
        ask(json!({"response_format": {"type": "json_schema"}})).error(
            400,
            Some("response_format.json_schema"),
            None,
        );
        let format = json!({"type": "json_schema", "json_schema": {"schema": {"minItems": "x"}}});
        ask(json!({"response_format": format})).error(400, Some("response_format"), code);
        let two = json!({"guided_regex": "a", "guided_choice": ["a"]});
        ask(two).error(400, Some("guided_choice"), None);
    }
}
