//! Engines and front ends in processes of their own.

mod adapters;

use std::io::{BufRead, Read};
use std::process::Command;
use std::time::{Duration, Instant};

use infernum_link::{Address, Secret, ToEngine, frame, handshake};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::engines::*;
use super::support::*;

/// What an answer says, without what differs each time.
fn said(answer: &Value) -> (Value, Value) {
    (answer["choices"].clone(), answer["usage"].clone())
}

#[test]
fn answers_are_those_of_one_process() {
    // In f32, where a token does not depend on what is computed beside it.
    let exact = ["--dtype", "f32"];
    let engine = Engine::start(&exact);
    let (alone, apart) = (Server::start(&exact), front_end(&[&engine], &[]));
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["age"],
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}}});
    let wild = json!({"temperature": 1.5, "seed": 7, "n": 3, "max_tokens": 40});
    let requests = [
        (TEXT, story(40)),
        (CHAT, chat("What is 3 plus 4?")),
        (TEXT, with(story(40), wild.clone())),
        (TEXT, with(story(30), json!({"logprobs": 3, "echo": true, "stop": ["fox", "the"]}))),
        (
            CHAT,
            with(chat("Hi"), json!({"logprobs": true, "top_logprobs": 5, "prompt_logprobs": 2})),
        ),
        (TEXT, with(story(40), json!({"logit_bias": {"17": 5.0}, "frequency_penalty": 0.5}))),
        (TEXT, with(with(story(60), wild.clone()), json!({"guided_json": schema}))),
        (CHAT, with(with(chat("Hi"), wild), json!({"guided_choice": ["yes", "no"]}))),
    ];
    for (path, request) in &requests {
        let mut both = [&alone, &apart].map(|server| said(&server.post(path, request).ok()));
        for (_, usage) in &mut both {
            // One server may have seen more of these prompts than the other.
            usage["prompt_tokens_details"] = Value::Null;
        }
        assert_eq!(both[0], both[1], "{request}");
        let stream = with(request.clone(), json!({"stream": true}));
        let joined = [&alone, &apart].map(|server| {
            let all = frames(server.stream(path, &stream));
            let mut texts = vec![String::new(); 3];
            for choice in all.iter().filter_map(|f| f["choices"].get(0)) {
                let index = choice["index"].as_u64().expect("an index") as usize;
                let text = choice["text"].as_str().or(choice["delta"]["content"].as_str());
                texts[index].push_str(text.unwrap_or_default());
            }
            texts
        });
        assert_eq!(joined[0], joined[1], "{request}");
    }
    // What is wrong is told in the same words, by whichever side finds it.
    for (path, request) in [
        (TEXT, with(story(4), json!({"guided_json": {"type": "nothing"}}))),
        (TEXT, with(story(4), json!({"temperature": 9}))),
        (CHAT, chat(&"word ".repeat(9000))),
    ] {
        let both = [&alone, &apart].map(|server| server.post(path, &request));
        assert_eq!((both[0].status, &both[0].text), (both[1].status, &both[1].text));
        assert!((400..500).contains(&both[0].status));
    }
    assert_eq!(
        alone.get("/api/tags").json()["models"][0]["details"],
        apart.get("/api/tags").json()["models"][0]["details"]
    );
    let tokens = ["prompt_tokens_total", "prefix_cache_queries_total"];
    for name in tokens {
        let both = [&alone, &apart].map(|server| server.metric(&format!("infernum:{name}{{")));
        assert_eq!(both[0], both[1], "{name}");
    }
    assert!(apart.metric("infernum:step_seconds_count{") > 0.0);
    assert_eq!(apart.metric("infernum:malformed_messages_total{"), 0.0);
    idle("nothing is left", &apart);
}

