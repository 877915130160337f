//! The commands, run as a user runs them.
#![allow(missing_docs, reason = "tests")]

mod diff;
mod extremes;
mod gguf;
mod quantise;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn infernum(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_infernum"));
    // Not the user's own cache.
    command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command.args(args).output().expect("the binary runs")
}

fn stdout(args: &[&str]) -> String {
    let output = infernum(args);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?} failed: {errors}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn failure(args: &[&str]) -> String {
    let output = infernum(args);
    assert!(!output.status.success(), "{args:?} succeeded");
    let errors = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(!errors.contains("panicked"), "{errors}");
    errors
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&stdout(args)).expect("one JSON value")
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

#[test]
fn the_demo_tells_a_story_that_ends() {
    let story = json(&["generate", "Once upon a time", "--temperature", "0", "--json"]);
    assert_eq!(story["finish_reason"], "stop");
    let text = story["text"].as_str().expect("text");
    assert!(text.split_whitespace().count() > 60, "a story, not a phrase: {text}");
    assert!(text.trim_end().ends_with(['.', '!', '?', '"']), "{text}");
    let ids = story["tokens"].as_array().expect("tokens");
    assert!(ids.len() > 60);
}

#[test]
fn the_demo_answers_questions() {
    for (question, answer) in
        [("What is 3 plus 4?", "3 plus 4 is 7."), ("Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9.")]
    {
        let said = json(&["generate", "--chat", question, "--temperature", "0", "--json"]);
        assert_eq!(said["text"].as_str().map(str::trim), Some(answer));
        assert_eq!(said["finish_reason"], "stop");
    }
}

#[test]
fn streaming_prints_prompt_and_text_and_keeps_the_summary_off_standard_output() {
    let args = ["generate", "Once upon a time", "--max-tokens", "12"];
    let output = infernum(&args);
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(text.starts_with("Once upon a time") && text.ends_with('\n'), "{text}");
    let summary = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(summary.contains("12 generated at"), "{summary}");
    assert!(!summary.contains('\u{1b}'), "no colours where there is no terminal");
}

#[test]
fn a_seed_fixes_the_text() {
    let tell = |seed: &str| {
        let args = ["generate", "Once", "--temperature", "1", "--max-tokens", "24", "--json"];
        json(&[&args[..], &["--seed", seed]].concat())["tokens"].clone()
    };
    assert_eq!(tell("3"), tell("3"));
    assert_ne!(tell("3"), tell("4"));
}

/// Under the pipeline `greedy` the plan chooses; the text is that of the likeliest tokens.
#[test]
fn a_plan_may_choose_greedily() {
    let say = |args: &[&str]| stdout(&[&["generate", "Once", "--max-tokens", "12"], args].concat());
    let greedy = say(&["--passes", "greedy", "--temperature", "0"]);
    assert_eq!(greedy, say(&["--temperature", "0"]));
    let error = failure(&["generate", "Once", "--passes", "greedy", "--temperature", "1"]);
    assert!(error.contains("expected temperature 0, no penalties"), "{error}");
    let out = std::env::temp_dir().join("infernum-no-logits.safetensors");
    let out = out.display().to_string();
    let error = failure(&["logits", "--tokens", "1", "--out", &out, "--passes", "greedy"]);
    assert!(error.contains("yields tokens instead of logits"), "{error}");
}

#[test]
fn dumped_ir_reads_back() {
    let dir = fixture("qwen2/windows");
    let dir = dir.to_str().expect("UTF-8");
    let printed = stdout(&["compile", "--model", dir, "--dump-ir"]);
    let kernels = infernum_passes::data::Kernels::load(None, &[]).expect("the built-in files");
    // One module for each kind of step, under a comment that says which.
    let modules: Vec<&str> = printed.split("// ").filter(|m| m.contains("module ")).collect();
    assert!(modules.len() > 1, "{printed}");
    for module in modules {
        let (_, text) = module.split_once('\n').expect("a comment line");
        let module =
            infernum_ir::text::parse_with(text, "stdout", &kernels.ops).expect("it parses");
        assert_eq!(infernum_ir::text::print(&module), text);
    }
    let lowered = stdout(&["compile", "--model", dir, "--dump-after", "lower"]);
    assert!(lowered.contains("cast("), "the spec's own cast is there before the passes: {lowered}");
    assert!(!printed.contains("cast("), "and a no-op cast is gone after them");
    let none = stdout(&["compile", "--model", dir, "--passes", "none", "--dump-ir"]);
    assert_eq!(lowered, format!("// after lower\n{none}"));
    assert!(stdout(&["compile", "--model", dir, "--dump-dot"]).contains("digraph"));
    let plan = json(&["compile", "--model", dir, "--json"]);
    assert!(plan["programs"].as_array().is_some_and(|p| p.len() >= 3));
}

