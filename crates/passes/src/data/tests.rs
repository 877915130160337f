use std::fmt::Write as _;

use infernum_frontend_hf::spec::Source;

use super::Kernels;

/// The error that a fused op's file gives.
fn fused(text: &str) -> String {
    let mut kernels = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"));
    let sources = vec![Source::new("kernels/fused/mine.ron", text)];
    kernels.define_all(sources).expect_err(text).to_string()
}

/// The error that a file of one rule gives; `{}` in `text` is where most of it stands.
fn rule(fields: &str) -> String {
    let text = format!(
        "[\n    Rule(\n        name: \"mine\",\n        numerics: exact,\n{fields}\n    ),\n]\n"
    );
    let mut kernels = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"));
    let source = Source::new("kernels/rules/mine.ron", &text);
    kernels.add_rules(&source).expect_err(&text).to_string()
}

fn listed(errors: impl IntoIterator<Item = String>) -> String {
    errors.into_iter().fold(String::new(), |mut all, e| {
        let _ = writeln!(all, "{e}\n");
        all
    })
}

#[test]
fn mistakes_in_fused_ops() {
    let op = |operands: &str, attrs: &str, body: &str, results: &str| {
        fused(&format!(
            "Fused(\n    name: \"mine\",\n    doc: \"\",\n    operands: [{operands}],\n    attrs: [{attrs}],\n    body: {{\n        {body}\n    }},\n    results: [{results}],\n)\n"
        ))
    };
    let add = r#""y": add(a: "x", b: "x"),"#;
    let errors = [
        fused("Fused(name: \"mine\","),
        fused("Fused(\n    name: \"mine\",\n    colour: 3,\n)"),
        fused(
            r#"Fused(name: "add", doc: "", operands: ["x"], body: { "y": silu(x: "x") }, results: ["y"])"#,
        ),
        op(r#""x""#, "", r#""y": adds(a: "x", b: "x"),"#, r#""y""#),
        op(r#""x""#, "", r#""y": add(a: "x", c: "x"),"#, r#""y""#),
        op(r#""x""#, "", r#""y": add(a: "x"),"#, r#""y""#),
        op(r#""x""#, "", r#""y": add(a: "x", b: "z"),"#, r#""y""#),
        op(r#""x""#, "", r#""y": scale(x: "x", by: "factor"),"#, r#""y""#),
        op(r#""x""#, "", r#""y": scale(x: "x", by: "2 *"),"#, r#""y""#),
        op(r#""x""#, "", r#""y": scale(x: "x", by: true),"#, r#""y""#),
        op(r#""x""#, "", r#""y": slice(x: "x", axis: -1, start: 0, len: 1),"#, r#""y""#),
        op(r#""x""#, r#""f: colour""#, add, r#""y""#),
        op(r#""x""#, r#""f""#, add, r#""y""#),
        op(r#""x", "z""#, "", add, r#""y""#),
        op(r#""x", "x?""#, "", add, r#""y""#),
        op(r#""x""#, "", add, r#""z""#),
        op(r#""x""#, "", add, ""),
        op(r#""x""#, "", r#""y": silu(x: "x"), "y": silu(x: "x"),"#, r#""y""#),
        op(r#""x""#, "", r#""y,": silu(x: "x"),"#, r#""y""#),
        op(r#""x""#, "", r#""y": add_rmsnorm(a: "x", b: "x", eps: 1, offset: 0),"#, r#""y""#),
        op(r#""x""#, "", r#""y": mine(x: "x"),"#, r#""y""#),
    ];
    insta::assert_snapshot!(listed(errors));
}

#[test]
fn mistakes_between_fused_files() {
    let file = |name: &str, calls: &str| {
        let text = format!(
            "Fused(\n    name: \"{name}\",\n    doc: \"\",\n    operands: [\"x\"],\n    body: {{ \"y\": {calls}(x: \"x\") }},\n    results: [\"y\"],\n)\n"
        );
        Source::new(&format!("{name}.ron"), &text)
    };
    let defined = |files: Vec<Source>| {
        let mut kernels = Kernels::default();
        kernels.define_all(files).map_err(|e| e.to_string())
    };
    // In any order, one may use another.
    defined(vec![file("a", "b"), file("b", "c"), file("c", "silu")]).unwrap();
    let errors = [
        vec![file("a", "b"), file("b", "a")],
        // The file to blame is the one whose op does not exist.
        vec![file("a", "b"), file("b", "sil")],
        vec![file("a", "silu"), file("a", "gelu")],
    ];
    insta::assert_snapshot!(listed(errors.map(|files| defined(files).unwrap_err())));
}

#[test]
fn mistakes_in_rules() {
    let body = |vars: &str, left: &str, right: &str, rest: &str| {
        rule(&format!(
            "        vars: {{ {vars} }},\n        left: {{\n            {left}\n        }},\n        right: {{\n            {right}\n        }},\n        {rest}"
        ))
    };
    let x = r#""x": "[T, K]""#;
    let left = r#""y": scale(x: "x", by: "by"),"#;
    let with = |rest: &str| body(x, left, left, rest);
    let var = |ty: &str| body(&format!("\"x\": \"{ty}\""), left, left, "");
    let errors = [
        rule("        left: {},"),
        rule("        vars: {},\n        left: {},\n        right: {},"),
        body("", left, left, ""),
        body(r#""x": "[T, K]", "z": "[T]""#, left, left, ""),
        body(r#""x": "[T, K]", "by": "shape [T]""#, left, left, ""),
        body(x, r#""y": reshape(x: "x", shape: "to"),"#, left, ""),
        body(r#""x": "[T, K]", "to": "[T, K]""#, r#""y": reshape(x: "x", shape: "to"),"#, left, ""),
        body(x, left, r#""z": scale(x: "x", by: "by"),"#, ""),
        body(x, left, r#""y": scale(x: "w", by: "by"),"#, ""),
        body(x, left, r#""y": scale(x: "x", by: "2 * bye"),"#, ""),
        body(x, r#""y": scale(x: "x", by: "2 * by"),"#, left, ""),
        body(
            r#""x": "[T, K]", "z": "[T, K]""#,
            r#""a": silu(x: "x"), "y": silu(x: "z"),"#,
            r#""y": silu(x: "z"),"#,
            "",
        ),
        body(x, r#""y": scale(x: "x", by: 2, when: "x.rank == 2"),"#, left, ""),
        body(
            x,
            r#""a": scale(x: "x", by: "n"), "y": slice(x: "a", axis: "n", start: 0, len: 1),"#,
            left,
            "",
        ),
        with(r#"requires: ["by >"],"#),
        with(r#"requires: ["buy > 1"],"#),
        with(r#"requires: ["tokens.max <= 16"],"#),
        with("requires: [3],"),
        with(r#"when: ["token.max <= 16"],"#),
        var("T, K"),
        var("[T, K"),
        var("[T, K] ?!"),
        var("konst [T, K]"),
        var("[T, .., K]"),
        var("[T, K - 1]"),
        var("[T, ]"),
        var("[T*2, K]"),
        var("shape [T, K]"),
    ];
    insta::assert_snapshot!(listed(errors));
}

#[test]
fn two_rules_of_a_file_have_two_names() {
    let one = r#"Rule(name: "twin", numerics: exact, vars: { "x": "[T]" },
        left: { "y": silu(x: "x") }, right: { "y": silu(x: "x") })"#;
    let source = Source::new("twins.ron", &format!("[\n    {one},\n    {one},\n]"));
    let error = Kernels::default().add_rules(&source).unwrap_err();
    insta::assert_snapshot!(error.to_string());
}

/// Fused ops that use the one before twice, and chains of them: typing one would take forever, or
/// all of the stack.
#[test]
fn nesting_is_bounded() {
    let define = |body: &dyn Fn(usize) -> String, levels: usize| {
        let sources = (0..levels).map(|i| {
            let text = format!(
                "Fused(name: \"n{i}\", doc: \"d\", operands: [\"x\"], body: {{ {} }}, results: [\"y\"])",
                body(i)
            );
            Source::new(&format!("n{i}.ron"), &text)
        });
        Kernels::default().define_all(sources.collect()).map_err(|e| e.to_string())
    };
    let op = |i: usize| if i == 0 { "silu".to_owned() } else { format!("n{}", i - 1) };
    let twice = |i: usize| format!("\"a\": {0}(x: \"x\"), \"y\": {0}(x: \"a\")", op(i));
    let once = |i: usize| format!("\"y\": {}(x: \"x\")", op(i));
    define(&twice, 7).expect("254 calls are few");
    define(&once, 32).expect("32 levels are few");
    let error = define(&twice, 9).expect_err("1022 calls");
    assert!(error.contains("n8.ron:1:14") && error.contains("more than 512 calls"), "{error}");
    let error = define(&once, 33).expect_err("33 levels");
    assert!(error.contains("n32.ron:1:14") && error.contains("more than 32 deep"), "{error}");
}

/// The error that an encoding's file gives, of which `change` makes a mistake in what ships.
fn encoding(change: (&str, &str)) -> String {
    let text = include_str!("../../kernels/encodings/q4_k.ron");
    assert!(text.contains(change.0), "{}", change.0);
    let source = Source::new("kernels/encodings/mine.ron", &text.replacen(change.0, change.1, 1));
    let mut kernels = Kernels::default();
    kernels.add_encodings(&[source]).expect_err(change.1).to_string()
}

#[test]
fn mistakes_in_encodings_have_a_place() {
    for (change, place, expected) in [
        (("gguf: 12", "ggufs: 12"), ":20:5", "unknown field `ggufs` (did you mean `gguf`?)"),
        (("kind: unsigned", "kind: unsinged"), ":17:18", "unknown variant `unsinged`"),
        (("bits: 4", "bits: 40"), ":17:46", "expected a code of 1 to 16 bits of kind Unsigned"),
        (("scale: \"d *", "scale: \"e *"), ":18:13", "unknown name `e`"),
        (("scale: \"d * ", "scale: \"d * * "), ":18:17", "expected"),
        (("\"i >> 5\"", "\"j >> 5\""), ":12:15", "unknown name `j`"),
        (("\"i >> 5\"", "\"g >> 5\""), ":12:15", "unknown name `g`"),
        (("gguf: 12", "zero: \"0.5\""), ":20:12", "expected a whole number, subtracted"),
        (("gguf: 12", "tables: { \"t\": \"grid\" }"), ":20:21", "no file of `kernels/tables/`"),
        (("gguf: 12", "each: { \"z\": [] }"), ":20:14", "expected 1 to 256 choices"),
        (("gguf: 12", "each: { \"z\": [1, 2] }"), ":2:12", "`q4_k` is defined twice"),
        (("\"dmin\": \"f16\"", "\"dmin\": \"f17\""), ":8:40", "expected an element type (u8, i8"),
        (("\"dmin\": \"f16\"", "\"k\": \"f16\""), ":8:37", "a name of its own"),
        (("u8 [128]", "u8 [K]"), ":8:73", "expected a field such as `f16` or `u8 [32]`"),
        (("gguf: 12", "when: \"a == \""), ":20:", "expected"),
        (("name: \"q4_k\"", "name: \"f32\""), ":2:12", "that is no element type"),
    ] {
        let found = encoding(change);
        assert!(found.contains(expected), "{change:?}: {found}");
        assert!(found.contains(&format!("mine.ron{place}")), "{change:?}: {found}");
    }
    let twice = ["a", "b"].map(|file| {
        Source::new(&format!("{file}.ron"), include_str!("../../kernels/encodings/q8_0.ron"))
    });
    let found = Kernels::default().add_encodings(&twice).expect_err("two of a name").to_string();
    assert!(found.contains("b.ron:2:12") && found.contains("`q8_0` is defined twice"), "{found}");
}

/// Values of a normal distribution, some of them far out, as weights have them.
fn weights(count: usize) -> Vec<f32> {
    let uniform = infernum_ir::random::uniform("weights", 1, 12 * count);
    let sums = uniform.chunks_exact(12).map(|c| c.iter().sum::<f64>());
    sums.enumerate().map(|(i, x)| (x * if i % 97 == 0 { 0.2 } else { 0.05 }) as f32).collect()
}

/// What is lost of values in a format, relative to their squares, with a weight for each column.
fn loss(encoding: &infernum_ir::Encoding, values: &[f32], importance: &[f32], by: &[f32]) -> f64 {
    let (rows, columns) = (values.len() as u64 / 512, 512);
    let bytes = encoding.encode_for(rows, columns, values, importance).unwrap();
    let decoder = encoding.decoder(rows, columns, bytes.iter().map(|b| &b[..]).collect()).unwrap();
    let mut row = vec![0.0f32; columns as usize];
    let (mut error, mut whole) = (0.0, 0.0);
    for (n, values) in values.chunks_exact(columns as usize).enumerate() {
        decoder.row(n as u64, 0, &mut row);
        for ((a, b), w) in row.iter().zip(values).zip(by) {
            error += f64::from(*w) * f64::from(a - b).powi(2);
            whole += f64::from(*w) * f64::from(*b).powi(2);
        }
    }
    error / whole
}

#[test]
fn blocks_come_near_to_values() {
    let kernels = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"));
    let (values, alike) = (weights(4 * 512), [1.0; 512]);
    // Every third column counts, and the others hardly do.
    let importance: Vec<f32> = (0..512).map(|k| if k % 3 == 0 { 1.0 } else { 0.01 }).collect();
    for (name, most) in [
        ("q8_0", 1e-4),
        ("q6_k", 1e-3),
        ("q5_k", 3e-3),
        ("q5_1", 4e-3),
        ("q5_0", 4e-3),
        ("q4_k", 1.2e-2),
        ("q4_1", 1.5e-2),
        ("q4_0", 1.5e-2),
        ("iq4_nl", 1.2e-2),
        ("q3_k", 5e-2),
        ("q2_k", 1.8e-1),
    ] {
        let encoding = kernels.ops.encoding(name).expect(name);
        let plain = loss(encoding, &values, &[], &alike);
        assert!(plain > 0.0 && plain < most, "{name}: {plain:e}");
        let weighed = loss(encoding, &values, &importance, &importance);
        let careless = loss(encoding, &values, &[], &importance);
        assert!(weighed < careless, "{name}: {weighed:e}, and without importance {careless:e}");
        let zeros = encoding.encode(1, 512, &[0.0; 512]).unwrap();
        let decoder = encoding.decoder(1, 512, zeros.iter().map(|b| &b[..]).collect()).unwrap();
        let mut row = [1.0; 512];
        decoder.row(0, 0, &mut row);
        assert!(row.iter().all(|x| *x == 0.0), "{name}: zeros are not zeros");
        let error = encoding.encode(1, 512, &[1e30; 512]).unwrap_err();
        assert!(error.contains("too large"), "{name}: {error}");
        assert!(encoding.encode_for(1, 512, &values[..512], &[1.0; 3]).is_err(), "{name}");
    }
}
