use std::path::Path;

use infernum_frontend_hf::spec::Source;
use infernum_ir::text;

use super::*;
use crate::Bucket;
use crate::data::{DimPattern, Kernels, VarType};
use crate::fuse::{CostTable, FuseOptions, fuse};

fn shipped() -> Kernels {
    Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"))
}

/// The verdicts on a file of rules over the shipped ops.
fn verdicts(file: &str, text: &str) -> Vec<Verdict> {
    let mut kernels = shipped();
    kernels.rules.clear();
    kernels.add_rules(&Source::new(file, text)).unwrap_or_else(|e| panic!("{e}"));
    check(&kernels, 1, 100)
}

#[test]
fn the_shipped_rules_hold() {
    let bad: Vec<String> = check(&shipped(), 1, 100)
        .iter()
        .filter(|v| !v.passed() || v.planted < 100 || !v.warnings.is_empty())
        .map(Verdict::to_string)
        .collect();
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// What holds is also found: the engine matches what the trials plant.
#[test]
fn each_shipped_rule_fires_on_its_left_side_a_hundred_times() {
    let kernels = shipped();
    // Some rules are for one token, some for tens, some for prompts, short or long.
    let steps = |min, max| Bucket { min, max, decode: true };
    let prompts = |min, max| Bucket { decode: false, ..steps(min, max) };
    for rule in &kernels.rules {
        // Kernels that round to fewer bits are the CPU's, or tensor cores'.
        let targets: &[&str] = match rule.numerics {
            Numerics::Lossy => &["cpu", "sm_90a"],
            _ => &["sm_90a"],
        };
        let options: Vec<FuseOptions> = (targets.iter())
            .flat_map(|target| {
                let costs = CostTable::named(target, None).unwrap_or_else(|e| panic!("{e}"));
                [steps(1, 1), steps(17, 64), prompts(17, 64), prompts(129, 512)].map(|bucket| {
                    let rules = Some(vec![rule.name.clone()]);
                    let numerics = Numerics::Lossy;
                    FuseOptions {
                        rules,
                        numerics,
                        ..FuseOptions::new(target, costs.clone(), bucket)
                    }
                })
            })
            .collect();
        let mut rng = Rng::new(11);
        let mut fired = 0;
        for _ in 0..100 * ATTEMPTS {
            let mut planted = (0..ATTEMPTS).filter_map(|_| side::module(rule, &mut rng));
            let module = planted.next().unwrap_or_else(|| panic!("{}: no left side", rule.name));
            let fires = options.iter().any(|options| {
                let fused = fuse(&module, &kernels, options);
                let report = fused.unwrap_or_else(|e| panic!("{}: {e}", rule.name)).report;
                let fires = !report.fired.is_empty();
                // What is planted is right, but a rule may say that it does not pay there.
                let pays = report.refused.is_empty();
                assert!(fires || !pays, "{}: {}", rule.name, text::print(&module));
                fires
            });
            fired += usize::from(fires);
            if fired == 100 {
                break;
            }
        }
        assert_eq!(fired, 100, "{}", rule.name);
    }
}

#[test]
fn the_same_seed_gives_the_same_verdicts() {
    let shown = || check(&shipped(), 7, 10).iter().map(Verdict::to_string).collect::<Vec<_>>();
    assert_eq!(shown(), shown());
}

/// Each file of `tests/filetests/wrong_rules` holds one rule with one mistake.
#[test]
fn wrong_rules_are_caught() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/filetests/wrong_rules");
    let mut files: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 15);
    let mut missed = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let found = verdicts(&file.display().to_string(), &text);
        assert_eq!(found.len(), 1);
        missed
            .extend(found.iter().filter(|v| v.passed() || v.planted < 100).map(Verdict::to_string));
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

fn one(rule: &str) -> Verdict {
    verdicts("rule.ron", &format!("[{rule}]")).remove(0)
}

/// What `eps-outside-root` gets wrong, written right: it is the place of eps that is caught.
#[test]
fn a_right_rule_in_other_words_holds() {
    let verdict = one(r#"Rule(
            name: "norm-in-parts", numerics: reassoc, vars: { "x": "[n, K]" },
            left: { "y": rmsnorm(x: "x", eps: "eps") },
            right: {
                "squares": map(a: "x", expr: "a * a"),
                "mean": reduce(x: "squares", by: "mean", axis: 1),
                "y": map(a: "x", b: "mean", expr: "a / sqrt(b + eps)"),
            },
        )"#);
    assert!(matches!(verdict.outcome, Outcome::Ok), "{verdict}");
}