#[test]
fn explanations_say_what_each_rule_did() {
    let dir = fixture("llama/gqa3");
    let dir = dir.to_str().expect("UTF-8");
    let args = ["compile", "--model", dir, "--target", "sm_90a", "--explain"];
    let text = stdout(&args);
    for part in
        ["fired ", "absorbed ", "refused ", "near miss ", "lost ", "models/blocks/attention.ron:"]
    {
        assert!(text.contains(part), "no `{part}` in {text}");
    }
    assert!(!text.contains('\u{1b}'), "no colours where there is no terminal");
    let without = stdout(&[&args[..], &["--disable", "linear-add"]].concat());
    assert!(
        text.contains("fired       linear-add") && !without.contains(" linear-add at"),
        "{without}"
    );
    let reports = json(&[&args[..], &["--json"]].concat());
    assert!(reports[0][1]["fired"].as_array().is_some_and(|f| f.len() > 5));
    let unknown = failure(&["compile", "--model", dir, "--disable", "linear-ad"]);
    assert!(unknown.contains("did you mean `linear-add`?"), "{unknown}");
}

#[test]
fn measurements_go_before_the_model() {
    let dir = fixture("llama/gqa3");
    let dir = dir.to_str().expect("UTF-8");
    let file = std::env::temp_dir().join("infernum-cli-costs.ron");
    let text = "Measurements(calls: [(target: \"sm_90a\", op: \"linear_add\", us: 1.25)])";
    std::fs::write(&file, text).expect("a temporary file");
    let costs = file.to_str().expect("UTF-8");
    let args = ["compile", "--model", dir, "--target", "sm_90a", "--explain"];
    let said = stdout(&[&args[..], &["--costs", costs]].concat());
    assert!(said.contains("linear_add: 1.25 us, measured"), "{said}");
    assert!(said.contains("us, modelled"), "{said}");
    assert!(!stdout(&args).contains("measured"));
    std::fs::write(&file, text.replace("us:", "micros:")).expect("a temporary file");
    let error = failure(&[&args[..], &["--costs", costs]].concat());
    assert!(error.contains("infernum-cli-costs.ron:1:") && error.contains("micros"), "{error}");
}

#[test]
fn a_wrong_rule_of_ones_own_is_refused() {
    let out = tempfile::tempdir().expect("a temporary folder");
    let file = out.path().join("wrong.ron");
    let rule = r#"[Rule(name: "wrong", numerics: exact, vars: { "a": "[T, K]", "b": "[T, K]" },
        left: { "y": mul(a: "a", b: "b") }, right: { "y": add(a: "a", b: "b") })]"#;
    std::fs::write(&file, rule).expect("written");
    let (dir, path) = (fixture("llama/gqa3"), file.to_str().expect("UTF-8"));
    let dir = dir.to_str().expect("UTF-8");
    let refused = failure(&["compile", "--model", dir, "--rules", path]);
    assert!(
        refused.contains("wrong: wrong:") && refused.contains("--allow-unchecked"),
        "{refused}"
    );
    stdout(&["compile", "--model", dir, "--allow-unchecked", "--rules", path]);
    let checked = infernum(&["check-rules", path, "--only", "wrong,linear-add", "--trials", "20"]);
    let text = String::from_utf8(checked.stdout).expect("UTF-8");
    assert!(!checked.status.success() && text.contains("linear-add: "), "{text}");
    assert!(text.contains("2 rule(s), 1 failed"), "{text}");
}

