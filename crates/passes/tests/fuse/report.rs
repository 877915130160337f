//! What is told of a fusion.

use infernum_ir::DType;
use infernum_passes::fuse::Outcome;

use crate::support::{RULES, fixture, fused, kernels, options};

#[test]
fn a_firing_has_its_spec_line_and_bindings() {
    let report = fused(&fixture("llama/f32", DType::F32), &kernels(RULES), &options()).report;
    let fired = report.fired.iter().find(|f| f.rule == "t-add-rmsnorm").expect("it fires");
    assert_eq!(fired.site.value, "x.mid_normed.y");
    let loc = fired.site.loc.as_deref().unwrap_or_default();
    assert!(loc.starts_with("models/blocks/rmsnorm.ron:"), "{loc}");
    let bound =
        |name: &str| fired.bindings.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
    assert_eq!(bound("sum"), Some("%x.mid : f32[T, 48]"));
    assert_eq!(bound("eps"), Some("1e-5"));
}

#[test]
fn a_near_miss_says_what_stood_in_the_way() {
    let report = fused(&fixture("llama/f32", DType::F32), &kernels(RULES), &options()).report;
    let miss = report.near_misses.iter().find(|m| m.rule == "t-add-rmsnorm").expect("a near miss");
    assert_eq!((miss.matched.len(), miss.statements), (1, 2));
    assert_eq!((miss.site.value.as_str(), miss.expected.as_str()), ("x.normed.y", "add"));
    assert_eq!(miss.found, "the parameter %x");
}

/// A call that is part of a match did not nearly match: of `x + by * (a + b)` the inner sum is no near miss.
#[test]
fn parts_of_a_match_are_no_near_misses() {
    let rule = r#"[Rule(
        name: "t-apart", numerics: rounds, vars: { "x": "[.., K]", "a": "[.., K]", "b": "[.., K]" },
        left: { "both": add(a: "a", b: "b"), "part": scale(x: "both", by: "by"), "sum": add(a: "x", b: "part") },
        right: { "one": scale(x: "a", by: "by"), "two": scale(x: "b", by: "by"), "part": add(a: "one", b: "two"),
                 "sum": add(a: "x", b: "part") },
    )]"#;
    let sums = |last: &str| {
        format!(
            "module m\n\ngraph g {{\n  %x = carry 0 : f32[T, 8]\n  %a = carry 1 : f32[T, 8]\n  %b = carry 2 : f32[T, 8]\n  \
             %both = add(%a, %b) : f32[T, 8]\n  %part = {last} : f32[T, 8]\n  %sum = add(%x, %part) : f32[T, 8]\n  \
             return %sum\n}}\n\nschedule\n"
        )
    };
    let report = |last: &str| {
        let module =
            infernum_ir::text::parse(&sums(last), "sums.ir").unwrap_or_else(|e| panic!("{e}"));
        fused(&module, &kernels(rule), &options()).report
    };
    let fires = report("scale(%both) {by: 2}");
    assert!(fires.fired.iter().any(|f| f.rule == "t-apart"), "{fires}");
    assert!(fires.near_misses.iter().all(|m| m.rule != "t-apart"), "{fires}");
    // Where nothing matches, the same call is one.
    let misses = report("silu(%both)");
    assert!(misses.near_misses.iter().any(|m| m.rule == "t-apart"), "{misses}");
}

#[test]
fn what_lost_on_cost_has_its_price() {
    let mut options = options();
    let dear = infernum_passes::fuse::OpCost {
        launch_us: Some(50.0),
        factor: infernum_passes::fuse::Factor::Number(1.0),
        when: Vec::new(),
    };
    options.costs.ops.insert("t_swiglu".to_owned(), dear);
    let report = fused(&fixture("llama/f32", DType::F32), &kernels(RULES), &options).report;
    let fired = report.fired.iter().find(|f| f.rule == "t-swiglu").expect("it fires");
    let Outcome::Dropped { by_us: Some(us), .. } = fired.outcome else {
        panic!("{:?}", fired.outcome)
    };
    // It saves one of two launches, and costs 48 us more than one.
    assert!((45.0..=46.5).contains(&us), "{us}");
}

#[test]
fn a_report_is_data() {
    let report = fused(&fixture("llama/f32", DType::F32), &kernels(RULES), &options()).report;
    let json = serde_json::to_value(&report).expect("a report serialises");
    assert_eq!(json["graphs"][1]["graph"], "decoder");
    assert_eq!(json["graphs"][1]["stop"], "saturated");
    assert!(
        json["fired"].as_array().is_some_and(|list| list.iter().any(|f| f["outcome"] == "kept"))
    );
}

