//! What a hostile spec is refused for, before it costs more than its own length. (Peak memory is
//! measured by the `spec` fuzz target.)

use std::path::Path;

use infernum_frontend_hf::spec::Library;
use infernum_frontend_hf::{Config, LowerOptions, Model};
use infernum_ir::Sym;

use crate::{CONFIG, lower_text};

fn refused(spec: &str, why: &str) {
    match lower_text(spec, CONFIG) {
        Ok(_) => panic!("expected: {why}"),
        Err(e) => assert!(e.to_string().contains(why), "expected {why}, found {e}"),
    }
}

/// Entries of a map.
fn entries(n: usize, entry: &dyn Fn(usize) -> String) -> String {
    (0..n).map(entry).collect::<Vec<_>>().join(", ")
}

/// A family on Llama's, with these blocks and this body for its layers.
fn family(params: &str, blocks: &str, body: &str) -> String {
    format!(
        r#"Family(name: "hostile", doc: "", base: "llama.ron", architectures: [],
        params: {{ {params} }},
        blocks: {{ {blocks} }},
        layers: (count: 1, kinds: {{ "decoder": (body: {{ {body} }}, gives: ["x"]) }}),
    )"#
    )
}

/// `b0` adds `x` to itself; each block calls the one before twice.
fn doubling(inner: &str) -> String {
    let block = |i: usize, body: &str| {
        format!(r#""b{i}": Inline((doc: "", inputs: ["x"], body: {{ {body} }}, result: "z")),"#)
    };
    let twice = |i: usize| format!(r#""y": b{i}(x: "x"), "z": b{i}(x: "y")"#);
    (1..15).map(|i| block(i, &twice(i - 1))).fold(block(0, inner), |a, b| a + &b)
}

const UNFOLDS: &str = "unfolds to far more than its text";

#[test]
fn blocks_that_double_each_other() {
    let body = r#""x": b14(x: "x")"#;
    refused(&family("", &doubling(r#""z": add(a: "x", b: "x")"#), body), UNFOLDS);
    // Even where nothing is added to the graph.
    let nothing = r#""z": add(a: "x", b: "x", when: false)"#;
    refused(&family("", &doubling(nothing), body), UNFOLDS);
}

#[test]
fn values_that_are_repeated() {
    let long = "x".repeat(40_000);
    let copies = entries(1000, &|i| format!(r#""p{i}": "long""#));
    refused(&family(&format!(r#""long": "'{long}'", {copies}"#), "", ""), UNFOLDS);
    let pairs = (0..60).map(|_| "long == long").collect::<Vec<_>>().join(" && ");
    refused(&family(&format!(r#""long": "'{long}'", "p": "{pairs}""#), "", ""), "too long to work");
    let list = (0..200).map(|i| i.to_string()).collect::<Vec<_>>().join(", ");
    let tables = entries(600, &|i| {
        format!(r#""t{i}": table(len: 4, expr: "list[i]+list[i]+list[i]+list[i]")"#)
    });
    refused(&family(&format!(r#""list": "[{list}]""#), "", &tables), UNFOLDS);
}

#[test]
fn sizes_and_names() {
    let deep = format!(r#""p": "{}1{}""#, "(".repeat(5000), ")".repeat(5000));
    refused(&family(&deep, "", ""), "nested deeper");
    refused(&"Family(".repeat(5000), "");
    refused(&format!("Family(name: {}", "[".repeat(5000)), "");
    refused(&" ".repeat(200_000), "not a spec");
    let long = "n".repeat(5000);
    let block = |weights: &str, body: &str| {
        format!(
            r#""b": Inline((doc: "", inputs: ["x"], weights: {{ {weights} }},
                body: {{ {body} }}, result: "x"))"#
        )
    };
    let call = |at: &str| format!(r#""x": b(at: "{at}", x: "x")"#);
    refused(&family("", &block("", ""), &call(&long)), "too long");
    let weight = format!(r#""{long}": (shape: [1])"#);
    refused(&family("", &block(&weight, ""), &call("")), "too long");
    let name = format!(r#""{long}": add(a: "x", b: "x")"#);
    refused(&family("", &block("", &name), &call("")), "expected a name");
    let rank = r#""w": (shape: [1, 1, 1, 1, 1, 1, 1, 1, 1])"#;
    refused(&family("", &block(rank, ""), &call("")), "at most 8 dimensions");
    let files = entries(100, &|i| format!(r#""f{i}": File("blocks/{}rope.ron")"#, "./".repeat(i)));
    refused(&family("", &files, ""), "at most 64 block files");
}

/// A stack is one tensor of the graph, but many names to look up.
#[test]
fn stacks_are_bounded() {
    let block = |n: &str| {
        format!(
            r#""b": Inline((doc: "", inputs: ["x"],
        weights: {{ "e.{{expert}}.w": (shape: ["hidden", "hidden"], stack: {n}) }},
        body: {{ "y": linear(x: "x", w: "e.{{expert}}.w") }}, result: "y"))"#
        )
    };
    refused(&family("", &block("1e9"), r#""x": b(x: "x")"#), "at most 65536 tensors");
    refused(&family("", &block("256"), r#""x": b(x: "x")"#), "`linear`: operand `w`");
}

/// What bounds specs leaves room for released models, though each of their layers has a graph of its own.
#[test]
fn released_sizes_lower() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/shapes");
    let shapes = std::fs::read_dir(folder).expect("the shapes are committed");
    for path in shapes.map(|entry| entry.expect("a readable folder").path()) {
        let json = std::fs::read(&path).expect("a readable file");
        let config = Config::parse(&path.display().to_string(), &json).expect("a config");
        let model = Model::from_config(config, None, &Library::default());
        let model = model.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let options = LowerOptions { dtype: None, max_length: None, rows: Sym::B };
        model.lower(options, []).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    }
}