#[test]
fn a_rule_that_was_checked_is_not_tried_again() {
    let cache = tempfile::tempdir().expect("a temporary folder");
    let cache = cache.path().to_str().expect("UTF-8");
    let check = |options: &[&str]| {
        let args = ["check-rules", "--only", "linear-add", "--json", "--trials", "10"];
        json(&[&args[..], options].concat())[0]["cached"] == true
    };
    let kept = ["--cache-dir", cache];
    assert_eq!([check(&kept), check(&kept), check(&["--no-cache"])], [false, true, false]);

    // A rule of one's own is tried before its first use alone.
    let out = tempfile::tempdir().expect("a temporary folder");
    let file = out.path().join("right.ron");
    let rule = r#"[Rule(name: "right", numerics: exact, vars: { "a": "[T, K]", "b": "[T, K]" },
        left: { "y": add(a: "a", b: "b") }, right: { "y": add(a: "b", b: "a") })]"#;
    std::fs::write(&file, rule).expect("written");
    let (dir, path) = (fixture("llama/gqa3"), file.to_str().expect("UTF-8"));
    let dir = dir.to_str().expect("UTF-8");
    stdout(&["compile", "--model", dir, "--rules", path, "--cache-dir", cache]);
    let args = ["check-rules", path, "--only", "right", "--json", "--cache-dir", cache];
    assert_eq!(json(&args)[0]["cached"], true);
}

#[test]
fn ablation_proves_that_each_rule_was_toggled() {
    let config = fixture("llama/gqa3/config.json");
    let config = config.to_str().expect("UTF-8");
    let args = ["ablate", "--config", config, "--prompt", "8", "--generate", "2", "--runs", "1"];
    let folder = tempfile::tempdir().expect("a temporary folder");
    let svg = folder.path().join("plot.svg");
    let svg_path = svg.to_str().expect("UTF-8");
    let report = json(&[&args[..], &["--json", "--svg", svg_path]].concat());
    let plot = std::fs::read_to_string(&svg).expect("a plot");
    assert!(plot.starts_with("<svg") && plot.contains("linear-add") && !plot.contains("NaN"));
    let rows = report["rows"].as_array().expect("a list");
    let row = |name: &str| rows.iter().find(|r| r["rules"] == name).expect("a row");
    assert_eq!(row("all")["plan_differs"], false);
    assert_eq!(row("all but linear-add")["plan_differs"], true);
    let count = |name: &str, op: &str| row(name)["launches"][op].as_u64().unwrap_or(0);
    assert!(count("all", "linear_add") > 0);
    assert_eq!(count("all but linear-add", "linear_add"), 0);
    assert!(count("only linear-add", "linear_add") > 0);
    assert_eq!(count("none", "linear_add"), 0);
    for r in rows {
        let difference = r["max_logit_difference"].as_f64().expect("a number");
        assert!(difference < 0.1, "{r}");
    }
}

#[test]
fn kernels_are_held_against_their_meaning() {
    let text = stdout(&["check-kernels"]);
    assert!(text.contains("paged_attention") && text.ends_with("0 failed\n"), "{text}");
}

#[test]
fn logits_are_written_for_every_position_and_layer() {
    let dir = fixture("llama/gqa3");
    let out = tempfile::tempdir().expect("a temporary folder");
    let file = out.path().join("logits.safetensors");
    let (dir, path) = (dir.to_str().expect("UTF-8"), file.to_str().expect("UTF-8"));
    let args = ["logits", "--model", dir, "--tokens", "1,2,3,4", "--out", path, "--dtype", "f32"];
    stdout(&[&args[..], &["--dump-layers", "--chunk", "3"]].concat());
    let bytes = std::fs::read(&file).expect("written");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("a valid file");
    assert_eq!(tensors.tensor("logits").expect("logits").shape(), [4, 61]);
    for name in ["embed", "layers.0", "layers.1"] {
        assert_eq!(tensors.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).shape(), [4, 48]);
    }
}

/// A Gemma 2 with a key that nobody knows: where a port of it starts.
#[test]
fn the_families_nearest_to_a_config_are_shown() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let file = dir.path().join("config.json");
    let config = r#"{"architectures": ["NewForCausalLM"], "hidden_size": 48, "num_attention_heads": 4,
        "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 16,
        "residual_multiplier": 0.5, "sliding_window": 8, "depth_gate": 2}"#;
    std::fs::write(&file, config).expect("written");
    for path in [dir.path(), &file] {
        let path = path.to_str().expect("UTF-8");
        let found = json(&["families", "--for", path, "--json"]);
        assert_eq!(found["nearest"][0]["family"], "gemma2");
        let unread = serde_json::json!(["depth_gate", "residual_multiplier"]);
        assert_eq!(found["nearest"][0]["unread"], unread);
        assert_eq!(found["elsewhere"]["depth_gate"], serde_json::json!([]));
        assert_eq!(found["elsewhere"]["residual_multiplier"][0]["param"], "residual_scale");
        let text = stdout(&["families", "--for", path]);
        assert!(text.contains("depth_gate: no family reads it"), "{text}");
    }
    let model = dir.path().to_str().expect("UTF-8");
    let text = failure(&["compile", "--model", model, "--random-weights"]);
    assert!(text.contains("NewForCausalLM") && text.contains("read: gemma2 (6 of 8)"), "{text}");
}

