//! Each mistake gets file, line, column, a caret on the right place, what was expected, and the
//! nearest name. Read the snapshot as a user would.

use std::fmt::Write;

use crate::{CONFIG, check, lower_text};

/// A correct spec, small enough to see every caret in.
pub(crate) const SPEC: &str = r#"Family(
    name: "tiny",
    doc: "A linear map and a rotation a layer.",
    architectures: ["Tiny"],
    defaults: { "tie_word_embeddings": false },
    params: {
        "hidden": "hidden_size",
        "vocab": "vocab_size",
        "heads": "num_attention_heads",
        "head_dim": "head_dim ?? hidden_size / num_attention_heads",
        "eps": "rms_norm_eps",
        "tied": "tie_word_embeddings",
        "num_layers": "num_hidden_layers",
        "layer_types": "layer_types",
    },
    checks: { "more than 64 heads": "heads <= 64" },
    blocks: {
        "norm": File("blocks/rmsnorm.ron"),
        "add_positions": File("blocks/add_positions.ron"),
        "embedder": File("blocks/embed.ron"),
        "lm_head": File("blocks/lm_head.ron"),
        "rotary": File("blocks/rope.ron"),
        "mixer": Inline((
            doc: "A linear map with a norm.",
            inputs: ["x"],
            params: { "width": "hidden", "norm": true },
            weights: {
                "proj.weight": (shape: ["width", "hidden"]),
                "norm.weight": (shape: ["hidden"], when: "norm"),
            },
            body: {
                "y": rmsnorm(x: "x", w: "norm.weight", eps: "eps", when: "norm"),
                "z": linear(x: "y", w: "proj.weight"),
                "h": reshape(x: "z", shape: ["T", "heads", "head_dim"]),
                "r": rotary(x: "h", positions: "positions"),
                "f": reshape(x: "r", shape: ["T", "hidden"]),
                "g": map(a: "f", expr: "max(a, 0) * 2"),
                "out": add(a: "g", b: "x"),
            },
            result: "out",
        )),
    },
    embed: (prefix: "model.", body: { "x": embedder(tokens: "tokens") }, gives: ["x"]),
    layers: (
        count: "num_layers",
        kind: "layer_types[layer]",
        kinds: {
            "full_attention": (
                prefix: "model.layers.{layer}.",
                body: { "x": mixer(x: "x") },
                gives: ["x"],
            ),
            "sliding_attention": (
                prefix: "model.layers.{layer}.",
                body: { "x": mixer(at: "mixer.", x: "x", norm: false) },
                gives: ["x"],
            ),
        },
    ),
    head: (body: { "logits": lm_head(x: "x") }, gives: ["logits"]),
)"#;

#[test]
fn the_spec_is_correct() {
    check(&lower_text(SPEC, CONFIG).unwrap_or_else(|e| panic!("{e}")));
}

/// Renders the error that each change of the spec (or, second, of the config) leads to.
fn report(mistakes: &[(&str, &str, &str)], in_config: bool) -> String {
    let mut out = String::new();
    for (what, from, to) in mistakes {
        let (mut text, mut config) = (SPEC.to_owned(), CONFIG.to_owned());
        let changed = if in_config { &mut config } else { &mut text };
        assert!(changed.contains(from), "{what}: nothing to replace");
        *changed = changed.replacen(from, to, 1);
        let error = match lower_text(&text, &config) {
            Ok(module) => panic!("{what} is no error:\n{}", infernum_ir::text::print(&module)),
            Err(e) => e.to_string(),
        };
        writeln!(out, "## {what}: `{from}` -> `{to}`\n{error}\n").unwrap();
    }
    out
}