#[test]
fn a_counterexample_says_where_the_rule_fails() {
    let verdict = one(r#"Rule(
            name: "identity", numerics: exact, vars: { "x": "[T, K]" },
            left: { "y": scale(x: "x", by: "by") },
            right: { "y": scale(x: "x", by: 1) },
        )"#);
    let Outcome::Wrong(found) = &verdict.outcome else { panic!("{verdict}") };
    assert_eq!(found.message, "`y` differs");
    assert_eq!((found.attrs.len(), found.values.len()), (1, 1));
    // The smallest there is: one token, one column.
    assert_eq!(found.elements, 1, "{verdict}");
}

#[test]
fn conditions_that_are_not_needed_are_named() {
    let scaled = |requires: &str| {
        one(&format!(
            r#"Rule(
                name: "scales", numerics: reassoc, vars: {{ "x": "[T, K]" }},
                left: {{ "y": scale(x: "x", by: "a"), "z": scale(x: "y", by: "b") }},
                right: {{ "z": scale(x: "x", by: "a * b") }},
                requires: ["{requires}"],
            )"#
        ))
    };
    let warnings = scaled("a > 0").warnings;
    assert!(warnings[0].starts_with("`a > 0` is not needed"), "{warnings:?}");
    let warnings = scaled("a == a").warnings;
    assert!(warnings[0].contains("was never false"), "{warnings:?}");
}

#[test]
fn exact_is_not_said_of_another_order() {
    let verdict = one(r#"Rule(
            name: "scales", numerics: exact, vars: { "x": "[T, K]" },
            left: { "y": scale(x: "x", by: "a"), "z": scale(x: "y", by: "b") },
            right: { "z": scale(x: "x", by: "a * b") },
        )"#);
    assert!(verdict.passed() && verdict.warnings[0].contains("`reassoc`"), "{verdict}");
}

#[test]
fn a_left_side_that_cannot_be_typed_is_reported() {
    let verdict = one(r#"Rule(
            name: "shapes", numerics: exact, vars: { "x": "[T, K]", "w": "[N, K + 1]" },
            left: { "y": linear(x: "x", w: "w") },
            right: { "y": linear(x: "x", w: "w") },
        )"#);
    let Outcome::Unplanted(why) = &verdict.outcome else { panic!("{verdict}") };
    assert!(why.contains("operand `w`"), "{why}");
}

/// Both the types and the values of every fused op's body can be had, by the op itself. A rule makes it, or it is a part of what
/// another one means.
#[test]
fn each_fused_op_is_introduced_by_a_rule_and_computes() {
    let kernels = shipped();
    for op in kernels.ops.fused() {
        let of_rule = kernels.rules.iter().any(|r| r.right.iter().any(|s| s.op == op));
        let is_part =
            |other: &infernum_ir::Op| other.fused.iter().any(|f| f.body.iter().any(|s| s.op == op));
        let introduced = of_rule || kernels.ops.fused().any(|other| is_part(&other));
        assert!(introduced, "no rule introduces `{}`", op.name);
    }
    for rule in &kernels.rules {
        let mut rng = Rng::new(3);
        let computed = (0..500).filter(|_| side::reference(rule, &mut rng).is_some()).count();
        assert!(computed > 0, "{}", rule.name);
    }
}

/// What a rule is tried on is what its matches are held to.
#[test]
fn trials_fit_the_types_of_their_variables() {
    for rule in &shipped().rules {
        let mut rng = Rng::new(5);
        for trial in (0..50).filter_map(|_| Trial::sample(rule, &mut rng).ok()) {
            let value = |n: &str| {
                let i = rule.values.iter().position(|(v, _)| v == n)?;
                trial.types[i].clone()
            };
            let attr = |n: &str| {
                let i = rule.attrs.iter().position(|(a, _)| a == n)?;
                Some(trial.attrs[i].clone())
            };
            rule.fits(&value, &attr).unwrap_or_else(|e| panic!("{}: {e}", rule.name));
            // Of another rank, every value is refused.
            let other = |n: &str| {
                let mut ty = value(n)?;
                if let infernum_ir::Type::Tensor(t) = &mut ty {
                    t.shape.push(infernum_ir::Dim::Const(7));
                    t.shape.push(infernum_ir::Dim::Const(11));
                }
                Some(ty)
            };
            let any_rank = |(name, ty): &(String, VarType)| {
                value(name).is_none() || ty.dims.first() == Some(&DimPattern::Rest)
            };
            let refused = rule.fits(&other, &attr).is_err();
            assert!(refused || rule.values.iter().all(any_rank), "{}", rule.name);
        }
    }
}

