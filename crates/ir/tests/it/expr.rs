//! The expression language.

use std::collections::HashSet;

use infernum_ir::expr::{BinaryOp, Expr, Func, ScalarFn, UnaryOp, Value};
use proptest::prelude::*;

const BINARY: [BinaryOp; 20] = [
    BinaryOp::Or,
    BinaryOp::And,
    BinaryOp::Coalesce,
    BinaryOp::Eq,
    BinaryOp::Ne,
    BinaryOp::Lt,
    BinaryOp::Le,
    BinaryOp::Gt,
    BinaryOp::Ge,
    BinaryOp::BitOr,
    BinaryOp::BitXor,
    BinaryOp::BitAnd,
    BinaryOp::Shl,
    BinaryOp::Shr,
    BinaryOp::Add,
    BinaryOp::Sub,
    BinaryOp::Mul,
    BinaryOp::Div,
    BinaryOp::Rem,
    BinaryOp::Pow,
];

/// `-x`, which the parser reads as a literal where `x` is one.
fn unary(op: UnaryOp, a: Expr) -> Expr {
    match (op, a) {
        (UnaryOp::Neg, Expr::Lit(Value::Num(n))) if !n.is_sign_negative() => {
            Expr::Lit(Value::Num(-n))
        }
        (op, a) => Expr::Unary(op, Box::new(a)),
    }
}

fn binary(op: BinaryOp, a: Expr, b: Expr) -> Expr {
    Expr::Binary(op, Box::new(a), Box::new(b))
}

fn literal() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::Bool),
        (-20i32..20).prop_map(|n| Value::Num(f64::from(n) / 4.0)),
        prop::num::f64::NORMAL.prop_map(Value::Num),
        ".{0,6}".prop_map(Value::Str),
    ];
    leaf.prop_recursive(2, 4, 3, |v| prop::collection::vec(v, 0..3).prop_map(Value::List))
}

fn name() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["x", "_y", "hidden_size", "nulls", "e9"]).prop_map(str::to_owned)
}

fn expr() -> impl Strategy<Value = Expr> {
    let leaf = prop_oneof![literal().prop_map(Expr::Lit), name().prop_map(Expr::Var)];
    leaf.prop_recursive(5, 40, 3, |e| {
        let pair = (e.clone(), e.clone());
        prop_oneof![
            (any::<bool>(), e.clone())
                .prop_map(|(neg, a)| unary(if neg { UnaryOp::Neg } else { UnaryOp::Not }, a)),
            (prop::sample::select(BINARY.to_vec()), pair.clone())
                .prop_map(|(op, (a, b))| binary(op, a, b)),
            (e.clone(), pair.clone()).prop_map(|(c, (a, b))| Expr::Cond(
                Box::new(c),
                Box::new(a),
                Box::new(b)
            )),
            (prop::sample::select(Func::TABLE.to_vec()), pair.clone()).prop_map(
                |((_, func, arity), (a, b))| Expr::Call(
                    func,
                    [a, b].into_iter().take(arity).collect()
                )
            ),
            pair.prop_map(|(a, b)| Expr::Index(Box::new(a), Box::new(b))),
            (e, name()).prop_map(|(a, key)| Expr::Member(Box::new(a), key)),
        ]
    })
}

/// Expressions that are arithmetic on `x` and `y` throughout.
fn numeric() -> impl Strategy<Value = Expr> {
    let leaf = prop_oneof![
        (-8i32..8).prop_map(|n| Expr::Lit(Value::Num(f64::from(n) / 2.0))),
        prop::sample::select(vec!["x", "y"]).prop_map(|v| Expr::Var(v.to_owned())),
    ];
    leaf.prop_recursive(5, 40, 3, |e| {
        let pair = (e.clone(), e.clone());
        prop_oneof![
            e.clone().prop_map(|a| unary(UnaryOp::Neg, a)),
            (9usize..20, pair.clone()).prop_map(|(op, (a, b))| binary(BINARY[op], a, b)),
            (0usize..12, pair.clone()).prop_map(|(f, (a, b))| {
                let (_, func, arity) = Func::TABLE[f];
                Expr::Call(func, [a, b].into_iter().take(arity).collect())
            }),
            (3usize..9, pair.clone(), pair).prop_map(|(op, (a, b), (c, d))| {
                let test = binary(BINARY[op], c, d);
                Expr::Cond(Box::new(test), Box::new(a), Box::new(b))
            }),
        ]
    })
}

