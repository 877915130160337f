//! Single rules on graphs of a few nodes.

use infernum_frontend_hf::spec::Source;
use infernum_ir::text;
use infernum_passes::data::Numerics;
use infernum_passes::fuse::{Bucket, FuseError, Limits, Measurements, Stop, fuse};

use crate::support::{RULES, calls, fused, kernels, module, nmse, on, options, run};

const NORMED: &str = "  %t = step tokens : u32[T]
  %e = weight \"e\" : const f32[8, 4]
  %w = weight \"w\" : const f32[4]
  %x = embedding(%t, %e) : f32[T, 4]
  %act = silu(%x) : f32[T, 4]
  %sum = add(%x, %act) : f32[T, 4]
  %normed = rmsnorm(%sum, %w) {eps: 1e-5, offset: 0} : f32[T, 4]
  return %sum, %normed\n";

const GATED: &str = "  %t = step tokens : u32[T]
  %e = weight \"e\" : const f32[8, 4]
  %wa = weight \"wa\" : const f32[6, 4]
  %wb = weight \"wb\" : const f32[6, 4]
  %x = embedding(%t, %e) : f32[T, 4]
  %a = linear(%x, %wa, _) {dtype: none} : f32[T, 6]
  %b = linear(%x, %wb, _) {dtype: none} : f32[T, 6]
  %act = silu(%a) : f32[T, 6]
  %y = mul(%b, %act) : f32[T, 6]
  return %y\n";

const ATTENTION: &str = "  %t = step tokens : u32[T]
  %e = weight \"e\" : const f32[8, 4]
  %ks = state k : state f32[1, 2]
  %vs = state v : state f32[1, 2]
  %x = embedding(%t, %e) : f32[T, 4]
  %q = reshape(%x) {shape: [T, 2, 2]} : f32[T, 2, 2]
  %k = slice(%q) {axis: 1, start: 0, len: 1} : f32[T, 1, 2]
  %v = slice(%q) {axis: 1, start: 1, len: 1} : f32[T, 1, 2]
  %k1 = kv_write(%ks, %k) : state f32[1, 2]
  %v1 = kv_write(%vs, %v) : state f32[1, 2]
  %keys = kv_read(%k1) : f32[S, 1, 2]
  %values = kv_read(%v1) : f32[S, 1, 2]
  %dots = scores(%q, %keys) : f32[2, T, S]
  %scaled = scale(%dots) {by: 0.5} : f32[2, T, S]
  %masked = mask(%scaled) {window: none} : f32[2, T, S]
  %p = softmax(%masked, _) : f32[2, T, S]
  %mixed = mix(%p, %values) : f32[T, 2, 2]
  return %mixed, %k1, %v1\n";

/// `site` of each firing of a rule.
macro_rules! sites {
    ($report:expr, $rule:expr) => {
        $report
            .fired
            .iter()
            .filter(|f| f.rule == $rule)
            .map(|f| f.site.value.as_str())
            .collect::<Vec<_>>()
    };
}

#[test]
fn both_results_of_a_fused_op_take_the_place_of_both_values() {
    let before = module(NORMED);
    let after = fused(&before, &kernels(RULES), &options());
    let text = text::print_graph(&after.module.graphs[0]);
    assert!(text.contains("%sum, %normed = t_add_rmsnorm(%x, %act, %w)"), "{text}");
    assert!(!text.contains(" add(") && !text.contains(" rmsnorm("), "{text}");
    assert_eq!(sites!(after.report, "t-add-rmsnorm"), ["normed"]);
    assert!(nmse(&run(&after.module), &run(&before)) < 1e-20);
}

#[test]
fn an_operand_that_is_left_out_is_bound_too() {
    let before = module(&NORMED.replace("(%sum, %w)", "(%sum, _)"));
    let after = fused(&before, &kernels(RULES), &options());
    let text = text::print_graph(&after.module.graphs[0]);
    assert!(text.contains("t_add_rmsnorm(%x, %act, _)"), "{text}");
    // Not where the rule does not say that it may be.
    let strict = kernels(&RULES.replace("\"const [K]?\"", "\"const [K]\""));
    assert!(!calls(&fused(&before, &strict, &options()).module).contains_key("t_add_rmsnorm"));
}

