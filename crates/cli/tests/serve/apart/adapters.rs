//! Low-rank adapters of engines in processes of their own.

use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};

use super::*;

/// Writes an adapter of the demo model as PEFT saves it: random matrices for the queries of each layer.
fn write_adapter(folder: &Path, seed: u64) {
    const CONFIG: &str = include_str!("../../../../../models/demo/config.json");
    let config: Value = serde_json::from_str(CONFIG).expect("JSON");
    let size = |key: &str| config[key].as_u64().expect(key) as usize;
    let (hidden, heads) = (size("hidden_size"), size("num_attention_heads") * size("head_dim"));
    let mut random = fastrand::Rng::with_seed(seed);
    let mut tensors = Vec::new();
    for layer in 0..size("num_hidden_layers") {
        for (half, shape) in [("A", [4, hidden]), ("B", [heads, 4])] {
            let scale = (shape[1] as f32).sqrt().recip();
            let values = (0..shape[0] * shape[1]).map(|_| scale * (4.0 * random.f32() - 2.0));
            let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
            let module = format!("base_model.model.model.layers.{layer}.self_attn.q_proj");
            tensors.push((format!("{module}.lora_{half}.weight"), shape, bytes));
        }
    }
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name, TensorView::new(Dtype::F32, shape.to_vec(), bytes).expect("of its shape"))
    });
    std::fs::create_dir_all(folder).expect("made");
    let weights = safetensors::serialize(views, None).expect("written");
    std::fs::write(folder.join("adapter_model.safetensors"), weights).expect("written");
    let settings = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"});
    std::fs::write(folder.join("adapter_config.json"), settings.to_string()).expect("written");
}

/// A folder of adapters `one` and `two`, and its name.
fn adapters() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    write_adapter(&folder.path().join("one"), 1);
    write_adapter(&folder.path().join("two"), 2);
    let name = folder.path().to_str().expect("a name").to_owned();
    (folder, name)
}

/// Names of models, with those that they are adapters of.
fn models(server: &Server) -> Vec<(String, Option<String>)> {
    let list = server.get("/v1/models").ok();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let models = list["data"].as_array().expect("a list").iter();
    models.map(|m| (text(&m["id"]).expect("a name"), text(&m["parent"]))).collect()
}

fn names(server: &Server) -> Vec<String> {
    models(server).into_iter().map(|(name, _)| name).collect()
}

fn ask(server: &Server, model: &str) -> Answer {
    server.post(TEXT, &with(story(24), json!({"model": model})))
}

fn text(server: &Server, model: &str) -> Value {
    ask(server, model).ok()["choices"][0]["text"].clone()
}

fn load(server: &Server, name: &str, path: &str) -> Answer {
    server.post("/v1/load_lora_adapter", &json!({"lora_name": name, "lora_path": path}))
}

fn unload(server: &Server, name: &str) -> Answer {
    server.post("/v1/unload_lora_adapter", &json!({"lora_name": name}))
}

