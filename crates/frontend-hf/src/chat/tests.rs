use serde_json::json;

use super::*;

fn template(text: &str) -> ChatTemplate {
    ChatTemplate::parse(text, SpecialTokens::default()).unwrap()
}

fn render(text: &str, context: Json) -> Result<String, ChatError> {
    let Json::Object(extra) = context else { panic!("an object") };
    template(text).render(&[Message::new("user", "hi")], &RenderOptions { extra, ..<_>::default() })
}

#[test]
fn blocks_leave_no_blank_lines() {
    let text = "{% for m in messages %}\n  {% if true %}\n{{ m.role }}: {{ m['content'] }}\n  {% endif %}\n{% endfor %}\n{%- if add_generation_prompt %}\nA:{% endif %}\n";
    let messages = [Message::new("user", "<a&b>"), Message::new("assistant", "é")];
    let options = RenderOptions { add_generation_prompt: true, ..<_>::default() };
    assert_eq!(
        template(text).render(&messages, &options).unwrap(),
        "user: <a&b>\nassistant: é\nA:"
    );
}

/// The text ends where the last message's does; a template that trims that has it trimmed.
#[test]
fn the_last_message_is_gone_on_with() {
    let options = RenderOptions { continue_final_message: true, ..<_>::default() };
    let chat = |content: Json| {
        let Json::Object(last) = json!({"role": "assistant", "content": content}) else { panic!() };
        [Message::new("user", "hi"), Message(last)]
    };
    let plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}";
    let trims = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}";
    let parts = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}<end>{% endfor %}";
    let cases = [
        (plain, json!("It is "), "<user>hi<end><assistant>It is "),
        (plain, json!(""), "<user>hi<end><assistant>"),
        (trims, json!(" It is "), "<user>hi<end><assistant>It is"),
        (
            parts,
            json!([{"type": "text", "text": "It"}, {"type": "text", "text": " is"}]),
            "<user><end><assistant>It is",
        ),
    ];
    for (text, content, expected) in cases {
        assert_eq!(template(text).render(&chat(content), &options).unwrap(), expected, "{text}");
    }
    let silent = "{% for m in messages %}<{{ m.role }}>{% endfor %}";
    for (text, content) in [(silent, json!("It is")), (plain, json!(null)), (plain, json!([]))] {
        let error = template(text).render(&chat(content), &options).unwrap_err();
        assert!(error.to_string().contains("gone on with"), "{error}");
    }
}

