//! The text form reads back.

use infernum_ir::text::{parse, parse_with, print, print_graph};
use infernum_ir::{
    DType, Graph, Loc, Module, Node, NodeKind, Param, TensorType, WeightRef, verify,
};
use proptest::prelude::*;

use crate::random;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn random_graphs_read_back(seeds in prop::collection::vec(any::<u64>(), 0..40)) {
        let module = random::module(&seeds);
        if let Err(e) = verify(&module) {
            return Err(TestCaseError::fail(e.to_string()));
        }
        let text = print(&module);
        let back = parse_with(&text, "back", &random::ops());
        let back = back.map_err(|e| TestCaseError::fail(e.to_string()))?;
        prop_assert_eq!(&back, &module, "{}", text);
        prop_assert_eq!(print(&back), text);
    }

    #[test]
    fn any_name_reads_back(weight in ".{0,12}", file in ".{0,12}", name in "[a-zA-Z0-9éß_.-]{1,9}") {
        reads_back(&weight, &file, &name)?;
    }

    #[test]
    fn no_text_panics(text in "(module|graph|return|schedule|%a|%b|=|[(){}:,@_\"\n ]|carry 0|f32|\\[T\\]|silu|const|state k|.){0,60}") {
        if let Err(e) = parse(&text, "any") {
            prop_assert!(!e.to_string().is_empty());
        }
    }
}

fn one_weight(weight: &str, file: &str, name: &str) -> Module {
    let mut graph = Graph::new(name);
    let node = Node {
        kind: NodeKind::Param(Param::Weight(WeightRef { name: weight.into(), stack: None })),
        names: vec![name.into()],
        types: vec![TensorType::weight(DType::F32, &[4]).into()],
        loc: Some(Loc { file: file.into(), line: 1, col: u32::MAX }),
    };
    let w = graph.add_node(node, &[]);
    graph.set_results(vec![w]);
    Module { name: name.into(), graphs: vec![graph], schedule: Vec::new() }
}

fn reads_back(weight: &str, file: &str, name: &str) -> Result<(), TestCaseError> {
    let module = one_weight(weight, file, name);
    let text = print(&module);
    let back = parse(&text, "back").map_err(|e| TestCaseError::fail(e.to_string()))?;
    prop_assert_eq!(back, module, "{}", text);
    Ok(())
}

#[test]
fn odd_names_read_back() {
    for odd in [
        "",
        "\r\n\t\0",
        "a\u{301}\u{301}",
        "\u{7f}\u{85}\u{2028}",
        "\"",
        "\\",
        "'",
        " a",
        "a ",
        "x:1:2",
        "C:\\m.ron",
        "// a",
        "\u{a0}",
    ] {
        for name in ["-", ".", "_", "é", "return", "weight", "0", "module"] {
            reads_back(odd, odd, name).unwrap();
        }
    }
}

#[test]
fn floats_read_back() {
    let each = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        1e-4,
        9.9e-5,
        1e15,
        1e16,
        f64::MAX,
        f64::MIN_POSITIVE,
        5e-324,
        0.1 + 0.2,
    ];
    for by in each {
        let text = format!(
            "module m\ngraph g {{\n  %x = carry 0 : f32[T]\n  %y = scale(%x) {{by: {}}} : f32[T]\n  return %y\n}}\n",
            infernum_ir::Attr::Float(by)
        );
        let module = parse(&text, "m").unwrap();
        let NodeKind::Op { attrs, .. } = &module.graphs[0].node(1).kind else { panic!() };
        assert_eq!(attrs[0], infernum_ir::Attr::Float(by));
    }
}

#[test]
fn the_grammar_of_the_documentation_parses() {
    let doc = include_str!("../../src/text/mod.rs");
    let example: String = doc
        .lines()
        .skip_while(|l| !l.starts_with("//! module"))
        .take_while(|l| !l.starts_with("//! ```"))
        .map(|l| l.trim_start_matches("//!").to_owned() + "\n")
        .collect();
    let ops = random::ops();
    let module = parse_with(&example, "text/mod.rs", &ops).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(parse_with(&print(&module), "again", &ops).unwrap(), module);
    assert_eq!(module.schedule.len(), 4);
    assert!(print_graph(&module.graphs[0]).starts_with("graph decoder {\n"));
}

#[test]
fn a_long_line_is_cut_around_the_mistake() {
    let line = format!("module {} {}", "a".repeat(200), "é!".repeat(5000));
    let error = parse(&line, "long.ir").unwrap_err();
    assert_eq!((error.line, error.col), (1, 209));
    assert!(error.to_string().len() < 2000, "{error}");
    let error = parse(&format!("module {}", "a".repeat(10_000)), "long.ir").unwrap_err();
    assert!(error.message.contains("at most 256 bytes, found 10000"), "{error}");
}

#[test]
fn offsets_are_those_of_line_and_column() {
    use infernum_ir::SourceError;
    let text = "aé\nbü c\n";
    for (at, _) in text.char_indices().filter(|(_, c)| *c != '\n') {
        let e = SourceError::new("f", text, at..at + 1, "");
        assert_eq!(SourceError::offset(text, e.line, e.col), at);
    }
    assert_eq!(SourceError::offset(text, 99, 99), text.len());
    // An error at the very end, on the empty last line, still prints.
    assert!(
        SourceError::new("f", text, text.len()..text.len() + 1, "end")
            .to_string()
            .contains("f:3:1")
    );
}
