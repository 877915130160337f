//! Each kind of finding, and how findings are shown.

use infernum_ir::text::parse;
use infernum_ir::{
    CallSite, DType, Graph, Module, Node, NodeKind, Op, Param, TensorType, ValueId, verify,
};

/// A module of one graph, called for layer 0.
fn module(body: &str) -> Module {
    let text = format!("module m\n\ngraph g {{\n{body}\n}}\n\nschedule g 0..1\n");
    parse(&text, "m.ir").unwrap_or_else(|e| panic!("{e}"))
}

fn findings(module: &Module) -> Vec<String> {
    verify(module)
        .err()
        .map_or_else(Vec::new, |e| e.findings.into_iter().map(|f| f.message).collect())
}

#[test]
fn each_kind_of_finding() {
    for (body, expected) in [
        // Types.
        (
            "%w = weight \"w\" : const f32[4]\n%y = silu(%w) : f32[4]\nreturn %y",
            "expected type const f32[4], found f32[4]",
        ),
        (
            "%w = weight \"w\" : const f32[4]\n%y = add(%w, _) : const f32[4]",
            "`add` needs operand `b`",
        ),
        (
            "%w = weight \"w\" : const u32[4]\n%y = silu(%w) : const u32[4]",
            "operand `x`: expected a floating-point element type, found const u32[4]",
        ),
        (
            "%w = weight \"w\" : const f32[4]\n%y = mask(%w) {window: none} : const f32[4]",
            "at least 2 dimension(s)",
        ),
        (
            "%w = weight \"w\" : const f32[4, 4]\n%y = mask(%w) {window: none} : const f32[4, 4]",
            "expected ragged scores [H, T, S]",
        ),
        // Attributes.
        (
            "%w = weight \"w\" : const f32[4]\n%y = slice(%w) {axis: 0, start: -1, len: 1} : const f32[1]",
            "attribute `start`: expected a non-negative integer, found -1",
        ),
        (
            "%w = weight \"w\" : const f32[4]\n%y = reduce(%w) {by: least, axis: 0} : const f32[1]",
            "attribute `by`: expected one of sum, mean, max, found least",
        ),
        (
            "%w = weight \"w\" : const f32[4]\n%y = softcap(%w) {cap: 0} : const f32[4]",
            "attribute `cap`: expected a number that is not zero",
        ),
        (
            "%w = weight \"w\" : const f32[4]\n%y = map(%w, _, _) {expr: \"a + b\"} : const f32[4]",
            "`b` is not an argument here; known: a",
        ),
        (
            "%w = weight \"w\" : const f32[4]\n%y = cast(%w) {dtype: u32} : const u32[4]",
            "attribute `dtype`: expected a float type",
        ),
        // Parameters.
        ("%t = step tokens : i32[T]", "expected u32[T], found i32[T]"),
        ("%t = step positions : i32[S]", "expected i32[T], found i32[S]"),
        ("%t = step context_positions : u32[S]", "expected i32[S], found u32[S]"),
        ("%t = step output_rows : u32[]", "expected u32[B] or u32[T], found u32[]"),
        (
            "%w = weight \"w\" : f32[4]",
            "expected a const tensor of constant dimensions, found f32[4]",
        ),
        ("%w = weight \"w\" : const f32[T]", "expected a const tensor of constant dimensions"),
        ("%w = weight \"w\" : state f32[1, 2]", "expected a const tensor, found state f32[1, 2]"),
        ("%w = weight \"w\" stack 2 : const f32[2, 4]", "`stack` with a name that holds {expert}"),
        ("%w = weight \"w{expert}\" : const f32[2, 4]", "`stack` with a name that holds {expert}"),
        ("%w = weight \"w{expert}\" stack 3 : const f32[2, 4]", "expected a first axis of 3"),
        ("%k = state k : f32[1, 2]\nreturn %k", "expected a state, found f32[1, 2]"),
        (
            "%a, %b = weight \"w\" : const f32[4], const f32[4]",
            "expected one name and one type, found 2 and 2",
        ),
        // States.
        ("%k = state k : state f32[1, 2]", "the last version of `%k` is not returned"),
        (
            "%k = state k : state f32[1, 2]\n%l = state k : state f32[1, 2]\nreturn %k, %l",
            "plane `k` is a parameter twice",
        ),
        (
            "%k = state k : state f32[1, 2]\n%x = kv_read(%k) : f32[S, 1, 2]\n%y = kv_write(%k, %x) : state f32[1, 2]\nreturn %y",
            "operand `x`: expected rows of state f32[1, 2], found f32[S, 1, 2]",
        ),
        ("%c = carry 0 : const f32[2]", "expected a tensor that is not const, found const f32[2]"),
        // Schedule.
        (
            "%c = carry 0 : f32[T, 2]\nreturn %c",
            "expected f32[T, 2] from `the start`, which carries nothing",
        ),
    ] {
        let found = findings(&module(body));
        assert!(found.iter().any(|m| m.contains(expected)), "{body}\n{found:#?}");
    }
}