#[test]
fn mistakes_in_names() {
    let mistakes = [
        ("op", "linear(x", "linaer(x"),
        ("block", "mixer(x:", "mixed(x:"),
        ("operand", "add(a: \"g\"", "add(x: \"g\""),
        ("attribute", "shape: [\"T\", \"hidden\"]", "shpae: [\"T\", \"hidden\"]"),
        ("block argument", "norm: false", "nrom: false"),
        ("value", "x: \"y\"", "x: \"yy\""),
        ("weight", "w: \"proj.weight\"", "w: \"prj.weight\""),
        ("parameter", "eps: \"eps\"", "eps: \"epz\""),
        ("parameter inside an expression", "\"heads <= 64\"", "\"1 < heads_ && heads <= 64\""),
        ("function", "max(a, 0)", "maxi(a, 0)"),
        ("name in a map", "max(a, 0)", "max(b, 0)"),
        ("field", "prefix: \"model.\", ", "prefiks: \"model.\", "),
        ("field of a weight", "when: \"norm\"),", "whn: \"norm\"),"),
        ("variant", "Inline((", "Inlined(("),
        ("block file", "blocks/rope.ron", "blocks/rop.ron"),
        ("base", "doc: \"A linear map and", "base: \"lama.ron\", doc: \"A linear map and"),
        ("dtype", "w: \"proj.weight\")", "w: \"proj.weight\", dtype: \"bf61\")"),
        ("enum", "positions: \"positions\")", "positions: \"positions\", style: \"'neo'\")"),
        ("written twice", "\"z\": linear", "\"y\": linear"),
        ("argument twice", "add(a: \"g\"", "add(a: \"g\", a: \"g\""),
        ("name of a weight", "\"proj.weight\": (", "\"z\": ("),
        (
            "one tensor, two shapes",
            "\"norm.weight\": (shape: [\"hidden\"], when: \"norm\"),",
            "\"norm.weight\": (shape: [\"hidden\"], same_as: \"'model.layers.{layer}.proj.weight'\"),",
        ),
        ("name that is no name", "\"z\": linear", "\"y, proj.weight\": linear"),
        ("a name that no text can hold", "\"z\": linear", "\"z z\": linear"),
        ("placeholder", "prefix: \"model.layers.{layer}.\"", "prefix: \"model.layers.{n}.\""),
        ("placeholder in a weight", "\"norm.weight\": (", "\"norm.{i}.weight\": ("),
        ("parameter in a name that is no number", "at: \"mixer.\"", "at: \"{layer_types}.\""),
        ("parameter in a name that is no whole number", "at: \"mixer.\"", "at: \"{eps}.\""),
        ("placeholder near a parameter", "at: \"mixer.\"", "at: \"{num_layer}.\""),
        ("placeholder in a call", "at: \"mixer.\"", "at: \"mixer.{layer.\""),
        (
            "layer where there is none",
            "embed: (prefix: \"model.\"",
            "embed: (prefix: \"model.{layer}.\"",
        ),
        (
            "placeholder in another tensor's name",
            "(shape: [\"hidden\"], when: \"norm\"),",
            "(shape: [\"hidden\"], when: \"norm\", same_as: \"'norm.{n}'\"),",
        ),
        ("expert without a stack", "\"proj.weight\": (", "\"proj.{expert}.weight\": ("),
        (
            "stack without an expert",
            "(shape: [\"width\", \"hidden\"])",
            "(shape: [\"width\", \"hidden\"], stack: 2)",
        ),
        ("tensor to rename", "at: \"mixer.\"", "rename: { \"prj\": \"dense\" }"),
        ("names that are none", "at: \"mixer.\"", "rename: \"dense\""),
        ("placeholder in a new name", "at: \"mixer.\"", "rename: { \"proj\": \"{n}\" }"),
        ("key of the config", "count: \"num_layers\"", "count: \"num_hidden_layers\""),
        ("result", "result: \"out\"", "result: \"ouch\""),
        ("kind", "\"layer_types[layer]\"", "\"'full_atention'\""),
    ];
    insta::assert_snapshot!(report(&mistakes, false));
}

