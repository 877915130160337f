//! What is allowed in a spec and likely a mistake, each with its place.

use std::path::Path;

use infernum_frontend_hf::lower::{Request, lower};
use infernum_frontend_hf::spec::{Library, Source};
use infernum_frontend_hf::{Config, LowerOptions, Model, ModelFiles};
use infernum_ir::{DType, Sym, Task};

use crate::CONFIG;
use crate::errors::SPEC;

/// The warnings on a text, as printed.
fn warnings(spec: &str, dtype: DType) -> Vec<String> {
    let config = Config::parse("config.json", CONFIG.as_bytes()).unwrap();
    let keys: Vec<&str> = config.keys().collect();
    let request = Request {
        config: &|key| config.value(key),
        config_keys: &keys,
        dtype,
        max_length: 64,
        // Stored in f32, as small random checkpoints are.
        weight_dtype: &|_| Some(DType::F32),
        encoding: &|_, _| None,
        rows: Sym::B,
        task: Task::Generate,
        container: &[],
        names_only: false,
    };
    let lowered = lower(&Source::new("tiny.ron", spec), &Library::default(), &request);
    let found = lowered.unwrap_or_else(|e| panic!("{e}")).warnings;
    found.iter().map(ToString::to_string).collect()
}

fn changed(from: &str, to: &str) -> String {
    assert!(SPEC.contains(from), "nothing to replace: {from}");
    SPEC.replacen(from, to, 1)
}

#[test]
fn a_spec_without_mistakes_has_no_warnings() {
    for dtype in [DType::F32, DType::Bf16] {
        assert_eq!(warnings(SPEC, dtype), [""; 0]);
    }
}

#[test]
fn likely_mistakes_and_their_places() {
    let cases = [
        (
            "a parameter that nothing reads",
            "\"eps\": \"rms_norm_eps\",",
            "\"eps\": \"rms_norm_eps\", \"depth\": \"num_hidden_layers\",",
        ),
        (
            "one that only its own definition mentions",
            "\"eps\": \"rms_norm_eps\",",
            "\"eps\": \"rms_norm_eps\", \"depth\": \"depth ?? 5\",",
        ),
        ("a block's own", "\"norm\": true },", "\"norm\": true, \"scale\": \"1 / heads\" },"),
        ("hides the family's", "\"width\": \"hidden\"", "\"width\": \"hidden\", \"eps\": 0.001"),
        (
            "hides the engine's",
            "\"width\": \"hidden\", \"norm\"",
            "\"dtype\": \"'f32'\", \"width\": \"dtype == 'f32' ? hidden : 0\", \"norm\"",
        ),
        ("a value that nothing reads", "add(a: \"g\", b: \"x\")", "add(a: \"x\", b: \"x\")"),
        ("the last of a chain", "result: \"out\"", "result: \"f\""),
        ("a weight", "\"proj.weight\": (", "\"bias\": (shape: [\"hidden\"]), \"proj.weight\": ("),
        ("what a layer makes", "\"x\": mixer(x: \"x\")", "\"y\": mixer(x: \"x\")"),
    ];
    let expected = [
        "nothing reads the parameter `depth`",
        "nothing reads the parameter `depth`",
        "nothing reads the parameter `scale` of this block",
        "`mixer` has a parameter `eps` that hides the family's, and this call leaves it out",
        "the parameter `dtype` hides the engine's own",
        "nothing reads `g`",
        "nothing reads `out`",
        "nothing reads the weight `bias`",
        "nothing reads `y`",
    ];
    for ((what, from, to), expected) in cases.into_iter().zip(expected) {
        let found = warnings(&changed(from, to), DType::Bf16);
        let first = found.first().unwrap_or_else(|| panic!("{what}: no warning"));
        assert!(first.starts_with("tiny.ron:"), "{what}: {first}");
        assert!(first.contains(&format!(": warning: {expected}")), "{what}: {first}");
    }
}

/// A layer whose last call has the wrong name is the identity; one without a body is so on purpose.
#[test]
fn layers_that_change_nothing() {
    let body = "body: { \"x\": mixer(x: \"x\") }";
    let found = warnings(&changed(body, "body: { \"y\": mixer(x: \"x\") }"), DType::Bf16);
    let [unread, unchanged] = &found[..] else { panic!("{found:?}") };
    assert!(unread.starts_with("tiny.ron:50:26: warning: nothing reads `y`\n"), "{unread}");
    let expected =
        "tiny.ron:51:26: warning: layers of kind `full_attention` give `x` as they took it";
    assert!(unchanged.starts_with(expected), "{unchanged}");
    assert_eq!(warnings(&changed(body, "body: {}"), DType::Bf16), [""; 0]);
}

#[test]
fn an_operand_that_nothing_reads() {
    let spec = changed("inputs: [\"x\"]", "inputs: [\"x\", \"more\"]");
    let spec = spec.replace("mixer(x: \"x\"", "mixer(x: \"x\", more: \"x\"");
    let spec = spec.replace("mixer(at: \"mixer.\",", "mixer(at: \"mixer.\", more: \"x\",");
    let found = warnings(&spec, DType::Bf16);
    let [found] = &found[..] else { panic!("{found:?}") };
    assert!(found.contains("warning: nothing reads the operand `more` of this block"), "{found}");
}