proptest! {
    #[test]
    fn print_reads_back(e in expr()) {
        let text = e.to_string();
        let back: Expr = text.parse().map_err(|err| TestCaseError::fail(format!("`{text}`: {err}")))?;
        prop_assert_eq!(back, e, "{}", text);
    }

    #[test]
    fn any_text_is_read_or_refused_and_what_is_read_reads_back(text in "[-+*/%!?:.,'()\\[\\]<>=&|0-9e a-c]{0,24}") {
        if let Ok(e) = text.parse::<Expr>() {
            prop_assert_eq!(e.to_string().parse::<Expr>(), Ok(e));
        }
    }

    #[test]
    fn compiled_and_folded_agree(e in numeric(), x in -4.0..4.0f64, y in -4.0..4.0f64) {
        let lookup = |n: &str| Some(Value::Num(if n == "x" { x } else { y }));
        let compiled = ScalarFn::compile(&e, &["x", "y"]).unwrap();
        // Folding refuses what is not finite on the way; compiled code carries on.
        if let Ok(Value::Num(folded)) = e.eval(&lookup) {
            prop_assert_eq!(folded.to_bits(), compiled.eval(&[x, y]).to_bits(), "{}", e);
        }
        // Substituting some of the arguments first changes nothing either.
        let half = |n: &str| (n == "x").then_some(Value::Num(x));
        if let Ok(partly) = e.fold(&half) {
            let partly = ScalarFn::compile(&partly, &["x", "y"]).unwrap();
            prop_assert_eq!(partly.eval(&[x, y]).to_bits(), compiled.eval(&[x, y]).to_bits(), "{}", e);
        }
    }
}

fn eval(text: &str) -> Result<Value, String> {
    let config = |name: &str| {
        Some(match name {
            "hidden" => Value::Num(64.0),
            "heads" => Value::Num(4.0),
            "absent" => Value::Null,
            "types" => Value::List(vec![Value::Str("full".into()), Value::Str("sliding".into())]),
            "rope" => Value::Map(vec![("theta".into(), Value::Num(1e4))]),
            _ => return None,
        })
    };
    let e: Expr = text.parse().map_err(|e: infernum_ir::expr::ExprError| e.to_string())?;
    e.eval(&config).map_err(|e| e.to_string())
}

#[test]
fn precedence_and_values() {
    for (text, expected) in [
        ("-2 ** 2", "-4"),
        ("(-2) ** 2", "4"),
        ("2 ** -1", "0.5"),
        ("2 ** 3 ** 2", "512"),
        ("2 - 3 - 4", "-5"),
        ("16 / 4 / 2", "2"),
        ("2 + 3 * 4 % 5", "4"),
        ("-7 % 4", "-3"),
        ("!true || true", "true"),
        ("1 < 2 && 3 >= 3", "true"),
        ("true || missing", "true"),
        ("false && missing", "false"),
        ("true ? 1 : missing", "1"),
        ("false ? missing : true ? 2 : 3", "2"),
        ("absent ?? hidden / heads", "16"),
        ("hidden ?? missing", "64"),
        ("absent ?? absent ?? 3", "3"),
        ("absent == null ? 1 : 2", "1"),
        ("absent.factor", "null"),
        ("rope.theta", "1e4"),
        ("rope.factor ?? 1", "1"),
        ("types[1]", "'sliding'"),
        ("types[0] == 'full'", "true"),
        ("len(types) + len('ab')", "4"),
        ("contains(types, 'full') && !contains('sliding', 'full')", "true"),
        ("places(types, 'sliding')[0]", "1"),
        ("len(places(types, 'full')) + len(places(types, 'other'))", "1"),
        ("'it\\'s \\\\'", "'it\\'s \\\\'"),
        ("max(2, min(3, 4)) + abs(-1) + floor(1.5) + ceil(1.5)", "7"),
        ("1e-6 + .5", "0.500001"),
        ("1 | 6 ^ 5 & 3", "7"),
        ("1 + 1 << 2 + 1", "16"),
        ("-9 >> 1", "-5"),
        ("1 << 99", "-9223372036854775808"),
        ("12 & 10 == 8", "true"),
        ("true || 1 > 2 && 1 << 2 >= 4", "true"),
    ] {
        let found = eval(text);
        let want: Value = eval(expected).unwrap();
        assert_eq!(found.as_ref(), Ok(&want), "{text}");
    }
}