#[test]
fn vectors_and_scores_come_through_a_socket() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/vectors");
    let scores = json!({"query": "a b", "documents": ["c d e", "f", "a b"]});
    for (model, path, request, field) in [
        ("qwen2_mean", "/v1/embeddings", json!({"input": ["a b", "c d e", "f"]}), "data"),
        ("bert_pairs", "/v1/rerank", scores, "results"),
    ] {
        let model = format!("m={folder}/{model}");
        let engine = Engine::start(&["--model", &model, "--dtype", "f32"]);
        let apart = front_end(&[&engine], &[]);
        let alone = Server::start(&["--model", &model, "--dtype", "f32"]);
        let both = [&alone, &apart].map(|server| server.post(path, &request).ok()[field].clone());
        assert_eq!(both[0], both[1]);
        assert_eq!(both[0].as_array().map(Vec::len), Some(3), "{}", both[0]);
        assert_eq!(apart.post(TEXT, &json!({"prompt": "x"})).status, 400);
        idle("nothing is left", &apart);
    }
}

#[test]
fn a_client_that_goes_away_ends_its_request_only() {
    let engine = Engine::start(&["--max-sequences", "2"]);
    let server = front_end(&[&engine], &[]);
    let mut streams: Vec<_> = (0..2).map(|_| server.stream(TEXT, &endless())).collect();
    streams.iter_mut().for_each(|stream| {
        let mut line = String::new();
        stream.read_line(&mut line).expect("a line");
    });
    wait("both run", || load(&server)[0] == 2.0);
    streams.pop();
    wait("one is left", || load(&server)[0] == 1.0);
    server.post(TEXT, &story(4)).ok();
    drop(streams);
    idle("all have ended", &server);
}

#[test]
fn a_front_end_that_dies_ends_its_requests_only() {
    let engine = Engine::start(&[]);
    let stays = front_end(&[&engine], &[]);
    let expected = stays.post(TEXT, &story(60)).ok();
    for _ in 0..4 {
        let mut kept = stays.stream(TEXT, &endless());
        let mut dies = front_end(&[&engine], &[]);
        let streams: Vec<_> = (0..4).map(|_| dies.stream(TEXT, &endless())).collect();
        // One whose grammar may still be compiled.
        let schema = json!({"guided_regex": "(a|b){1,400}", "stream": true, "max_tokens": 2000});
        let constrained = dies.stream(TEXT, &with(story(1), schema));
        wait("they run", || load(&stays)[0] >= 5.0);
        dies.signal("KILL");
        dies.ended();
        drop((streams, constrained));
        wait("its requests are gone", || load(&stays)[0] <= 1.0);
        let mut line = String::new();
        kept.read_line(&mut line).expect("it goes on");
        assert!(line.starts_with("data: {"), "{line}");
        drop(kept);
        assert_eq!(said(&stays.post(TEXT, &story(60)).ok()).0, said(&expected).0);
        idle("no block of the cache is held", &stays);
    }
}

#[test]
fn an_engine_that_dies_fails_its_requests_and_is_found_again() {
    let mut engine = Engine::start(&[]);
    let server = front_end(&[&engine], &[]);
    let expected = server.post(TEXT, &story(40)).ok();
    let mut before = 0.0;
    let mut recovered = Vec::new();
    for _ in 0..3 {
        let streams: Vec<_> = (0..3).map(|_| server.stream(TEXT, &endless())).collect();
        let whole = std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let request = with(story(2000), json!({"ignore_eos": true}));
                server.post(TEXT, &request)
            });
            wait("all run", || load(&server)[0] == 4.0);
            engine.kill();
            waits.join().expect("an answer")
        });
        whole.error(503, None, Some("engine_gone"));
        for mut stream in streams {
            let mut text = String::new();
            stream.read_to_string(&mut text).expect("it ends");
            assert_eq!(text.matches("\"error\"").count(), 1, "{text}");
            assert!(text.contains("the model's engine has stopped"), "{text}");
        }
        server.post(TEXT, &story(4)).error(503, None, Some("engine_gone"));
        server.get("/health").error(503, None, Some("engine_gone"));
        assert_eq!(server.get("/livez").status, 200, "a new start of the front end mends nothing");
        assert_eq!(load(&server), [0.0; 3]);
        engine.restart();
        let start = Instant::now();
        wait("it is found again", || server.get("/health").status == 200);
        recovered.push(start.elapsed());
        assert_eq!(said(&server.post(TEXT, &story(40)).ok()).0, said(&expected).0);
        let now = server.metric("infernum:prefix_cache_queries_total{");
        assert!(now > before, "counters count on: {now} after {before}");
        before = now;
    }
    recovered.sort_unstable();
    println!("found again, from the start of the engine: {recovered:?}");
    idle("nothing is left", &server);
}