#[test]
fn mistakes_in_structure() {
    let mistakes = [
        ("missing operand", "add(a: \"g\", b: \"x\")", "add(a: \"g\")"),
        ("missing attribute", ", expr: \"max(a, 0) * 2\"", ""),
        ("missing block operand", "mixer(x: \"x\")", "mixer()"),
        ("missing field", "    result: \"out\",\n", ""),
        ("weight that is a list", "(shape: [\"width\", \"hidden\"])", "[\"width\", \"hidden\"]"),
        (
            "cache that is read before it is written",
            "            body: {\n                \"y\"",
            "            state: { \"k\": (heads: \"heads\", dim: \"head_dim\") },\n            \
             body: {\n                \"old\": kv_read(state: \"k\"), \"y\"",
        ),
        (
            "an error in a block's block",
            "\"h\": reshape(x: \"z\", shape: [\"T\", \"heads\", \"head_dim\"])",
            "\"h\": reshape(x: \"z\", shape: [\"T\", \"heads * head_dim\"])",
        ),
        ("missing part", "    head: (body", "    // head: (body"),
        ("operand that is a number", "b: \"x\")", "b: 1)"),
        ("operand that is left out", "\"hidden\"]),", "\"hidden\"], when: false),"),
        (
            "`when` without an operand",
            "\"y\": rmsnorm(x: \"x\", ",
            "\"t\": table(len: 2, expr: \"i\", when: false), \"y\": rmsnorm(x: \"x\", ",
        ),
        (
            "`when` that is a number",
            "eps: \"eps\", when: \"norm\"",
            "eps: \"eps\", when: \"heads\"",
        ),
        ("`when` that is a list", "eps: \"eps\", when: \"norm\"", "eps: \"eps\", when: [true]"),
        ("attribute type", "eps: \"eps\"", "eps: \"tied\""),
        ("attribute range", "eps: \"eps\"", "eps: true"),
        ("list where one is wanted", "eps: \"eps\"", "eps: [1]"),
        ("no dimension", "[\"T\", \"hidden\"])", "[\"T * T\", \"hidden\"])"),
        ("no whole number", "shape: [\"width\"", "shape: [\"width / 3\""),
        ("shapes", "\"width\": \"hidden\"", "\"width\": \"hidden + 1\""),
        ("shapes between ops", "b: \"x\")", "b: \"h\")"),
        ("two values from one op", "\"z\": linear", "\"z, u\": linear"),
        ("two values from a block", "\"r\": rotary", "\"r, s\": rotary"),
        (
            "block that calls itself",
            "\"r\": rotary(x: \"h\", positions: \"positions\")",
            "\"r\": mixer(x: \"x\")",
        ),
        (
            "`gives` of a layer",
            "gives: [\"x\"],\n            ),",
            "gives: [\"x\", \"tokens\"],\n            ),",
        ),
        ("`gives` of the head", "gives: [\"logits\"]", "gives: [\"logit\"]"),
        ("two logits", "gives: [\"logits\"]", "gives: [\"logits\", \"x\"]"),
        ("no kind for layers of two", "kind: \"layer_types[layer]\",", ""),
        ("too many layers", "count: \"num_layers\"", "count: 1000000"),
        ("a huge tensor", "\"width\": \"hidden\"", "\"width\": 1e15"),
        (
            "a huge table",
            "\"y\": rmsnorm(x: \"x\", ",
            "\"t\": table(len: 1e12, expr: \"i\"), \"y\": rmsnorm(x: \"x\", ",
        ),
    ];
    insta::assert_snapshot!(report(&mistakes, false));
}

#[test]
fn mistakes_in_text() {
    let mistakes = [
        ("unbalanced parentheses in an expression", "max(a, 0) * 2", "(max(a, 0) * 2"),
        ("operator without an operand", "hidden_size / num_attention_heads", "hidden_size / "),
        ("chained comparison", "\"heads <= 64\"", "\"1 < heads <= 64\""),
        ("text that is not closed", "\"heads <= 64\"", "\"heads == 'a\""),
        ("wrong number of arguments", "max(a, 0)", "max(a)"),
        ("no number", "max(a, 0) * 2", "max(a, 0) * 2.0.0"),
        ("unbalanced parentheses", "add(a: \"g\", b: \"x\"),", "add(a: \"g\", b: \"x\","),
        (
            "unbalanced braces",
            "        \"tied\": \"tie_word_embeddings\",",
            "        }, {\"tied\": \"tie_word_embeddings\",",
        ),
        ("quote left open", "\"vocab\": \"vocab_size\"", "\"vocab\": \"vocab_size"),
        ("missing comma", "inputs: [\"x\"],", "inputs: [\"x\"]"),
        ("missing colon", "\"vocab\": \"vocab_size\"", "\"vocab\" \"vocab_size\""),
        ("call without quotes around its name", "\"z\": linear", "z: linear"),
        ("call without parentheses", "mixer(x: \"x\")", "mixer"),
        ("call with a brace", "mixer(x: \"x\")", "{ \"mixer\": \"x\" }"),
        ("argument without a name", "mixer(x: \"x\")", "mixer(\"x\")"),
        (
            "list for a map",
            "checks: { \"more than 64 heads\": \"heads <= 64\" }",
            "checks: [\"heads <= 64\"]",
        ),
        ("number for a text", "name: \"tiny\"", "name: 3"),
        ("text for a list", "inputs: [\"x\"]", "inputs: \"x\""),
        ("list for a parameter", "\"vocab\": \"vocab_size\"", "\"vocab\": [1, 2]"),
        ("escape", "\"heads <= 64\"", "\"heads\\n <= 64\""),
        ("field twice", "name: \"tiny\",", "name: \"tiny\", name: \"tiny\","),
        ("more after the end", "gives: [\"logits\"]),\n)", "gives: [\"logits\"]),\n))"),
    ];
    insta::assert_snapshot!(report(&mistakes, false));
}