#[test]
fn python_is_spoken() {
    // Expectations are what jinja2 3.1.6 prints.
    let cases = [
        ("{{ x.strip().split(',')[0].upper() }}", "A"),
        ("{{ none }} {{ true }} {{ 1.0 }} {{ [1, 'a'] }}", "None True 1.0 [1, 'a']"),
        ("{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "z=1;a=2;"),
        ("{{ d | tojson }}", r#"{"z": 1, "a": 2}"#),
        ("{{ d | tojson(indent=2) }}", "{\n  \"z\": 1,\n  \"a\": 2\n}"),
        ("{{ d | tojson(separators=(',', ':'), sort_keys=True) }}", r#"{"a":2,"z":1}"#),
        ("{{ 'é' | tojson }}{{ 'é' | tojson(ensure_ascii=True) }}", r#""é""\u00e9""#),
        ("{{ '<>' | tojson }}", r#""<>""#),
        (
            "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
            "3",
        ),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% if y is not defined %}no{% endif %}{{ y }}", "no"),
        ("{% if 'tool' in 'tools' and x is string %}yes{% endif %}", "yes"),
        ("{{ messages[0].content[::-1] }}{{ messages[-1]['role'] }}", "ihuser"),
        (
            "{{ none is iterable }}{{ x is sequence }}{{ d is iterable }}{{ 1 is sequence }}",
            "FalseTrueTrueFalse",
        ),
        ("{{ 1e-5 }} {{ 1e20 }} {{ 0.5 }}", "1e-05 1e+20 0.5"),
        ("{{ 'a-b'.removeprefix('a').removesuffix('c') }}", "-b"),
        ("{{ d.get('q', 'none') }}{{ 'a' ~ 1 }}", "nonea1"),
    ];
    for (text, expected) in cases {
        let context = json!({"x": " a,b ", "d": {"z": 1, "a": 2}});
        assert_eq!(render(text, context).unwrap(), expected, "{text}");
    }
}

#[test]
fn generation_blocks_print_their_body() {
    let text = "{% for m in messages %}\n{%- generation -%}\n  {{ m.content }}\n{%- endgeneration %}\n{% generation %}\nx\n{% endgeneration %}\n{% endfor %}";
    assert_eq!(render(text, json!({})).unwrap(), "hix\n");
}

#[test]
fn the_clock_can_be_set() {
    let now = Some(jiff::civil::date(2024, 7, 26).at(9, 5, 0, 0));
    let options = RenderOptions { now, ..<_>::default() };
    let t = template("{{ strftime_now('%d %b %Y %H:%M') }}{{ strftime_now('%Y-%m-%d') }}");
    assert_eq!(t.render(&[], &options).unwrap(), "26 Jul 2024 09:052024-07-26");
    assert!(matches!(
        template("\n{{ strftime_now('%') }}").render(&[], &options),
        Err(ChatError::Render { line: 2, .. })
    ));
}

#[test]
fn refusals_and_failures_differ() {
    let refused = render("{{ raise_exception('roles must alternate') }}", json!({})).unwrap_err();
    assert!(
        matches!(&refused, ChatError::Refused { message } if message == "roles must alternate")
    );
    let nested = "{% macro m() %}{{ raise_exception('no') }}{% endmacro %}{{ m() }}";
    assert!(matches!(render(nested, json!({})), Err(ChatError::Refused { .. })));
    assert!(matches!(
        render("a\n{{ nothing.at.all }}", json!({})),
        Err(ChatError::Render { line: 2, .. })
    ));
    let syntax = ChatTemplate::parse("a\n\n{% if %}", SpecialTokens::default()).unwrap_err();
    assert!(
        syntax.to_string().starts_with("chat_template.jinja: line 3: syntax error"),
        "{syntax}"
    );
}

#[test]
fn hostile_templates_end() {
    let cases = [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% set x = i %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% set x = 'x' * 1000000 %}{% for i in range(9999) %}{{ x }}{% endfor %}",
        "{{ 'x' * 100000000000 }}",
        "{% include 'default' %}",
    ];
    for text in cases {
        assert!(render(text, json!({})).is_err(), "{text}");
    }
}

#[test]
fn reasoning_is_passed_under_each_name() {
    let t = template("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}");
    for name in ["reasoning_content", "thinking", "reasoning"] {
        let message: Message = serde_json::from_value(json!({"role": "a", name: "R"})).unwrap();
        assert_eq!(t.render(&[message], &RenderOptions::default()).unwrap(), "RR");
    }
}

#[test]
fn templates_are_found_where_models_keep_them() {
    let ask = |files| -> Result<String, ChatError> {
        let tools = RenderOptions { tools: Some(vec![]), ..<_>::default() };
        let chat = ChatTemplate::open(&ModelFiles::embedded("m", files))?;
        Ok(chat.render(&[], &RenderOptions::default())? + "|" + &chat.render(&[], &tools)?)
    };
    let file = ask(&[
        ("chat_template.jinja", b"{{ bos_token }}file{{ eos_token }}"),
        (
            "tokenizer_config.json",
            br#"{"chat_template": "other", "bos_token": "<s>", "eos_token": {"content": "</s>"}}"#,
        ),
    ]);
    assert_eq!(file.unwrap(), "<s>file</s>|<s>file</s>");
    let one = ask(&[("tokenizer_config.json", br#"{"chat_template": "one", "bos_token": null}"#)]);
    assert_eq!(one.unwrap(), "one|one");
    let list = ask(&[(
        "tokenizer_config.json",
        br#"{"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}"#,
    )]);
    assert_eq!(list.unwrap(), "d|t");
    let missing = ask(&[("tokenizer_config.json", b"{}")]).unwrap_err().to_string();
    assert!(missing.starts_with("m: has no chat template"), "{missing}");
    let invalid = ask(&[("tokenizer_config.json", br#"{"chat_template": [{"name": "x"}]}"#)]);
    assert!(matches!(invalid, Err(ChatError::Invalid { .. })));
}
