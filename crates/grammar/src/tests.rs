use infernum_runtime::{Allowed, Next};

use super::*;

fn demo() -> Grammars {
    let tokenizer = Tokenizer::open(&infernum_frontend_hf::demo()).expect("the demo's");
    let end = tokenizer.eos_id().expect("an end");
    Grammars::new(&tokenizer, &[end])
}

fn refusal(grammars: &Grammars, grammar: &Grammar) -> String {
    grammars.compile(grammar).expect_err("refused").to_string()
}

/// A text of random tokens that a grammar lets come; none where it is cut.
fn random_text(grammars: &Grammars, grammar: &Grammar, jumps: bool, seed: u64) -> Option<String> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut cursor = grammars.compile(grammar).expect("a grammar").begin(jumps);
    let mut tokens = Vec::new();
    for _ in 0..300 {
        let Next { forced, then, .. } = cursor.next(true).expect("it was waited for");
        assert!(jumps || forced.is_empty());
        tokens.extend(forced);
        match then {
            Allowed::Nothing => break,
            Allowed::Unknown => panic!("{grammar:?}: {tokens:?}"),
            Allowed::Tokens(words) => {
                let all = (0..words.len() * 32).filter(|t| words[t / 32] >> (t % 32) & 1 == 1);
                let all: Vec<u32> = all.map(|t| t as u32).collect();
                let token = all[random.usize(..all.len())];
                if grammars.0.ends.contains(&token) {
                    break;
                }
                tokens.push(token);
                cursor.advance(token);
            }
        }
        if tokens.len() >= 300 {
            return None;
        }
    }
    Some(grammars.0.tokenizer.decode(&tokens, true).expect("text"))
}

#[test]
fn texts_are_what_their_grammar_says() {
    let grammars = demo();
    let choices = ["yes", "no", "\"maybe\"\n", "yes, but"].map(str::to_owned);
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..40 {
        for jumps in [true, false] {
            let text = random_text(&grammars, &Grammar::Choice(choices.to_vec()), jumps, seed);
            let text = text.expect("short ones");
            assert!(choices.contains(&text), "{text:?}");
            seen.insert(text);
            let date = Grammar::Regex(r"[0-9]{4}-[0-9]{2}/(a|b)".to_owned());
            let text = random_text(&grammars, &date, jumps, seed).expect("a short one");
            assert!(text.len() == 9 && &text[4..5] == "-" && &text[7..8] == "/", "{text:?}");
            let sum = Grammar::Lark("start: \"(\" start \")\" | /[0-9]/".to_owned());
            if let Some(text) = random_text(&grammars, &sum, jumps, seed) {
                assert_eq!(text.matches('(').count(), text.matches(')').count());
            }
            let gbnf = "root ::= item{2,3} end | \"\" \"-\"\nitem ::= [a-c] [^a-z\\n]* \";\"\nend ::= (\"x\" |)";
            if let Some(text) = random_text(&grammars, &Grammar::Lark(gbnf.to_owned()), jumps, seed)
            {
                let is_item = |item: &str| item.starts_with(['a', 'b', 'c']);
                let items: Vec<&str> = text.trim_end_matches('x').split_terminator(';').collect();
                let fits = (2..=3).contains(&items.iter().filter(|i| is_item(i)).count());
                assert!(text == "-" || (fits && text.ends_with(['x', ';'])), "{text:?}");
            }
            if let Some(text) = random_text(&grammars, &Grammar::JsonObject, jumps, seed) {
                let value: Value = serde_json::from_str(&text).expect(&text);
                assert!(value.is_object());
            }
        }
    }
    assert_eq!(seen.len(), choices.len());
}

#[test]
fn forced_tokens_are_those_of_the_tokenizer() {
    let grammars = demo();
    let schema = json!({"type": "object", "properties": {"the_answer": {"const": "<|im_end|>"}},
                        "required": ["the_answer"], "additionalProperties": false});
    let schema =
        Grammar::Regex(Value::to_string(&schema).replace(['{', '}', '[', ']', '|', '"'], "x"));
    let mut cursor = grammars.compile(&schema).expect("a grammar").begin(true);
    let Next { forced, then, .. } = cursor.next(true).expect("it was waited for");
    let Grammar::Regex(text) = &schema else { panic!("it is one") };
    assert_eq!(then, Allowed::Nothing);
    assert_eq!(grammars.0.tokenizer.decode(&forced, false).expect("text"), *text);
    assert!(forced.iter().all(|token| !grammars.0.tokenizer.is_special(*token)));
}