/// A difference in the last digits says nothing to who reads it: a clear one is shown, as small as
/// there is, with what both sides were computed from.
#[test]
fn the_clearest_counterexample_is_shown() {
    let verdict = one(r#"Rule(
            name: "nearly", numerics: exact, vars: { "x": "[T, K]", "y": "[T, K]" },
            left: { "z": add(a: "x", b: "y") },
            right: { "z": map(a: "x", b: "y", expr: "a + b * 1.0001 + (abs(b) > 5 ? 1 : 0)") },
        )"#);
    let Outcome::Wrong(found) = &verdict.outcome else { panic!("{verdict}") };
    assert!(found.error.is_some_and(|e| e >= 0.01), "{verdict}");
    // One token of one column would do for a difference that cannot be seen: two sums of one.
    assert_eq!(found.elements, 2, "{verdict}");
    let operand = |name: &str| found.operands.iter().find(|o| o.name == name).map(|o| o.first[0]);
    let (Some(x), Some(y), Some(at)) = (operand("x"), operand("y"), found.at) else {
        panic!("{verdict}")
    };
    assert!(y.abs() > 5.0, "{verdict}");
    assert_eq!(at.left, x + y);
    assert_eq!(at.right, x + y * 1.0001 + 1.0);
    let text = verdict.to_string();
    assert!(text.contains("element 0 is ") && text.contains(" on the right"), "{text}");
}

#[test]
fn attributes_are_tried_on_the_samples_that_are_given() {
    let rule = |samples: &str| {
        one(&format!(
            r#"Rule(
            name: "identity", numerics: exact, vars: {{ "x": "[T, K]" }}, samples: {{ {samples} }},
            left: {{ "y": scale(x: "x", by: "by") }},
            right: {{ "y": scale(x: "x", by: 1) }},
        )"#
        ))
    };
    assert!(rule(r#""by": "1""#).passed());
    let Outcome::Wrong(found) = rule(r#""by": "2..3 | 7""#).outcome else { panic!("2 is not 1") };
    let by: f64 = found.attrs[0].1.parse().expect("a number");
    assert!((2.0..=3.0).contains(&by) || by == 7.0, "{by}");
}

#[test]
fn mistakes_in_samples() {
    let error = |samples: &str| {
        let text = format!(
            "[Rule(name: \"r\", numerics: exact, vars: {{ \"x\": \"[T, K]\" }}, samples: {{ {samples} }},
                left: {{ \"y\": mask(x: \"x\", window: \"window\") }},
                right: {{ \"y\": mask(x: \"x\", window: \"window\") }})]"
        );
        let mut kernels = shipped();
        let found = kernels.add_rules(&Source::new("rule.ron", &text));
        found.expect_err("a mistake").to_string().lines().next().unwrap_or_default().to_owned()
    };
    let shown: Vec<String> = [
        r#""windo": "1..4""#,
        r#""window": "4..1""#,
        r#""window": "1..x""#,
        r#""window": "0.5""#,
        r#""window": "1..4 | neox""#,
    ]
    .map(error)
    .to_vec();
    insta::assert_snapshot!(shown.join("\n"));
}

/// Calls for checks of kernels follow from what files say, for every fused op that ships.
#[test]
fn every_fused_op_can_be_called() {
    let kernels = shipped();
    for op in kernels.ops.fused() {
        for dtype in [infernum_ir::DType::F32, infernum_ir::DType::Bf16] {
            let made =
                calls(&kernels, op, dtype, 3, 4).unwrap_or_else(|e| panic!("{}: {e}", op.name));
            assert!(made.len() >= 4);
            for call in made {
                let text = text::print(&call.module);
                assert_eq!(text.matches(&format!("= {}(", op.name)).count(), 1, "{text}");
            }
        }
    }
}