#[test]
fn commutative_operands_match_in_either_order() {
    let before = module(GATED);
    let after = fused(&before, &kernels(RULES), &options());
    let text = text::print_graph(&after.module.graphs[0]);
    assert_eq!(sites!(after.report, "t-swiglu"), ["y"]);
    assert!(text.contains("%y = t_swiglu("), "{text}");
    assert!(nmse(&run(&after.module), &run(&before)) < 1e-20);
}

#[test]
fn packed_weights_are_one_product_and_cost_nothing_to_join() {
    let before = module(GATED);
    let mut options = options();
    // Slices of a row are views on this imaginary target.
    options.costs.ops.insert(
        "slice".to_owned(),
        infernum_passes::fuse::OpCost {
            launch_us: Some(0.0),
            factor: infernum_passes::fuse::Factor::Number(0.0),
            when: Vec::new(),
        },
    );
    let after = fused(&before, &kernels(RULES), &options);
    let calls = calls(&after.module);
    assert_eq!((calls["linear"], calls["concat"], calls["slice"]), (1, 1, 2), "{calls:?}");
    assert!(nmse(&run(&after.module), &run(&before)) < 1e-20);
    let graph = &after.report.graphs[0];
    assert_eq!(graph.launches, (5, 3), "{graph:?}");
}