#[test]
fn configs_that_do_not_fit() {
    let mistakes = [
        ("missing key", "\"hidden_size\"", "\"hiden_size\""),
        ("missing key in an expression", "\"num_attention_heads\"", "\"attention_heads\""),
        ("missing key for an attribute", "\"rms_norm_eps\"", "\"norm_eps\""),
        ("text for a number", "\"hidden_size\": 8", "\"hidden_size\": \"8\""),
        (
            "text for a number of layers",
            "\"num_hidden_layers\": 2",
            "\"num_hidden_layers\": \"two\"",
        ),
        ("number for a flag", "\"tied\": null", "\"tie_word_embeddings\": 1"),
        ("fraction", "\"vocab_size\": 11", "\"vocab_size\": 11.5"),
        ("negative", "\"vocab_size\": 11", "\"vocab_size\": -11"),
        (
            "a rotation that does not exist",
            "\"tied\": null",
            "\"rope_scaling\": {\"type\": \"spiral\"}",
        ),
        ("a rotation of no size", "\"hidden_size\": 8", "\"hidden_size\": 6"),
        (
            "a key of the rotation is missing",
            "\"tied\": null",
            "\"rope_parameters\": {\"rope_type\": \"llama3\", \"factor\": 8}",
        ),
        (
            "a factor that is missing",
            "\"tied\": null",
            "\"rope_scaling\": {\"type\": \"longrope\"}",
        ),
        ("a scaling that is no object", "\"tied\": null", "\"rope_scaling\": \"linear\""),
        ("an unknown kind of layer", "\"sliding_attention\"", "\"sliding_atention\""),
        ("too few kinds", ", \"sliding_attention\"", ""),
        (
            "kinds that are no list",
            "[\"full_attention\", \"sliding_attention\"]",
            "\"full_attention\"",
        ),
        ("too many layers", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1e9"),
        (
            "more than the family can do",
            "\"num_attention_heads\": 2",
            "\"num_attention_heads\": 128",
        ),
    ];
    insta::assert_snapshot!(report(&mistakes, true));
}

/// An error in a block says so where the block is, not where it is called.
#[test]
fn mistakes_in_what_the_head_gives() {
    let head = "\"lm_head\": File(\"blocks/lm_head.ron\")";
    let inline = |rows: &str, logits: &str| {
        format!(
            "\"lm_head\": Inline((doc: \"\", inputs: [\"x\"], weights: {{ \"w\": (shape: [{rows}, \"hidden\"]) }}, \
             body: {{ \"rows\": gather_rows(x: \"x\", rows: \"output_rows\"), {logits} }}, result: \"logits\"))"
        )
    };
    let linear = "\"logits\": linear(x: \"rows\", w: \"w\")";
    let picked = "\"all\": linear(x: \"rows\", w: \"w\"), \"logits\": argmax(x: \"all\")";
    let wide = inline("\"vocab + 1\"", linear);
    let tokens = inline("\"vocab\"", picked);
    let small = "\"logits\": linear(x: \"rows\", w: \"w\", dtype: \"f8e4m3\")";
    let small = inline("\"vocab\"", small);
    let right = inline("\"vocab\"", linear);
    lower_text(&SPEC.replace(head, &right), CONFIG).unwrap_or_else(|e| panic!("{e}"));
    let table = "embedding(ids: \"positions\", table: \"proj.weight\")";
    let logits = "expected the head to give logits, f32, bf16 or f16 [B, vocabulary], found ";
    let mistakes = [
        ("lm_head(x: \"x\")", "mixer(x: \"x\")", format!("{logits}bf16[T, 8]")),
        (head, &wide, "logits of 12 tokens, but ids of tokens pick from a table of 11".to_owned()),
        (head, &tokens, format!("{logits}u32[B]")),
        (head, &small, format!("{logits}f8e4m3[B, 11]")),
        (
            "linear(x: \"y\", w: \"proj.weight\")",
            table,
            "expected a --max-length of at most 8".to_owned(),
        ),
    ];
    for (from, to, expected) in mistakes {
        let text = SPEC.replacen(from, to, 1);
        assert_ne!(text, SPEC, "nothing to replace: {from}");
        let error = lower_text(&text, CONFIG).expect_err(&expected).to_string();
        assert!(error.contains("tiny.ron:") && error.contains(&expected), "{expected}: {error}");
    }
}

#[test]
fn errors_in_shared_blocks() {
    let config = CONFIG.replace("\"silu\"", "\"sliu\"");
    let library = infernum_frontend_hf::spec::Library::default();
    let llama = library.file("llama.ron").unwrap();
    let activation = crate::lowered(&llama, &library, &config, 64).unwrap_err();
    let heads = CONFIG.replace(
        "\"num_attention_heads\": 2",
        "\"num_attention_heads\": 2, \"num_key_value_heads\": 3",
    );
    let heads = crate::lowered(&llama, &library, &heads, 64).unwrap_err();
    insta::assert_snapshot!(format!("{activation}\n\n{heads}"));
}