#[test]
fn groups_pair_what_was_fused_with_what_it_replaced() {
    let before = fixture("llama/f32", DType::F32);
    let after = fused(&before, &kernels(RULES), &options()).module;
    let (before, after) = (&before.graphs[1], &after.graphs[1]);
    let ops = |graph: &infernum_ir::Graph, nodes: &std::collections::BTreeSet<usize>| {
        let names = nodes.iter().filter_map(|n| match &graph.node(*n).kind {
            infernum_ir::NodeKind::Op { op, .. } => Some(op.name),
            infernum_ir::NodeKind::Param(_) => None,
        });
        names.collect::<Vec<_>>()
    };
    let groups = infernum_passes::fuse::groups(before, after);
    let shown: Vec<_> =
        groups.iter().map(|g| (ops(before, &g.before), ops(after, &g.after))).collect();
    assert!(shown.contains(&(vec!["add", "rmsnorm"], vec!["t_add_rmsnorm"])), "{shown:?}");
    // All of a layer's attention is one group.
    let attention = shown.iter().find(|(_, after)| *after == ["t_attention"]);
    let (parts, _) = attention.unwrap_or_else(|| panic!("{shown:?}"));
    assert_eq!(parts.len(), 9, "{parts:?}");
    // What was not fused is in no group.
    assert!(infernum_passes::fuse::groups(before, before).is_empty());
}

/// An op that the target has no kernel for costs what its body costs: that is told, and a tie goes to
/// what was there.
#[test]
fn an_op_without_a_kernel_is_told_and_ties_keep_what_was_there() {
    let mut options = options();
    options.costs.kernels = infernum_passes::fuse::Kernels::Only(Vec::new());
    // No rule but this one, so that what it makes is no part of anything else.
    options.rules = Some(vec!["t-add-rmsnorm".to_owned()]);
    let before = fixture("llama/f32", DType::F32);
    let out = fused(&before, &kernels(RULES), &options);
    assert_eq!(out.module, before, "a tie changes nothing");
    let fired = out.report.fired.iter().find(|f| f.rule == "t-add-rmsnorm").expect("it fires");
    let Outcome::Dropped { by_us: Some(us), .. } = fired.outcome else { panic!("{fired:?}") };
    assert!(us.abs() < 1e-9, "{us}");
    assert_eq!(fired.no_kernel, ["`t_add_rmsnorm` has no kernel on sm_90a"]);
    let text = out.report.to_string();
    assert!(text.contains("would take as long; what was there stays"), "{text}");
    assert!(
        text.contains("`t_add_rmsnorm` has no kernel on sm_90a: its body was priced"),
        "{text}"
    );
    assert!(!text.contains("fired "), "{text}");
}

/// Also where something else in the graph pays.
#[test]
fn ties_beside_what_pays_keep_what_was_there() {
    let mut options = options();
    // SwiGLU runs as one `map` without a kernel.
    options.costs.kernels = infernum_passes::fuse::Kernels::Only(Vec::new());
    let names = ["t-add-rmsnorm", "t-swiglu"].map(str::to_owned);
    options.rules = Some(names.to_vec());
    let report = fused(&fixture("llama/f32", DType::F32), &kernels(RULES), &options).report;
    for fired in &report.fired {
        let kept = fired.outcome == Outcome::Kept;
        assert_eq!(kept, fired.rule == "t-swiglu", "{fired:?}");
    }
    assert!(report.fired.iter().any(|f| f.rule == "t-add-rmsnorm"));
    assert!(report.fired.iter().any(|f| f.rule == "t-swiglu"));
}

#[test]
fn a_kernel_for_small_steps_only_says_so() {
    let mut options = crate::support::on(
        "sm_90a",
        infernum_passes::fuse::Bucket { min: 17, max: 64, decode: false },
    );
    let few = infernum_passes::fuse::OpCost {
        when: vec!["tokens.max <= 16".to_owned().try_into().expect("a condition")],
        ..Default::default()
    };
    options.costs.ops.insert("t_attention".to_owned(), few);
    let report = fused(&fixture("llama/f32", DType::F32), &kernels(RULES), &options).report;
    let fired = report.fired.iter().find(|f| f.rule == "t-attention").expect("it fires");
    let why = "`t_attention` has no kernel on sm_90a where not `tokens.max <= 16`";
    assert!(fired.no_kernel.iter().any(|w| w == why), "{:?}", fired.no_kernel);
}