const WRITES: &str = "
%t = step tokens : u32[T]
%w = weight \"w\" : const f32[9, 2]
%e = embedding(%t, %w) : f32[T, 2]
%x = reshape(%e) {shape: [T, 1, 2]} : f32[T, 1, 2]
%k = state k : state f32[1, 2]
%k1 = kv_write(%k, %x) : state f32[1, 2]
";

#[test]
fn states_are_threaded() {
    let with = |rest: &str| findings(&module(&format!("{WRITES}{rest}")));
    assert_eq!(with("return %e, %k1"), [""; 0]);
    assert_eq!(with("return %e"), ["the last version of `%k` is not returned"]);
    assert_eq!(with("return %e, %k, %k1"), ["`%k` is returned but is not the last version"]);
    assert_eq!(
        with("%k2 = kv_write(%k, %x) : state f32[1, 2]\nreturn %k1, %k2"),
        ["state version `%k` has 2 writers"]
    );
    assert_eq!(
        with("%k2 = kv_write(%k1, %x) : state f32[1, 2]\nreturn %k1"),
        [
            "`%k1` is returned but is not the last version",
            "the last version of `%k` is not returned"
        ]
    );
}

#[test]
fn calls_outside_the_layers_have_no_layer() {
    let text = "module m
graph g {
  %w = weight \"l.{layer}.w\" : const f32[2]
  %k = state k : state f32[1, 2]
  return %k
}
schedule g";
    assert_eq!(
        findings(&parse(text, "m.ir").unwrap()),
        [
            "the name has {layer}, found a call without one",
            "a KV-cache plane belongs to a layer, found a call without one"
        ]
    );
}