#[test]
fn front_ends_share_the_adapters_of_an_engine() {
    let (_folder, root) = adapters();
    let style = format!("style={root}/one");
    let options = ["--dtype", "f32", "--lora", &style, "--lora-root", &root, "--max-loras", "2"];
    let mut engine = Engine::start(&options);
    let [one, two] = [front_end(&[&engine], &[]), front_end(&[&engine], &[])];
    let alone = Server::start(&options);
    let listed = [("ember", None), ("style", Some("ember"))]
        .map(|(name, parent)| (name.to_owned(), parent.map(str::to_owned)));
    let [base, styled] = ["ember", "style"].map(|name| text(&alone, name));
    assert_ne!(base, styled);
    for server in [&alone, &one, &two] {
        assert_eq!(models(server), listed);
        assert_eq!(text(server, "ember"), base);
        assert_eq!(text(server, "style"), styled);
        assert_eq!(server.get("/v1/models/style").ok()["parent"], "ember");
        let chat = with(chat("Hi"), json!({"model": "style", "max_tokens": 4}));
        assert_eq!(server.post(CHAT, &chat).ok()["model"], "style");
        assert_eq!(server.post("/v1/messages", &chat).ok()["model"], "style");
        assert_eq!(server.post("/api/chat", &with(chat, json!({"stream": false}))).status, 200);
    }
    // What one has loaded the other has, too.
    assert_eq!(load(&alone, "law", "two").status, 200);
    let law = text(&alone, "law");
    assert!(law != base && law != styled);
    assert_eq!(load(&one, "law", "two").status, 200);
    assert_eq!(text(&one, "law"), law);
    wait("the other hears of it", || names(&two) == ["ember", "style", "law"]);
    assert_eq!(text(&two, "law"), law);
    assert_eq!(text(&front_end(&[&engine], &[]), "law"), law, "and one that comes later");
    // What is wrong is told in the same words, by whichever side finds it.
    for (name, path, status, param, code) in [
        ("third", "one", 400, None, "no_adapter_slot"),
        ("law", "one", 422, Some("lora_name"), "invalid_value"),
        ("ember", "one", 422, Some("lora_name"), "invalid_value"),
        ("", "one", 422, Some("lora_name"), "invalid_value"),
        ("third", "..", 422, Some("lora_path"), "invalid_value"),
        ("third", "/etc", 422, Some("lora_path"), "invalid_value"),
        ("third", ".", 422, Some("lora_path"), "invalid_value"),
        ("third", &"x".repeat(3 << 20), 422, Some("lora_path"), "invalid_value"),
    ] {
        let both = [&alone, &two].map(|server| load(server, name, path));
        assert_eq!(both[0].text, both[1].text);
        both.iter().for_each(|answer| answer.error(status, param, Some(code)));
    }
    assert_eq!(unload(&two, "law").status, 200);
    unload(&two, "law").error(404, Some("model"), Some("model_not_found"));
    ask(&two, "law").error(404, Some("model"), Some("model_not_found"));
    wait("the other hears of it", || names(&one) == ["ember", "style"]);
    ask(&one, "law").error(404, Some("model"), Some("model_not_found"));
    // An engine that sleeps reads them again when it wakes.
    assert_eq!(load(&one, "law", "two").status, 200);
    assert_eq!(one.send("/sleep", "").status, 200);
    ask(&one, "style").error(503, None, Some("model_sleeping"));
    load(&one, "third", "one").error(503, None, Some("model_sleeping"));
    assert_eq!(two.send("/wake_up", "").status, 200);
    assert_eq!([text(&one, "style"), text(&one, "law")], [styled.clone(), law]);
    // One that starts anew has those that its command line names.
    engine.kill();
    wait("it is gone", || ask(&one, "style").status == 503);
    ask(&one, "style").error(503, None, Some("engine_gone"));
    assert_eq!(names(&one), ["ember", "style", "law"], "they are models all the same");
    engine.restart();
    for server in [&one, &two] {
        wait("it is found again", || server.get("/health").status == 200);
        assert_eq!(models(server), listed);
        assert_eq!(text(server, "style"), styled);
        ask(server, "law").error(404, Some("model"), Some("model_not_found"));
        idle("nothing is left", server);
    }
}

#[test]
fn an_engine_says_whether_clients_may_load_adapters() {
    let (_folder, root) = adapters();
    let style = format!("style={root}/one");
    let engine = Engine::start(&["--lora", &style]);
    let server = front_end(&[&engine], &[]);
    assert_eq!(names(&server), ["ember", "style"]);
    for answer in [load(&server, "x", "one"), unload(&server, "style"), unload(&server, "x")] {
        answer.error(403, None, Some("adapters_not_allowed"));
        assert!(answer.text.contains("--lora-root"), "{}", answer.text);
    }
    for wrong in [
        &["--lora", "ember=x"][..],
        &["--lora", "a=x", "--lora", "a=y"],
        &["--lora-root", "/no such folder"],
        &["--lora", "a=/no such folder"],
    ] {
        let listen = format!("ipc://{root}/socket");
        let mut command = binary();
        command.args(["engine", "--device", "cpu", "--listen", &listen]).args(wrong);
        let said = command.output().expect("it runs");
        assert!(!said.status.success() && !said.stderr.is_empty(), "{wrong:?}");
    }
}