/// What writes the cache is read by later steps, and what is defined anew is read by its new definition.
#[test]
fn what_is_read_elsewhere_is_no_mistake() {
    let cached = changed(
        "            body: {\n                \"y\"",
        "            state: { \"k\": (heads: \"heads\", dim: \"head_dim\") },
            body: {\n                \"y\"",
    );
    let cached = cached.replacen(
        "\"f\": reshape",
        "\"k_written\": kv_write(state: \"k\", x: \"r\"),\n\"f\": reshape",
        1,
    );
    assert_eq!(warnings(&cached, DType::Bf16), [""; 0]);
    let anew =
        changed("\"g\": map(a: \"f\"", "\"x\": map(a: \"x\", expr: \"a\"), \"g\": map(a: \"f\"");
    assert_eq!(warnings(&anew, DType::Bf16), [""; 0]);
}

/// What stands in the name of a tensor is read.
#[test]
fn a_parameter_in_a_name_is_no_mistake() {
    let named = [
        ("prefix: \"model.layers.{layer}.\"", "prefix: \"model.layers.{layer}.{part}.\""),
        ("at: \"mixer.\"", "at: \"mixer.{part}.\""),
        ("at: \"mixer.\"", "rename: { \"proj\": \"proj.{part}\" }"),
        ("\"proj.weight\": (", "\"proj.weight\": (same_as: \"'proj.{part}'\", "),
    ];
    for (from, to) in named {
        let spec = changed(from, to);
        let spec = spec.replacen("\"eps\":", "\"part\": \"num_hidden_layers\", \"eps\":", 1);
        assert_eq!(warnings(&spec, DType::Bf16), [""; 0], "{to}");
    }
}

/// `"x": "x ?? 1"` takes the family's value, and a call that says what it means is not asked again.
#[test]
fn what_is_said_is_no_mistake() {
    let falls_back =
        changed("\"width\": \"hidden\"", "\"width\": \"hidden\", \"heads\": \"heads ?? 4\"");
    let falls_back = falls_back.replacen(
        "\"y\": rmsnorm(x: \"x\"",
        "\"w\": scale(x: \"x\", by: \"heads\"),\n\"y\": rmsnorm(x: \"w\"",
        1,
    );
    assert_eq!(warnings(&falls_back, DType::Bf16), [""; 0]);
    let said = changed("\"width\": \"hidden\"", "\"width\": \"hidden\", \"eps\": None")
        .replace("mixer(x: \"x\")", "mixer(x: \"x\", eps: \"eps\")")
        .replace("norm: false", "norm: false, eps: \"eps\"");
    assert_eq!(warnings(&said, DType::Bf16), [""; 0]);
}

/// With weights and activations in f32 a cast that is missing changes nothing, until somebody runs it
/// in bf16.
#[test]
fn a_cast_that_f32_hides_is_reported_in_f32() {
    let missing = changed("\"embedder\": File(\"blocks/embed.ron\"),", "\"embedder\": Inline((
            doc: \"d\", inputs: [\"tokens\"],
            weights: { \"embed_tokens.weight\": (shape: [\"vocab\", \"hidden\"]) },
            body: { \"x\": embedding(ids: \"tokens\", table: \"embed_tokens.weight\"),
                    \"half\": cast(x: \"x\", dtype: \"dtype\"), \"out\": add(a: \"x\", b: \"half\") },
            result: \"out\",
        )),");
    let found = warnings(&missing, DType::F32);
    let [warning] = &found[..] else { panic!("{found:?}") };
    assert!(warning.starts_with("tiny.ron:"), "{warning}");
    assert!(
        warning.contains("warning: f32 hides this error of bf16: `add`: operand `b`"),
        "{warning}"
    );
}

/// Specs that ship, and those of the examples, are without warnings under every fixture's config.
#[test]
fn shipped_specs_have_none() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let fixtures = root.join("tests/fixtures");
    let examples = [
        ("granite/multipliers", "new-architecture/granite.ron"),
        ("llama/gqa3", "new-attention/models/sigmoid.ron"),
    ];
    let mut all: Vec<(String, Option<std::path::PathBuf>)> = Vec::new();
    for (fixture, spec) in examples {
        all.push((fixture.to_owned(), Some(root.join("examples").join(spec))));
    }
    let families = Library::default().families().unwrap();
    let family = |s: &Source| Path::new(&*s.file).file_stem().unwrap().to_str().unwrap().to_owned();
    for family in families.iter().map(family).chain(["vectors".to_owned()]) {
        // What has no head has its fixtures in `vectors`.
        for entry in std::fs::read_dir(fixtures.join(&family)).into_iter().flatten().flatten() {
            all.push((format!("{family}/{}", entry.file_name().to_string_lossy()), None));
        }
    }
    for (fixture, spec) in all {
        let files = ModelFiles::folder(fixtures.join(&fixture)).unwrap();
        let model = Model::open(files, spec.as_deref(), &Library::default());
        let model = model.unwrap_or_else(|e| panic!("{fixture}: {e}"));
        // Encodings are known further up.
        if model.config.value("quantization_config").is_some() {
            continue;
        }
        for dtype in [DType::F32, DType::Bf16] {
            let options = LowerOptions { dtype: Some(dtype), max_length: Some(64), rows: Sym::B };
            let lowered = model.lower(options, []).unwrap_or_else(|e| panic!("{fixture}: {e}"));
            let found: Vec<_> = lowered.warnings.iter().map(ToString::to_string).collect();
            assert!(found.is_empty(), "{fixture} in {dtype}: {}", found.join("\n"));
        }
    }
}