#[test]
fn a_front_end_shares_its_requests_among_engines() {
    let mut engines = [Engine::start(&[]), Engine::start(&[])];
    let [one, two] = &engines;
    let both = front_end(&[one, two], &[]);
    let each = [front_end(&[one], &[]), front_end(&[two], &[])];
    // Prompts that begin alike go to one engine, which knows their beginning.
    let prompt = |kind: usize, end: usize| {
        let begin = format!("Story {kind}. ").repeat(12);
        with(story(2), json!({"prompt": format!("{begin} It ended {end} times.")}))
    };
    for kind in 0..16 {
        let found = (0..3).map(|end| {
            let answer = both.post(TEXT, &prompt(kind, end)).ok();
            answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number")
        });
        let found: Vec<u64> = found.collect();
        assert!(found[1] > 0 && found[2] > 0, "{kind}: {found:?}");
    }
    let queries = each.each_ref().map(|s| {
        wait("it heard of it", || s.metric("infernum:prefix_cache_queries_total{") > 0.0);
        s.metric("infernum:prefix_cache_queries_total{")
    });
    assert!(queries.iter().all(|n| *n > 0.0), "both have some: {queries:?}");
    // Many at once are spread.
    let streams: Vec<_> = (0..8).map(|_| both.stream(TEXT, &endless())).collect();
    wait("all run", || load(&both)[0] == 8.0);
    wait("each has its share", || each.iter().all(|s| (3.0..=5.0).contains(&load(s)[0])));
    // One that is gone takes its requests with it, and no others.
    engines[0].kill();
    wait("the rest goes on", || (3.0..=5.0).contains(&load(&both)[0]));
    assert_eq!(both.get("/health").status, 200);
    (0..4).for_each(|end| drop(both.post(TEXT, &prompt(end, 9)).ok()));
    drop(streams);
    idle("nothing is left", &both);
}

#[test]
fn one_front_end_serves_the_models_of_several_engines() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/vectors");
    let vectors = format!("vectors={folder}/qwen2_mean");
    let [mut one, two, mut other, mut late] = [
        Engine::start(&["--model", "story=demo"]),
        Engine::start(&["--model", "story=demo"]),
        Engine::start(&["--model", &vectors]),
        Engine::start(&["--model", "late=demo"]),
    ];
    late.kill();
    let server = front_end_of(&[&one, &two, &other, &late], &[], 3);
    let names = || {
        let list = server.get("/v1/models").ok();
        let names = list["data"].as_array().expect("a list").iter();
        names.map(|m| m["id"].as_str().expect("a name").to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(), ["story", "vectors"], "in the order of their engines");
    let named = |name: &str, request: Value| with(request, json!({"model": name}));
    let told = |name: &str| server.post(TEXT, &named(name, story(20)));
    let embedded = || server.post("/v1/embeddings", &json!({"model": "vectors", "input": "a b"}));
    let (said_first, vector) = (said(&told("story").ok()), embedded().ok()["data"].clone());
    told("late").error(404, Some("model"), Some("model_not_found"));
    server.post(TEXT, &json!({"prompt": "x"})).error(400, Some("model"), None);
    assert_eq!(server.post(TEXT, &named("vectors", story(4))).status, 400, "it does not generate");
    // One that comes later has its model served from then on.
    late.restart();
    wait("it is found", || names() == ["story", "vectors", "late"]);
    assert_eq!(said(&told("late").ok()).0, said_first.0);
    let described = server.get("/openapi.json").ok();
    let field = &described["components"]["schemas"]["CommonFields"]["properties"]["model"];
    assert_eq!(field["enum"], json!(["story", "vectors", "late"]));
    // The death of one is that of its model alone, and of a model with two engines it is none.
    let mut runs = server.stream(TEXT, &named("late", endless()));
    let mut line = String::new();
    runs.read_line(&mut line).expect("a line");
    other.kill();
    wait("it is gone", || embedded().status == 503);
    embedded().error(503, None, Some("engine_gone"));
    server.get("/health").error(503, None, Some("engine_gone"));
    assert_eq!(names(), ["story", "vectors", "late"], "it is a model all the same");
    one.kill();
    wait("it is gone, too", || server.metrics("infernum:engines{") == 2.0);
    for _ in 0..4 {
        assert_eq!(said(&told("story").ok()).0, said_first.0);
    }
    runs.read_line(&mut line).expect("it goes on");
    other.restart();
    wait("it is found again", || server.get("/health").status == 200);
    assert_eq!(embedded().ok()["data"], vector);
    // An engine that comes back with another model is not asked for it.
    drop(runs);
    late.kill();
    late.restart_as(&["--model", &vectors]);
    wait("it is gone", || told("late").status == 503);
    std::thread::sleep(Duration::from_millis(500));
    told("late").error(503, None, Some("engine_gone"));
}