#[test]
fn all_engines_of_a_model_load_an_adapter_or_none() {
    let (_folder, root) = adapters();
    let own = format!("own={root}/one");
    let room = |n: &'static str| ["--dtype", "f32", "--lora-root", &root, "--max-loras", n];
    let large = Engine::start(&[&room("3")[..], &["--lora", &own]].concat());
    let mut small = Engine::start(&room("1"));
    let (both, one) = (front_end(&[&large, &small], &[]), front_end(&[&large], &[]));
    // What one engine has alone it is asked for alone.
    let styled = text(&one, "own");
    (0..6).for_each(|_| assert_eq!(text(&both, "own"), styled));
    assert_eq!(load(&both, "law", "two").status, 200);
    let law = text(&one, "law");
    (0..6).for_each(|_| assert_eq!(text(&both, "law"), law));
    let refused = load(&both, "third", "two");
    refused.error(400, None, Some("no_adapter_slot"));
    assert!(refused.text.contains(&small.address), "{}", refused.text);
    let mut listed = names(&both);
    listed.sort(); // engines answer in any order
    assert_eq!(listed, ["ember", "law", "own"]);
    wait("it was given back", || names(&one) == ["ember", "own", "law"]);
    // The engine that has lost it gets it again by the same call.
    small.kill();
    small.restart();
    wait("it is found again", || both.metrics("infernum:engines{") == 2.0);
    (0..6).for_each(|_| assert_eq!(text(&both, "law"), law));
    assert_eq!(load(&both, "law", "two").status, 200);
    assert_eq!(text(&front_end(&[&small], &[]), "law"), law);
    load(&both, "law", "two").error(422, Some("lora_name"), Some("invalid_value"));
    assert_eq!(unload(&both, "law").status, 200);
    wait("both have unloaded it", || names(&one) == ["ember", "own"]);
    assert_eq!(names(&both), ["ember", "own"]);
}

#[test]
fn a_name_means_one_model() {
    let (_folder, root) = adapters();
    let [tale, own] = ["tale", "own"].map(|name| format!("{name}={root}/one"));
    let engine = |model: &str, more: &[&str]| {
        Engine::start(&[&["--model", model, "--lora-root", &root], more].concat())
    };
    let story = engine("story=demo", &["--lora", &tale, "--lora", &own]);
    let (tale, other) = (engine("tale=demo", &[]), engine("other=demo", &["--lora", &own]));
    let server = front_end(&[&story, &tale, &other], &[]);
    let parents: Vec<(String, Option<String>)> = models(&server);
    let expected = [("story", None), ("own", Some("story")), ("tale", None), ("other", None)];
    let expected = expected.map(|(name, of)| (name.to_owned(), of.map(str::to_owned)));
    assert_eq!(parents, expected);
    assert_ne!(text(&server, "own"), text(&server, "story"));
    assert_eq!(text(&server, "tale"), text(&server, "story"), "without an adapter");
    let load = |name: &str, model: Value| {
        let body = json!({"lora_name": name, "lora_path": "two", "model": model});
        server.post("/v1/load_lora_adapter", &body)
    };
    load("new", Value::Null).error(400, Some("model"), None);
    load("new", json!("none")).error(404, Some("model"), Some("model_not_found"));
    for taken in ["tale", "own"] {
        load(taken, json!("other")).error(422, Some("lora_name"), Some("invalid_value"));
    }
    assert_eq!(load("new", json!("other")).status, 200);
    assert_eq!(server.get("/v1/models/new").ok()["parent"], "other");
    assert_eq!(unload(&server, "new").status, 200);
    // Where the first model has it no more, it is the next one's.
    assert_eq!(unload(&server, "own").status, 200);
    assert_eq!(server.get("/v1/models/own").ok()["parent"], "other");
}