#[test]
fn mistakes_say_what_was_expected() {
    for (text, part) in [
        ("1 < 2 < 3", "comparisons do not chain"),
        ("1 == 2 != 3", "comparisons do not chain"),
        ("1 +", "expected a number, a name, 'text' or `(`, found the end"),
        ("(1", "expected `)`"),
        ("1 2", "expected an operator or the end, found `2`"),
        ("sqr(2)", "unknown function `sqr` (did you mean `sqrt`?)"),
        ("min(2)", "`min` takes 2 argument(s), found 1"),
        ("'open", "text is not closed"),
        ("1.2.3", "`1.2.3` is not a number"),
        ("1e999", "`1e999` is not a number"),
        ("[hidden]", "a list may hold literals only"),
        ("missing + 1", "unknown name `missing`"),
        ("absent + 1", "expected a number from `absent`, found null"),
        ("hidden ? 1 : 2", "expected true or false from `hidden`, found a number"),
        ("!hidden", "expected true or false"),
        ("1 / 0", "`1 / 0` is not finite"),
        ("exp(1000)", "`exp(1000)` is not finite"),
        ("sqrt(-1)", "`sqrt(-1)` is not finite"),
        ("types[2]", "index 2 is outside `types`, which has 2 item(s)"),
        ("types[-1]", "index -1 is outside"),
        ("types['a']", "expected a number from `'a'`, found text"),
        ("hidden[0]", "expected a list from `hidden`, found a number"),
        ("hidden.x", "expected a map from `hidden`, found a number"),
        ("contains('ab', 1)", "expected text from `1`, found a number"),
        ("places(hidden, 1)", "expected a list from `hidden`, found a number"),
    ] {
        let message = eval(text).expect_err(text);
        assert!(message.contains(part), "{text}: {message}");
    }
}

#[test]
fn errors_point_at_the_place() {
    let at = |text: &str| text.parse::<Expr>().unwrap_err().at;
    assert_eq!(at("a < b < c"), 6);
    assert_eq!(at("1 + sqr(2)"), 4);
    assert_eq!(at("1 + "), 4);
    assert_eq!(at("x ? 1"), 5);
}

#[test]
fn size_and_depth_are_bounded() {
    for text in [
        format!("{}1{}", "(".repeat(100), ")".repeat(100)),
        format!("{}1", "-".repeat(100)),
        format!("{}true", "!".repeat(100)),
        format!("a{}", "[0".repeat(100)),
        format!("{}1{}", "[".repeat(100), "]".repeat(100)),
        "1 ? ".repeat(100),
        format!("1{}", " + 1".repeat(300)),
        format!("2{}", " ** 2".repeat(100_000)),
        format!("a{}", ".b".repeat(100_000)),
        "[1,".repeat(100_000),
    ] {
        assert!(text.parse::<Expr>().is_err(), "{text:.20}");
    }
    assert!(format!("1{}", " + 1".repeat(100)).parse::<Expr>().is_ok());
    assert!(format!("{}1{}", "(".repeat(50), ")".repeat(50)).parse::<Expr>().is_ok());
}