#[test]
fn an_engine_that_is_told_to_end_lets_requests_end() {
    let mut engine = Engine::start(&[]);
    let server = front_end(&[&engine], &[]);
    let mut stream =
        server.stream(TEXT, &with(story(200), json!({"ignore_eos": true, "stream": true})));
    let mut line = String::new();
    stream.read_line(&mut line).expect("a line");
    let id = engine.id().to_string();
    assert!(Command::new("kill").args(["-s", "TERM", &id]).status().expect("kill").success());
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("it ends");
    assert!(text.ends_with("data: [DONE]\n\n") && !text.contains("\"error\""), "{text}");
    assert!(engine.ended().success());
    wait("it is gone", || server.post(TEXT, &story(1)).status == 503);
}

#[test]
fn strangers_and_nonsense_do_no_harm() {
    let folder = tempfile::tempdir().expect("a folder");
    let secret = folder.path().join("secret");
    std::fs::write(&secret, "a secret of more than sixteen bytes\n").expect("written");
    let secret_path = secret.to_str().expect("a name");
    let engine = Engine::start(&["--engine-secret", secret_path]);
    let server = front_end(&[&engine], &["--engine-secret", secret_path]);
    let refused = |args: &[&str]| {
        let output = binary().args(args).output().expect("it runs");
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let serve = ["serve", "--port", "0", "--engine", &engine.address];
    assert!(refused(&serve).contains("wants a secret"));
    std::fs::write(folder.path().join("other"), "not the same secret at all").expect("written");
    let other = folder.path().join("other");
    let wrong = [&serve[..], &["--engine-secret", other.to_str().expect("a name")]].concat();
    assert!(refused(&wrong).contains("another secret"));
    for listen in ["tcp://0.0.0.0:0", "ipc://x"] {
        let said = refused(&["engine", "--listen", listen]);
        assert!(
            said.contains("--engine-secret FILE") || said.contains("expected ipc:///PATH"),
            "{said}"
        );
    }
    let said = refused(&["serve", "--engine", &engine.address, "--kv-blocks", "4"]);
    assert!(said.contains("cannot be used with"), "{said}");

    let mut runs = server.stream(TEXT, &endless());
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let _: Address = engine.address.parse().expect("an address");
        let known = Secret::new(&std::fs::read_to_string(&secret).expect("it is there"));
        // Bytes of anybody: it hears our version and nothing else.
        for greeting in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"INFERNUM\x07\0\0\0", &[0xff; 64], b""] {
            let mut stream = UnixStream::connect(engine.path()).await.expect("it listens");
            stream.write_all(greeting).await.expect("it is taken");
            stream.shutdown().await.expect("closed");
            let mut found = Vec::new();
            let _ = stream.read_to_end(&mut found).await; // it may be reset
            assert!(found.len() <= 12, "{found:?}");
        }
        // Of one who is let in: random frames, then whatever is well formed and wrong.
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..20 {
            let mut stream = UnixStream::connect(engine.path()).await.expect("it listens");
            handshake::introduce(&mut stream, known.as_ref(), 1 << 20).await.expect("let in");
            let mut bytes = Vec::new();
            frame::push(&mut bytes, &ToEngine::Taken(u64::MAX)).expect("written");
            for _ in 0..8 {
                let body: Vec<u8> = (0..random.usize(..40)).map(|_| random.u8(..)).collect();
                bytes.extend((body.len() as u32).to_le_bytes());
                bytes.extend(body);
            }
            bytes.extend([random.u8(..); 3]);
            let _ = stream.write_all(&bytes).await; // it may have had enough
            // Who goes with something unread resets the connection, and what it wrote may be lost.
            let _ = stream.shutdown().await;
            let end = stream.read_to_end(&mut bytes);
            let _ = tokio::time::timeout(PATIENCE, end).await.expect("it lets go");
        }
    });
    wait("they were counted", || {
        server
            .metric("infernum:malformed_messages_total{model_name=\"ember\",received_by=\"engine\"")
            >= 100.0
    });
    let mut line = String::new();
    runs.read_line(&mut line).expect("it goes on");
    server.post(TEXT, &story(4)).ok();
    drop(runs);
    idle("nothing is left", &server);
}