#[test]
fn what_is_hostile_is_refused_in_time() {
    let grammars = demo();
    grammars.warm().expect("a tokenizer that can be used");
    let mut deep = json!({"type": "string"});
    for _ in 0..100 {
        deep = json!({"type": "array", "items": deep});
    }
    let chain: serde_json::Map<String, Value> = (0..3000)
        .map(|i| (format!("a{i}"), json!({"$ref": format!("#/$defs/a{}", i + 1)})))
        .chain([("a3000".to_owned(), json!({"type": "null"}))])
        .collect();
    let doubled: serde_json::Map<String, Value> = (0..40)
        .map(|i| {
            let next = json!({"$ref": format!("#/$defs/b{}", i + 1)});
            (
                format!("b{i}"),
                json!({"anyOf": [{"allOf": [next, {"minLength": i}]}, next, {"type": "null"}]}),
            )
        })
        .chain([("b40".to_owned(), json!({"type": "string"}))])
        .collect();
    let any: Vec<Value> =
        (0..30).map(|i| json!({"anyOf": [{"minimum": i}, {"maxLength": i}]})).collect();
    let hostile = [
        Grammar::JsonSchema(deep),
        Grammar::JsonSchema(json!({"$ref": "#/$defs/a0", "$defs": chain})),
        Grammar::JsonSchema(json!({"$ref": "#/$defs/b0", "$defs": doubled})),
        Grammar::JsonSchema(json!({"allOf": any})),
        Grammar::JsonSchema(json!({"$ref": "#"})),
        Grammar::JsonSchema(json!({"type": "string", "pattern": "(a{1000}){1000}"})),
        Grammar::JsonSchema(json!({"type": "array", "minItems": 100_000_000})),
        Grammar::JsonSchema(json!({"type": "string", "minLength": 1_000_000_000})),
        Grammar::JsonSchema(json!({"type": "nonsense"})),
        Grammar::JsonSchema(json!([1])),
        Grammar::JsonSchema(json!({"$ref": "http://example.com/schema.json"})),
        Grammar::JsonSchema(json!({"enum": vec!["x".repeat(100); 4000]})),
        Grammar::Regex("(".repeat(5000) + &")".repeat(5000)),
        Grammar::Regex("((((a{100}){100}){100}){100})".to_owned()),
        Grammar::Regex("(a|aa)+(?=b)".to_owned()),
        Grammar::Regex("[".to_owned()),
        Grammar::Choice(Vec::new()),
        Grammar::Choice(vec![String::new()]),
        Grammar::Lark("start: ".to_owned() + &"(".repeat(20_000)),
        Grammar::Lark("start: nothing".to_owned()),
        Grammar::Lark(String::new()),
        Grammar::Lark("root ::= ".to_owned() + &"(".repeat(20_000)),
        Grammar::Lark("root ::= \"a\"{100000,200000}".to_owned()),
        Grammar::Lark("x".repeat(MOST_BYTES + 1)),
    ];
    for grammar in &hostile {
        let start = std::time::Instant::now();
        let compiled = grammars.compile(grammar);
        let took = start.elapsed();
        let shown = format!("{grammar:?}").chars().take(120).collect::<String>();
        eprintln!("{took:?} {:?} {shown}", compiled.as_ref().err());
        assert!(took < COMPILE_TIME + Duration::from_secs(2), "{took:?} {shown}");
        if let Ok(constraint) = compiled {
            // Taken: then its steps are bounded.
            let mut cursor = constraint.begin(true);
            assert!(cursor.next(true).is_some());
        }
    }
    let wrong = [
        (Grammar::JsonSchema(json!({"type": "nonsense"})), "nonsense"),
        (Grammar::Regex("[".to_owned()), "regex"),
        (Grammar::Lark("start: nothing".to_owned()), "nothing"),
        (Grammar::Lark("root ::= nothing".to_owned()), "line 1: rule `nothing`"),
    ];
    for (grammar, named) in wrong {
        let message = refusal(&grammars, &grammar);
        assert!(message.to_lowercase().contains(named) && message.len() < 2500, "{message}");
    }
}

#[test]
fn what_was_compiled_is_kept_within_bounds() {
    let grammars = demo();
    let of = |i: usize| Grammar::Choice(vec![format!("text {i}")]);
    let first = grammars.compile(&of(0)).expect("a grammar");
    let same = |a: &Arc<dyn Constraint>, b: &Arc<dyn Constraint>| Arc::ptr_eq(a, b);
    assert!(same(&first, &grammars.compile(&of(0)).expect("a grammar")));
    for i in 1..=KEPT {
        grammars.compile(&of(i)).expect("a grammar");
    }
    assert_eq!(grammars.0.kept.lock().expect("nobody panicked").len(), KEPT);
    assert!(!same(&first, &grammars.compile(&of(0)).expect("a grammar")), "it had to go");
}

/// Whether a text may begin so.
fn begins(grammars: &Grammars, grammar: &Grammar, text: &str) -> bool {
    let mut cursor = grammars.compile(grammar).expect("a grammar").begin(false);
    let tokens = grammars.0.tokenizer.encode(text, false).expect("tokens");
    tokens.iter().all(|token| {
        let Allowed::Tokens(words) = cursor.next(true).expect("it was waited for").then else {
            return false;
        };
        let may_come = words[*token as usize / 32] >> (token % 32) & 1 == 1;
        if may_come {
            cursor.advance(*token);
        }
        may_come
    })
}

#[test]
fn a_name_is_written_in_one_way() {
    let grammars = demo();
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}},
                        "additionalProperties": {"type": "string"}});
    let schema = Grammar::JsonSchema(schema);
    for (text, expected) in [
        ("{\"a\":1,", true),
        ("{\"a\":\"", false),
        ("{\"b\":\"\\n\\\"\\\\é", true),
        // Another way to write `a`: it would pass for a name that the schema does not have.
        ("{\"\\u0061\":\"", false),
        ("{\"b\":\"\\u0001", false),
    ] {
        assert_eq!(begins(&grammars, &schema, text), expected, "{text}");
    }
}