#[test]
fn several_findings_are_shown_under_their_statements() {
    let text = "module m

graph first {
  %t = step tokens : i32[T] @ models/m.ron:3:9
  %w = weight \"w\" : const f32[9, 2]
  %e = embedding(%t, %w) : f32[T, 3] @ models/m.ron:4:9
  %s = silu(%e) : bf16[T, 3]
  %k = state k : state f32[1, 2]
  return %s
}

graph last {
  %x = carry 0 : f32[T, 2]
  %y = rmsnorm(%x, _) {eps: 1e-6, offset: 0} : f32[T, 2]
  return %y
}

schedule first 0..2, last
";
    let error = verify(&parse(text, "m.ir").unwrap()).unwrap_err();
    insta::assert_snapshot!(error, @r#"
    the module is not well formed (5 finding(s)):
    module m

    graph first {
      %t = step tokens : i32[T] @ models/m.ron:3:9
      // ^ error: expected u32[T], found i32[T]
      %w = weight "w" : const f32[9, 2]
      %e = embedding(%t, %w) : f32[T, 3] @ models/m.ron:4:9
      // ^ error: expected type f32[T, 2], found f32[T, 3]
      %s = silu(%e) : bf16[T, 3]
      // ^ error: expected type f32[T, 3], found bf16[T, 3]
      %k = state k : state f32[1, 2]
      // ^ error: the last version of `%k` is not returned
      return %s
    }

    graph last {
      %x = carry 0 : f32[T, 2]
      // ^ error: expected f32[T, 2] from `first`, which carries bf16[T, 3]
      %y = rmsnorm(%x, _) {eps: 1e-6, offset: 0} : f32[T, 2]
      return %y
    }

    schedule first 0..2, last
    "#);
    // The dump is IR text with comments: it reads back.
    let dump: String = error.to_string().lines().skip(1).map(|l| l.to_owned() + "\n").collect();
    assert_eq!(parse(&dump, "dump").unwrap(), parse(text, "m.ir").unwrap());
}

#[test]
fn many_findings_are_cut() {
    let lines: Vec<_> = (0..1000).map(|i| format!("%w{i} = weight \"w\" : f32[2]")).collect();
    let error = verify(&module(&lines.join("\n"))).unwrap_err();
    assert_eq!(error.findings.len(), 256);
    assert!(error.to_string().contains("256 finding(s), and maybe more"));
}

/// What no text can hold, but a pass may build by mistake.
#[test]
fn graphs_built_wrong_are_reported() {
    let ty = || TensorType::act(DType::F32, [4.into()]).into();
    let node = |kind, names: &[&str], types| Node {
        kind,
        names: names.iter().map(|n| (*n).to_owned()).collect(),
        types,
        loc: None,
    };
    let silu = || NodeKind::Op { op: Op::find("silu").unwrap(), attrs: Vec::new() };
    let carry = || NodeKind::Param(Param::Carry(0));
    let of = |graph: Graph| {
        let schedule = Vec::new();
        findings(&Module { name: "m".into(), graphs: vec![graph], schedule })
    };

    let mut graph = Graph::new("g");
    graph.add_node(node(carry(), &["x"], vec![]), &[]);
    assert_eq!(of(graph), ["expected one name and one type, found 1 and 0"]);

    let mut graph = Graph::new("g");
    let x = graph.add_node(node(carry(), &["x"], vec![ty()]), &[]);
    graph.add_node(node(silu(), &["y"], vec![ty()]), &[Some(ValueId { result: 1, ..x })]);
    graph.set_results(vec![ValueId { node: 9, result: 0 }]);
    assert_eq!(
        of(graph),
        [
            "an operand is not a value defined before this one",
            "a result is not a value of this graph"
        ]
    );

    let mut graph = Graph::new("g g");
    graph.add_node(node(carry(), &["x"], vec![ty()]), &[]);
    graph.add_node(node(carry(), &["x"], vec![ty()]), &[]);
    graph.add_node(node(carry(), &[""], vec![ty()]), &[]);
    let found = of(graph);
    assert!(found[0].starts_with("graph \"g g\" is not named with letters"), "{found:?}");
    assert_eq!(found[1], "`%x` is defined twice");
    assert!(found[2].starts_with("value \"\" is not named with letters"), "{found:?}");

    let schedule = vec![CallSite { graph: 7, layer: None }];
    let module = Module { name: "m".into(), graphs: Vec::new(), schedule };
    assert_eq!(findings(&module), ["the schedule calls graph 7, which does not exist"]);
}

#[test]
fn an_operand_defined_later_is_reported() {
    let mut graph = Graph::new("g");
    let ty = || TensorType::act(DType::F32, [4.into()]).into();
    let param = graph.param("x", Param::Carry(0), TensorType::act(DType::F32, [4.into()]));
    let op = Op::find("silu").unwrap();
    let y = graph.call(vec!["y".into()], op, &[Some(param)], Vec::new(), None).unwrap()[0];
    // A node that uses itself cannot be written in text either.
    let node = Node {
        kind: NodeKind::Op { op, attrs: Vec::new() },
        names: vec!["z".into()],
        types: vec![ty()],
        loc: None,
    };
    graph.add_node(node, &[Some(ValueId { node: y.node + 1, result: 0 })]);
    let module = Module { name: "m".into(), graphs: vec![graph], schedule: Vec::new() };
    assert_eq!(findings(&module), ["an operand is not a value defined before this one"]);
}
