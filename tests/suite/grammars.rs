//! The demo model at a temperature at which it knows nothing, held to random schemas: whatever ends is JSON that its
//! schema admits, and whatever is cut began as such.

use std::collections::HashMap;
use std::ops::ControlFlow;

use infernum::{
    Capacity, Engine, EngineOptions, Event, FinishReason, Frontend, Grammar, Loader, Machine,
    ModelOptions, PlanExecutor, Request, RequestId, RunOptions, SamplingParams,
};
use infernum_ir::random::{self, Rng};
use serde_json::{Value, json};

/// Texts, unless `INFERNUM_GENERATIONS` says another number.
const TEXTS: usize = 300;
/// Sequences that run together.
const TOGETHER: usize = 16;

fn ember() -> (Frontend, Engine<Box<dyn PlanExecutor>>) {
    let (options, run) = (ModelOptions::default(), RunOptions::default());
    let model = options.open().expect("the demo model");
    let machine = Machine::Cpu;
    let loader = Loader::new(&model, &options.compile, &run, &machine);
    let capacity = Capacity::new(TOGETHER as u64, 320);
    let engine = loader.start(capacity, EngineOptions::default()).expect("an engine");
    (Frontend::open(&model).expect("its text side"), engine)
}

/// A random schema, of which some text is short.
fn schema(random: &mut Rng, depth: usize) -> Value {
    let kinds = if depth == 0 { 11 } else { 17 };
    match random.usize(..kinds) {
        0 => json!({"type": "null"}),
        1 => json!({"type": "boolean"}),
        2 => json!({"type": "integer"}),
        3 => json!({"type": "integer", "minimum": -5, "maximum": 12 + random.usize(..500)}),
        4 => json!({"type": "number", "exclusiveMinimum": 0.5, "maximum": 99.75}),
        5 => json!({"type": "string", "maxLength": 1 + random.usize(..30)}),
        6 => json!({"type": "string", "pattern": "^[a-c]{2,5}(-[0-9]+)?$"}),
        7 => {
            let format = ["date", "uuid", "ipv4", "time"][random.usize(..4)];
            json!({"type": "string", "format": format})
        }
        8 => json!({"enum": ["red", 1, null, 2.5, "a \"b\" é\n", [1, {"x": false}]]}),
        9 => json!({"const": {"fixed": ["text", 17, {"deep": true}]}}),
        10 => json!({"type": ["string", "null"], "minLength": 2, "maxLength": 9}),
        11 | 12 => {
            let (least, more) = (random.usize(..3), random.usize(..3));
            let items = schema(random, depth - 1);
            json!({"type": "array", "items": items, "minItems": least, "maxItems": least + more})
        }
        13 => json!({"anyOf": [schema(random, depth - 1), schema(random, depth - 1)]}),
        14 => {
            let first = [schema(random, depth - 1), schema(random, depth - 1)];
            json!({"type": "array", "prefixItems": first, "items": false, "minItems": 2})
        }
        _ => object(random, depth),
    }
}

fn object(random: &mut Rng, depth: usize) -> Value {
    let names = ["name", "age", "a key with spaces", "é\"", "tags", "x"];
    let count = 1 + random.usize(..4);
    let of = |random: &mut Rng, name: &&str| (name.to_string(), schema(random, depth - 1));
    let properties: serde_json::Map<String, Value> =
        names[..count].iter().map(|name| of(random, name)).collect();
    let required: Vec<&str> =
        names[..count].iter().copied().filter(|_| random.usize(..3) > 0).collect();
    let mut schema = json!({"type": "object", "properties": properties, "required": required});
    schema["additionalProperties"] = match random.usize(..4) {
        0 => json!({"type": "integer"}),
        _ => json!(false),
    };
    schema
}

/// A schema for a whole text: some refer to themselves.
fn whole(random: &mut Rng) -> Value {
    if random.usize(..8) > 0 {
        return schema(random, 3);
    }
    let tree = json!({"type": "object", "additionalProperties": false, "required": ["value"], "properties":
        {"value": schema(random, 1), "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}}});
    json!({"$ref": "#/$defs/tree", "$defs": {"tree": tree}})
}

/// What a text was asked for.
struct Asked {
    schema: Value,
    tokens: Vec<u32>,
}

#[test]
fn whatever_ends_is_what_its_schema_admits() {
    let wanted =
        std::env::var("INFERNUM_GENERATIONS").map_or(TEXTS, |n| n.parse().expect("a number"));
    let (frontend, mut engine) = ember();
    frontend.grammars().warm().expect("a tokenizer that can be used");
    let mut random = random::named("schemas", 1);
    let mut live: HashMap<RequestId, Asked> = HashMap::new();
    let (mut asked, mut ended, mut cut, mut times) = (0, 0, 0, Vec::new());
    while asked < wanted || !live.is_empty() {
        while asked < wanted && live.len() < TOGETHER {
            let schema = whole(&mut random);
            let grammar = Grammar::JsonSchema(schema.clone());
            let constraint = frontend.grammars().compile(&grammar);
            let constraint = constraint.unwrap_or_else(|e| panic!("{e}: {schema}"));
            let request = Request {
                max_tokens: 200,
                sampling: SamplingParams {
                    temperature: 2.0,
                    seed: asked as u64,
                    ..SamplingParams::default()
                },
                constraint: Some(constraint),
                // With and without forced tokens.
                logprobs: (asked % 4 == 0).then_some(1),
                ..frontend.prompt("Once upon a time").expect("tokens")
            };
            let id = engine.submit(request).expect("a request");
            live.insert(id, Asked { schema, tokens: Vec::new() });
            asked += 1;
        }
        let drove = engine.drive(|engine, events| {
            let mut flow = ControlFlow::Continue(());
            times.extend_from_slice(engine.mask_times());
            for event in events {
                match event {
                    Event::Token(id, token, _) => {
                        live.get_mut(&id).expect("one that lives").tokens.push(token);
                    }
                    Event::Finished(id, reason) => {
                        let Asked { schema, tokens } = live.remove(&id).expect("one that lives");
                        let decoded = frontend.tokenizer().decode(&tokens, true).expect("text");
                        match reason {
                            FinishReason::Stop => check(&schema, &decoded),
                            FinishReason::Length => cut += 1,
                            _ => panic!("{reason:?}: {schema} {decoded}"),
                        }
                        ended += usize::from(reason == FinishReason::Stop);
                        flow = ControlFlow::Break(());
                    }
                    _ => {}
                }
            }
            flow
        });
        drove.expect("steps");
    }
    let stats = engine.stats();
    times.sort_unstable();
    let percentile = |of: usize| times.get(times.len() * of / 100);
    eprintln!(
        "{asked} texts: {ended} ended, {cut} cut; {} tokens picked, {} forced; rows left out of a step: {:.2} %; \
         masks: P50 {:?}, P99 {:?}",
        stats.constrained,
        stats.forced,
        100.0 * stats.awaited as f64 / (stats.constrained + stats.awaited) as f64,
        percentile(50),
        percentile(99)
    );
    assert_eq!(ended + cut, asked);
    assert!(ended * 10 > asked * 7 && stats.forced > 0, "{ended} of {asked}, {stats:?}");
}

fn check(schema: &Value, text: &str) {
    let value: Value =
        serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text:?} of {schema}"));
    let options = jsonschema::options().should_validate_formats(true);
    let validator = options.build(schema).expect("a schema");
    if let Err(error) = validator.validate(&value) {
        panic!("{error}: {text} of {schema}");
    }
}