/// Measurements go before the model: a fused op that measures slow is not chosen.
#[test]
fn a_measurement_overrides_the_model() {
    let fused_with = |file: &str| {
        let mut options = options();
        options.costs.measured =
            Measurements::parse(&Source::new("m.ron", file)).unwrap_or_else(|e| panic!("{e}"));
        fused(&module(NORMED), &kernels(RULES), &options)
    };
    let measured = |keys: &str, us: f64| {
        format!("Measurements(calls: [(op: \"t_add_rmsnorm\", {keys}, us: {us:?})])")
    };
    let here = "target: \"sm_90a\"";
    let chosen = |file: &str| calls(&fused_with(file).module).contains_key("t_add_rmsnorm");
    assert!(chosen("Measurements(calls: [])"), "the model prefers the fused op");
    assert!(!chosen(&measured(here, 1000.0)), "a slow measurement is believed");
    assert!(chosen(&measured(here, 1.0)), "and so is a fast one");
    // Measurements of something else say nothing.
    for other in [
        "target: \"cpu\"",
        "target: \"sm_90a\", bucket: Some((min: 2, max: 16, decode: false))",
        "target: \"sm_90a\", dtype: Some(bf16)",
        "target: \"sm_90a\", operands: Some([\"f32[T, 8]\", \"f32[T, 8]\", \"_\"])",
    ] {
        assert!(chosen(&measured(other, 1000.0)), "{other}");
    }
    // Of two that fit, the one with more keys counts.
    let both = "Measurements(calls: [
        (target: \"sm_90a\", op: \"t_add_rmsnorm\", us: 1.0, dtype: Some(f32)),
        (target: \"sm_90a\", op: \"t_add_rmsnorm\", us: 1000.0),
        (target: \"sm_90a\", op: \"silu\", us: 2.5),
    ])";
    let text = fused_with(both).report.to_string();
    assert!(text.contains("t_add_rmsnorm: 1.00 us, measured"), "{text}");
    assert!(text.contains("silu: 2.50 us, measured"), "{text}");
    assert!(text.contains("us, modelled"), "{text}");
    let wrong = measured(here, f64::NAN);
    let error = Measurements::parse(&Source::new("m.ron", &wrong)).expect_err("not a time");
    assert!(error.to_string().contains("expected microseconds, found NaN"), "{error}");
}

#[test]
fn attention_absorbs_its_parts_and_threads_the_cache() {
    let before = module(ATTENTION);
    let after = fused(&before, &kernels(RULES), &options());
    let calls = calls(&after.module);
    assert_eq!(calls["t_attention"], 1, "{calls:?}");
    for gone in ["kv_write", "kv_read", "scores", "softmax", "mix", "t_write_scaled"] {
        assert!(!calls.contains_key(gone), "{calls:?}");
    }
    let text = text::print_graph(&after.module.graphs[0]);
    assert!(text.contains("%k1, %v1, %mixed = t_attention("), "{text}");
    assert!(text.contains("return %mixed, %k1, %v1"), "{text}");
    assert!(nmse(&run(&after.module), &run(&before)) < 1e-20);
}

/// Every way to write the cache that is in the e-graph writes the same version: one may be taken.
#[test]
fn a_version_has_one_writer_whatever_is_cheapest() {
    let before = module(ATTENTION);
    for price in [0.0, 1.0, 100.0] {
        let mut options = options();
        for op in ["kv_write", "t_write_scaled"] {
            let cost = infernum_passes::fuse::OpCost {
                launch_us: Some(price),
                factor: infernum_passes::fuse::Factor::Number(1.0),
                when: Vec::new(),
            };
            options.costs.ops.insert(op.to_owned(), cost);
        }
        // `fused` verifies the result, which refuses a second writer.
        let after = fused(&before, &kernels(RULES), &options);
        assert!(nmse(&run(&after.module), &run(&before)) < 1e-20);
    }
}

#[test]
fn a_condition_that_does_not_hold_is_named_with_its_values() {
    let long = on("sm_90a", Bucket { min: 65, max: 128, decode: false });
    let report = fused(&module(GATED), &kernels(RULES), &long).report;
    let refused = &report.refused[0];
    assert_eq!((refused.rule.as_str(), refused.site.value.as_str()), ("t-swiglu", "y"));
    assert_eq!(refused.condition, "tokens.max <= 64");
    assert_eq!(refused.values, [("tokens".to_owned(), "{min: 65, max: 128}".to_owned())]);
    assert!(
        report
            .to_string()
            .contains("refused     t-swiglu at %y\n              needs tokens.max <= 64")
    );

    let cpu = on("cpu", Bucket { min: 1, max: 1, decode: true });
    let report = fused(&module(GATED), &kernels(RULES), &cpu).report;
    assert_eq!(report.refused[0].condition, "device.kind == 'cuda'");
}

#[test]
fn sides_of_unlike_type_are_never_united() {
    let body = GATED.replace("silu(%a)", "gelu(%a)");
    let report = fused(&module(&body), &kernels(RULES), &options()).report;
    let refused = report.refused.iter().find(|r| r.rule == "t-wrong-type").expect("refused");
    assert_eq!(refused.condition, "`y` is f32[T, 6] on the left and bf16[T, 6] on the right");
}

#[test]
fn what_nothing_matches_comes_back_as_it_was() {
    let before = module(GATED);
    for rules in ["[]", RULES] {
        let mut options = options();
        options.disabled = if rules == "[]" { vec![] } else { vec!["t_swiglu".into()] };
        let after = fused(&before, &kernels(rules), &options);
        assert_eq!(after.module, before);
    }
    let mut exact = options();
    exact.numerics = Numerics::Exact;
    assert_eq!(fused(&before, &kernels(RULES), &exact).module, before);
}

#[test]
fn an_unknown_name_is_an_error_with_a_hint() {
    let mut options = options();
    options.disabled = vec!["t-swigl".to_owned()];
    let error = fuse(&module(GATED), &kernels(RULES), &options).expect_err("no such rule");
    assert!(matches!(error, FuseError::UnknownName { .. }));
    assert!(error.to_string().contains("`t-swigl` (did you mean `t-swiglu`?)"), "{error}");
}

#[test]
fn a_cap_is_told_and_what_was_found_still_holds() {
    let before = module(ATTENTION);
    let mut options = options();
    let nodes = fused(&before, &kernels(RULES), &options).report.graphs[0].nodes;
    options.limits = Limits { nodes: nodes.0 + 1, rounds: 30, search: 1 };
    let after = fused(&before, &kernels(RULES), &options);
    assert_eq!(after.report.graphs[0].stop, Stop::NodeCap);
    let cut = format!("cut off at {} nodes", nodes.0 + 1);
    assert!(after.report.warnings[0].contains(&cut), "{:?}", after.report.warnings);
    assert!(nmse(&run(&after.module), &run(&before)) < 1e-20);
    options.limits = Limits { rounds: 1, ..Limits::default() };
    assert_eq!(fused(&before, &kernels(RULES), &options).report.graphs[0].stop, Stop::RoundCap);
}
