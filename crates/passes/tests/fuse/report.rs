//! What is told of a fusion.

use infernum_ir::DType;
use infernum_passes::fuse::Outcome;

use crate::support::{RULES, fixture, fused, kernels, options};

#[test]
fn a_firing_has_its_spec_line_and_bindings() {
    let report = fused(&fixture("llama/f32", DType::F32), &kernels(RULES), &options()).report;
    let fired = report.fired.iter().find(|f| f.rule == "t-add-rmsnorm").expect("it fires");
    assert_eq!(fired.site.value, "x.mid_normed");
    let loc = fired.site.loc.as_deref().unwrap_or_default();
    assert!(loc.starts_with("models/blocks/decoder_layer.ron:"), "{loc}");
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
    assert_eq!((miss.site.value.as_str(), miss.expected.as_str()), ("x.normed", "add"));
    assert_eq!(miss.found, "the parameter %x");
}

#[test]
fn what_lost_on_cost_has_its_price() {
    let mut options = options();
    let dear =
        infernum_passes::fuse::OpCost { launch_us: Some(50.0), factor: 1.0, most_tokens: None };
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