#[test]
fn families_and_doctor_report() {
    let families = json(&["families", "--json"]);
    let names: Vec<&str> =
        families.as_array().into_iter().flatten().filter_map(|f| f["name"].as_str()).collect();
    assert!(
        names.is_sorted() && names.contains(&"llama") && names.contains(&"gemma3"),
        "{names:?}"
    );
    assert!(json(&["doctor", "--json"])["cores"].as_u64().is_some_and(|n| n > 0));
}

#[test]
fn a_bench_of_random_weights_runs() {
    let config = fixture("llama/gqa3/config.json");
    let config = config.to_str().expect("UTF-8");
    let args = ["bench", "--config", config, "--prompt", "8", "--generate", "4", "--runs", "1"];
    let figures = json(&[&args[..], &["--json"]].concat());
    assert!(figures["cases"][0]["decode_tokens_per_second"].as_f64().is_some_and(|x| x > 0.0));
}

#[test]
fn tokens_are_continued_without_a_tokenizer() {
    let model = fixture("llama/gqa3");
    let model = model.to_str().expect("UTF-8");
    let ask = |tokens: &str, most: &str, more: &[&str]| {
        let args = ["generate", "--model", model, "--tokens", tokens, "--max-tokens", most];
        [&args[..], &["--ignore-eos", "--temperature", "0"], more].concat().join(" ")
    };
    let run = |line: String| json(&line.split(' ').collect::<Vec<_>>())["tokens"].clone();
    let all = run(ask("1,5,9", "4", &["--json"]));
    let ids: Vec<String> = all.as_array().expect("ids").iter().map(ToString::to_string).collect();
    assert_eq!(ids.len(), 4);
    // What is generated is continued as it was.
    let rest = run(ask(&format!("1,5,9,{}", ids[0]), "3", &["--json"]));
    assert_eq!(rest.as_array().expect("ids")[..], all.as_array().expect("ids")[1..]);
    let printed = stdout(&ask("1,5,9", "4", &[]).split(' ').collect::<Vec<_>>());
    assert_eq!(printed.trim(), ids.join(" "));
    let beyond = failure(&["generate", "--model", model, "--tokens", "99"]);
    assert!(beyond.contains("61"), "{beyond}");
}

#[test]
fn mistakes_are_explained() {
    let missing = failure(&["generate", "--model", "/no/such/folder", "x"]);
    assert!(missing.contains("/no/such/folder"), "{missing}");
    let dir = fixture("llama/gqa3");
    let dir = dir.to_str().expect("UTF-8");
    let step = failure(&["compile", "--model", dir, "--dump-after", "canonicalize"]);
    assert!(step.contains("did you mean `canonicalise`?"), "{step}");
    let token = failure(&["logits", "--model", dir, "--tokens", "99", "--out", "/dev/null"]);
    assert!(token.contains("outside the vocabulary of 61"), "{token}");
    // A Qwen3 checkpoint under Llama's spec lacks nothing but has norms too many.
    let other = fixture("qwen3/gqa3_tied");
    let spec = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/llama.ron");
    let (other, spec) = (other.to_str().expect("UTF-8"), spec.to_str().expect("UTF-8"));
    let unfit = failure(&["compile", "--model", other, "--spec", spec]);
    assert!(unfit.contains("q_norm.weight`: unexpected"), "{unfit}");
    assert!(unfit.contains("k_norm.weight`: unexpected"), "all of them are listed: {unfit}");
    let p = failure(&["generate", "x", "--top-p", "2", "--temperature", "1"]);
    assert!(p.contains("`top_p`: expected above 0 and at most 1"), "{p}");
}

#[test]
fn the_reference_is_a_command() {
    let rope = stdout(&["ops", "rope"]);
    assert!(rope.contains("`rope(x, positions, freqs, style?, scale?)`"), "{rope}");
    assert!(stdout(&["ops"]).contains("## Specs and blocks"));
    assert!(stdout(&["ops", "layers"]).contains("`count`"));
    assert!(stdout(&["ops", "Fused"]).contains("`template`?"));
    let error = failure(&["ops", "rmsnor"]);
    assert!(error.contains("did you mean `rmsnorm`?"), "{error}");
}