#[test]
fn equal_expressions_hash_alike() {
    let zero = |z: f64| Expr::Lit(Value::Num(z));
    assert_eq!(zero(0.0), zero(-0.0));
    assert!(HashSet::from([zero(0.0)]).contains(&zero(-0.0)));
}

#[test]
fn compiling_refuses_what_is_not_arithmetic() {
    for (text, part) in [
        ("x + z", "known: x"),
        ("x ?? 1", "uses `??`"),
        ("'a'", "is text"),
        ("null", "is null"),
        ("len([1])", "does not yield a number"),
        ("x[0]", "is not a constant list"),
        ("[][x]", "is an empty list"),
        ("['a'][x]", "holds text"),
        ("x.y", "is not a number"),
    ] {
        let message = ScalarFn::compile(&text.parse().unwrap(), &["x"]).expect_err(text).message;
        assert!(message.contains(part), "{text}: {message}");
    }
}

#[test]
fn compiled_lookup_is_clamped() {
    let f = ScalarFn::compile(&"[10, 20, 30][i]".parse().unwrap(), &["i"]).unwrap();
    let found: Vec<f64> = [-1.0, 0.0, 1.9, 2.0, 9.0].iter().map(|&i| f.eval(&[i])).collect();
    assert_eq!(found, [10.0, 10.0, 20.0, 30.0, 30.0]);
    assert_eq!(f.stack_depth(), 1);
}

/// Values of Python's `math.erf` (the C library's).
#[test]
#[allow(clippy::unreadable_literal, reason = "as printed by the C library")]
fn erf_matches_known_values() {
    for (x, y) in [
        (1e-300, 1.1283791670955126e-300),
        (1e-8, 1.1283791670955126e-8),
        (0.1, 0.1124629160182849),
        (0.25, 0.2763263901682369),
        (0.5, 0.5204998778130465),
        (0.75, 0.7111556336535151),
        (1.0, 0.8427007929497149),
        (1.25, 0.9229001282564582),
        (1.5, 0.9661051464753108),
        (1.75, 0.9866716712191824),
        (2.0, 0.9953222650189527),
        (2.25, 0.9985372834133188),
        (2.4375, 0.9994334567454198),
        (2.5, 0.999593047982555),
        (2.75, 0.9998993780778803),
        (3.0, 0.9999779095030014),
        (3.5, 0.9999992569016276),
        (4.0, 0.9999999845827421),
        (5.0, 0.9999999999984626),
        (6.0, 1.0),
        (7.0, 1.0),
        (f64::INFINITY, 1.0),
    ] {
        for (x, y) in [(x, y), (-x, -y)] {
            let found = Func::Erf.apply(x, 0.0);
            assert!((found - y).abs() <= 4e-15 * y.abs(), "erf({x}): {found} {y}");
        }
    }
    assert!(Func::Erf.apply(f64::NAN, 0.0).is_nan());
    assert_eq!(Func::Erf.apply(0.0, 0.0), 0.0);
}

/// A config's list takes the place of a name: it is one part, however long.
#[test]
fn long_lists_read_back() {
    let list = format!("[{}][i] + 1", vec!["-1.5"; 1000].join(", "));
    let parsed: Expr = list.parse().expect("a list of literals");
    assert_eq!(parsed.to_string(), list);
    let nested = "[".repeat(70);
    assert!(nested.parse::<Expr>().unwrap_err().message.contains("nested deeper"));
}

/// As processors round, and Python: so an expression means the same wherever it runs.
#[test]
fn round_takes_halves_to_even() {
    let cases = [(0.5, 0.0), (1.5, 2.0), (2.5, 2.0), (-0.5, 0.0), (-1.5, -2.0), (2.4, 2.0)];
    for (x, y) in cases {
        let e: Expr = "round(a)".parse().expect("a function");
        assert_eq!(e.eval(&|_| Some(Value::Num(x))), Ok(Value::Num(y)), "round({x})");
        let compiled = ScalarFn::compile(&e, &["a"]).expect("numbers");
        assert_eq!(compiled.eval(&[x]), y);
    }
}