#[test]
fn a_front_end_that_stands_still_is_let_go() {
    let engine = Engine::start(&["--engine-timeout", "3"]);
    let stays = front_end(&[&engine], &[]);
    let stops = front_end(&[&engine], &["--engine-timeout", "3"]);
    let _streams: Vec<_> = (0..3).map(|_| stops.stream(TEXT, &endless())).collect();
    wait("they run", || load(&stays)[0] == 3.0);
    stops.signal("STOP");
    idle("its requests end", &stays);
    stops.signal("CONT");
    wait("it comes again", || stops.post(TEXT, &story(4)).status == 200);
}

#[test]
#[ignore = "measures; run alone"]
fn what_a_socket_costs() {
    let engine = Engine::start(&[]);
    let (alone, apart) = (Server::start(&[]), front_end(&[&engine], &[]));
    let one = |server: &Server| {
        let request = with(story(400), json!({"ignore_eos": true, "stream": true}));
        let mut stream = server.stream(TEXT, &request);
        let (mut times, mut line, mut last) = (Vec::new(), String::new(), None::<Instant>);
        while stream.read_line(&mut line).expect("a line") > 0 {
            if line.starts_with("data: {") {
                let now = Instant::now();
                times.extend(last.map(|last| now - last));
                last = Some(now);
            }
            line.clear();
        }
        times
    };
    let mut times: [Vec<Duration>; 2] = Default::default();
    for _ in 0..10 {
        for (server, times) in [&alone, &apart].into_iter().zip(&mut times) {
            times.extend(one(server));
        }
    }
    for (name, times) in ["one process", "apart"].into_iter().zip(&mut times) {
        times.sort_unstable();
        println!("{name}: P50 {:?}, P90 {:?}", times[times.len() / 2], times[times.len() * 9 / 10]);
    }
}

/// They are what fuzzing begins with, and in the form of this version of the protocol.
#[test]
fn seeds_of_messages_can_be_read() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/messages");
    let files: Vec<_> = std::fs::read_dir(folder).expect("it is there").flatten().collect();
    assert!(files.len() >= 8);
    for file in files {
        let bytes = std::fs::read(file.path()).expect("a file");
        let asked = frame::parse::<ToEngine>(&bytes).map(drop);
        let told = frame::parse::<infernum_link::Report>(&bytes).map(drop);
        assert!(asked.is_ok() || told.is_ok(), "{:?}: {asked:?}, {told:?}", file.path());
    }
}