/// A likely mistake in a spec is said once, with its place, by whatever compiles the model.
#[test]
fn mistakes_in_a_spec_are_warnings() {
    let spec =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/new-architecture/granite.ron");
    let text = std::fs::read_to_string(&spec).expect("the example");
    let unread =
        text.replacen("params: {", "params: {\n        \"depth\": \"num_hidden_layers\",", 1);
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("granite.ron");
    std::fs::write(&path, unread).expect("writable");
    let (model, spec) = (fixture("granite/multipliers"), path.display().to_string());
    let model = model.to_str().expect("UTF-8");
    let out = dir.path().join("logits.safetensors");
    for command in [
        vec!["compile"],
        vec!["logits", "--tokens", "1,2,3", "--out", out.to_str().expect("UTF-8")],
    ] {
        let output = infernum(&[&command[..], &["--model", model, "--spec", &spec]].concat());
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command:?}: {errors}");
        let place = format!("{spec}:14:10: warning: nothing reads the parameter `depth`");
        assert_eq!(errors.matches(&place).count(), 1, "{command:?}: {errors}");
    }
}

/// The example's op, checked as a user would, with nothing but its files.
#[test]
fn kernels_of_a_users_own_are_checked_from_files() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/new-fusion");
    let data = data.to_str().expect("UTF-8");
    let text = stdout(&["check-kernels", "--data", data, "--only", "scaled_add"]);
    assert!(text.contains("ok   scaled_add bf16 (") && text.contains(", 0 failed"), "{text}");
    let error = failure(&["check-kernels", "--data", data, "--only", "scaled_ad_"]);
    assert!(error.contains("no op is named so"), "{error}");
    let rules = stdout(&["check-rules", "--data", data, "--only", "scaled-add", "--no-cache"]);
    assert!(rules.contains("scaled-add: definition"), "{rules}");
}

/// A check that would check nothing is an error, and says what was meant.
#[test]
fn checks_that_check_nothing_fail() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let data = |path: &str| root.join(path).display().to_string();
    let (fusion, deeper) = (data("examples/new-fusion"), data("examples/new-fusion/kernels"));
    let op = failure(&["check-rules", "--data", &fusion, "--only", "scaled_add"]);
    assert!(op.contains("no rule is named `scaled_add` (did you mean `scaled-add`?)"), "{op}");
    let some = failure(&["check-rules", "--only", "swiglu,nosuch"]);
    assert!(some.contains("no rule is named `nosuch`"), "{some}");
    let nothing = tempfile::tempdir().expect("a folder");
    // What lies beside the folder of tests is no hint.
    let nothing = nothing.path().join("a/b/c");
    std::fs::create_dir_all(&nothing).expect("a folder");
    let nothing = nothing.display().to_string();
    for command in ["check-rules", "check-kernels", "check-templates", "ops", "compile"] {
        let missing = failure(&[command, "--data", "/no/such/folder"]);
        assert!(missing.contains("/no/such/folder: No such file"), "{command}: {missing}");
        let inner = failure(&[command, "--data", &deeper]);
        let hint = format!("holds neither models/ nor kernels/ (did you mean `{fusion}`?)");
        assert!(inner.contains(&hint), "{command}: {inner}");
        let empty = failure(&[command, "--data", &nothing]);
        assert!(empty.contains("holds neither models/ nor kernels/;"), "{command}: {empty}");
    }
}

/// Options that may be given several times take one value each, or a list with commas: what comes after is
/// the prompt.
#[test]
fn lists_of_names_do_not_take_the_prompt() {
    let common = ["generate", "--max-tokens", "2", "--json", "--temperature", "0", "--disable"];
    for given in [&["swiglu,linear-add", "Once upon a time"][..], &["swiglu", "Once upon a time"]] {
        let answer = json(&[&common[..], given].concat());
        assert_eq!(answer["tokens"].as_array().map(Vec::len), Some(2));
    }
    let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels/rules/norm.ron");
    let rules = rules.display().to_string();
    let twice =
        ["generate", "--max-tokens", "2", "--json", "--rules", &rules, "--rules", &rules, "Once"];
    assert_eq!(json(&twice)["tokens"].as_array().map(Vec::len), Some(2));
}

/// A model without its checkpoint is compiled and run with random weights; that they are missing is said.
#[test]
fn random_weights_do_without_a_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        let from = fixture("../../models/demo").join(file);
        std::fs::copy(from, folder.path().join(file)).expect("a copy");
    }
    let model = folder.path().display().to_string();
    let missing = failure(&["compile", "--model", &model]);
    assert!(missing.contains("holds no *.safetensors file"), "{missing}");
    assert!(missing.contains("--random-weights does without"), "{missing}");
    assert!(!stdout(&["compile", "--model", &model, "--config-only"]).is_empty());
    let args =
        ["generate", "--model", &model, "--random-weights", "Once", "--max-tokens", "3", "--json"];
    let output = infernum(&args);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("the weights are random"), "{said}");
    let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(answer["tokens"].as_array().is_some_and(|t| !t.is_empty()), "{answer}");
}

#[test]
fn a_table_of_times_is_shown_where_times_are_kept() {
    let bench = ["bench", "--prompt", "4", "--generate", "2", "--runs", "1"];
    let without = stdout(&bench);
    assert!(!without.contains("NaN") && !without.contains("linear"), "{without}");
    let with = stdout(&[&bench[..], &["--profile"]].concat());
    assert!(with.contains("linear") && !with.contains("NaN"), "{with}");
}

/// A GPU without a table of costs has that of the one before it.
#[test]
fn every_architecture_has_costs() {
    let output = infernum(&["compile", "--target", "sm_86"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("no costs are known of sm_86: those of sm_80 decide"), "{said}");
}

/// The library's documentation runs them.
#[test]
fn the_readme_shows_the_lines_that_are_tested() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let lines = |file: &str| {
        let text = std::fs::read_to_string(root.join(file)).expect(file);
        let (_, rest) = text.split_once("```rust\n").expect(file);
        rest.split_once("```").expect(file).0.to_owned()
    };
    assert_eq!(lines("README.md"), lines("crates/infernum/README.md"));
}

/// The options of each section of a command's help.
fn sections(help: &str) -> Vec<(String, Vec<String>)> {
    let mut sections: Vec<(String, Vec<String>)> = Vec::new();
    for line in help.lines() {
        if let Some(heading) = line.strip_suffix(':').filter(|l| !l.starts_with(' ')) {
            sections.push((heading.to_owned(), Vec::new()));
        }
        let option = line.trim_start().split(['-', ' ', ',']).find(|w| !w.is_empty());
        let begins = line.starts_with("      --") || line.starts_with("  -");
        if let (true, Some((_, options)), Some(_)) = (begins, sections.last_mut(), option) {
            let name = line.split("--").nth(1).unwrap_or_default();
            options.push(name.split([' ', '[']).next().unwrap_or_default().to_owned());
        }
    }
    sections.retain(|(_, options)| !options.is_empty());
    sections
}

#[test]
fn help_begins_with_what_is_a_commands_own() {
    let all = stdout(&["--help"]);
    let commands = all.lines().skip_while(|l| *l != "Commands:").skip(1);
    let commands = commands.take_while(|l| !l.is_empty());
    let names: Vec<&str> = commands
        .filter(|l| !l.starts_with("   "))
        .filter_map(|l| l.split_whitespace().next())
        .filter(|name| *name != "help")
        .collect();
    assert!(names.len() > 20, "{names:?}");
    for name in names {
        let help = stdout(&[name, "--help"]);
        let sections = sections(&help);
        let (first, own) = &sections[0];
        assert_eq!(first, "Options", "{name}: {help}");
        assert!(own.contains(&"help".to_owned()), "{name}: {own:?}");
        for common in ["passes", "disable", "dtype", "no-graphs", "top-k"] {
            assert!(!own.contains(&common.to_owned()), "{name}: --{common} is everybody's\n{help}");
        }
        let of = |heading: &str| sections.iter().find(|(name, _)| name == heading);
        for (heading, option) in [
            ("Model", "model"),
            ("Compilation", "spec"),
            ("Running", "threads"),
            ("Sampling", "top-k"),
        ] {
            if let Some((_, options)) = of(heading) {
                assert!(options.contains(&option.to_owned()), "{name}: {heading}: {options:?}");
            }
        }
    }
    let bench = sections(&stdout(&["bench", "--help"]));
    let headings: Vec<&str> = bench.iter().map(|(heading, _)| heading.as_str()).collect();
    assert_eq!(headings, ["Options", "Model", "Compilation", "Adapters", "Running"]);
    assert_eq!(bench[0].1, ["prompt", "generate", "batch", "runs", "profile", "json", "help"]);
}
