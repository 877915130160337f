//! What calls cost, where that decides what is fused: experts that are hit, rows that a window shows.

use std::fmt::Write;

use infernum_ir::{Dims, Module, NodeKind, Op, OpCall, Type, text};
use infernum_passes::Bucket;
use infernum_passes::data::Kernels;
use infernum_passes::fuse::Prices;

use crate::support::{calls, fused, on};

/// A mixture of `experts` gated networks, of which a token goes to `chosen`.
struct Mixture {
    name: &'static str,
    experts: u64,
    chosen: u64,
    hidden: u64,
    inner: u64,
}

const MIXTURES: [Mixture; 2] = [
    Mixture { name: "Mixtral 8x7B", experts: 8, chosen: 2, hidden: 4096, inner: 14336 },
    Mixture { name: "Qwen3 30B-A3B", experts: 128, chosen: 8, hidden: 2048, inner: 768 },
];

impl Mixture {
    fn module(&self) -> Module {
        let Mixture { experts: e, chosen: k, hidden: h, inner: f, .. } = self;
        let body = format!(
            r#"  %t = step tokens : u32[T]
  %table = weight "table" : const bf16[32, {h}]
  %w_router = weight "router" : const bf16[{e}, {h}]
  %w_gate = weight "gate" : const bf16[{e}, {f}, {h}]
  %w_up = weight "up" : const bf16[{e}, {f}, {h}]
  %w_down = weight "down" : const bf16[{e}, {h}, {f}]
  %x = embedding(%t, %table) : bf16[T, {h}]
  %logits = linear(%x, %w_router, _) {{dtype: none}} : bf16[T, {e}]
  %scores = softmax(%logits, _) : bf16[T, {e}]
  %best, %ids = topk(%scores, _) {{k: {k}, groups: 1, keep: 1}} : bf16[T, {k}], u32[T, {k}]
  %gate = expert_linear(%x, %w_gate, %ids, _, _, _) : bf16[T, {k}, {f}]
  %up = expert_linear(%x, %w_up, %ids, _, _, _) : bf16[T, {k}, {f}]
  %act = silu(%gate) : bf16[T, {k}, {f}]
  %inner = mul(%act, %up) : bf16[T, {k}, {f}]
  %down = expert_linear(%inner, %w_down, %ids, _, _, _) : bf16[T, {k}, {h}]
  %column = reshape(%best) {{shape: [T, {k}, 1]}} : bf16[T, {k}, 1]
  %weighted = mul(%down, %column) : bf16[T, {k}, {h}]
  %sum = reduce(%weighted) {{by: sum, axis: 1}} : bf16[T, 1, {h}]
  %routed = reshape(%sum) {{shape: [T, {h}]}} : bf16[T, {h}]
  return %routed
"#
        );
        let text = format!("module m\n\ngraph g {{\n{body}}}\n\nschedule g 0..1\n");
        text::parse(&text, "test").unwrap_or_else(|e| panic!("{e}"))
    }

    /// Experts that `tokens` are expected to hit.
    fn hit(&self, tokens: u32) -> f64 {
        let missed = 1.0 - self.chosen as f64 / self.experts as f64;
        self.experts as f64 * (1.0 - missed.powi(tokens as i32))
    }
}

/// The first call of an op: its operands' types, attributes and result types.
fn found(module: &Module, op: &str) -> (Op, Vec<Option<Type>>, Vec<infernum_ir::Attr>, Vec<Type>) {
    let graph = &module.graphs[0];
    let call = graph.nodes().find_map(|(i, node)| match &node.kind {
        NodeKind::Op { op: o, attrs } if o.name == op => {
            let operands = graph.operands(i).into_iter().map(|v| v.map(|v| graph.ty(v).clone()));
            Some((*o, operands.collect(), attrs.clone(), node.types.clone()))
        }
        _ => None,
    });
    call.unwrap_or_else(|| panic!("no {op} in {}", text::print(module)))
}

#[test]
fn experts_are_fused_at_every_size_and_priced_by_those_that_are_hit() {
    let kernels = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"));
    let mut shown = String::new();
    for mixture in MIXTURES {
        let before = mixture.module();
        for tokens in [1u32, 16, 64] {
            let n = u64::from(tokens);
            let bucket = Bucket { min: n, max: n, decode: true };
            let options = on("sm_90a", bucket);
            let out = fused(&before, &kernels, &options);
            let made = calls(&out.module);
            // Few tokens read what they sum; of more, those of one expert are taken together.
            let expected: &[&str] = if tokens <= 8 {
                &["expert_gated", "expert_sum"]
            } else {
                &["group_rows", "expert_gated", "expert_linear", "combine_experts"]
            };
            for op in expected {
                assert_eq!(made.get(*op), Some(&1), "{} T = {tokens}: {made:?}", mixture.name);
            }
            assert_eq!(made.contains_key("expert_linear"), tokens > 8, "{made:?}");

            let (op, operands, attrs, results) = found(&out.module, "expert_gated");
            let types: Vec<Option<&Type>> = operands.iter().map(Option::as_ref).collect();
            let dims = bucket.dims(1024);
            let work = (op.work)(&OpCall { op, operands: &types, attrs: &attrs }, &results, &dims);
            let weights = mixture.hit(tokens) * (2 * 2 * mixture.hidden * mixture.inner) as f64;
            // Beside the weights there are a few rows of activations.
            let ratio = work.bytes as f64 / weights;
            assert!((1.0..1.02).contains(&ratio), "{} T = {tokens}: {ratio}", mixture.name);
            let report = &out.report.graphs[0];
            let price = options.prices().price(op, &types, &attrs, &results).us;
            let _ = writeln!(
                shown,
                "{}, T = {tokens}: {:.2} experts hit, {} -> {} launches, {:.1} -> {:.1} us, expert_gated {price:.1} us",
                mixture.name,
                mixture.hit(tokens),
                report.launches.0,
                report.launches.1,
                report.cost_us.0,
                report.cost_us.1
            );
        }
    }
    insta::assert_snapshot!(shown);
}

fn attention(window: &str) -> Module {
    let body = format!(
        r#"  %t = step tokens : u32[T]
  %table = weight "table" : const bf16[32, 4096]
  %k = state k : state bf16[8, 128]
  %v = state v : state bf16[8, 128]
  %x = embedding(%t, %table) : bf16[T, 4096]
  %kv = slice(%x) {{axis: 1, start: 0, len: 1024}} : bf16[T, 1024]
  %q = reshape(%x) {{shape: [T, 32, 128]}} : bf16[T, 32, 128]
  %rows = reshape(%kv) {{shape: [T, 8, 128]}} : bf16[T, 8, 128]
  %k1 = kv_write(%k, %rows) : state bf16[8, 128]
  %v1 = kv_write(%v, %rows) : state bf16[8, 128]
  %keys = kv_read(%k1) : bf16[S, 8, 128]
  %values = kv_read(%v1) : bf16[S, 8, 128]
  %dots = scores(%q, %keys) : f32[32, T, S]
  %scaled = scale(%dots) {{by: 0.1}} : f32[32, T, S]
  %masked = mask(%scaled) {{window: {window}}} : f32[32, T, S]
  %probs = softmax(%masked, _) : f32[32, T, S]
  %y = mix(%probs, %values) : bf16[T, 32, 128]
  return %y, %k1, %v1
"#
    );
    let text = format!("module m\n\ngraph g {{\n{body}}}\n\nschedule g 0..1\n");
    text::parse(&text, "test").unwrap_or_else(|e| panic!("{e}"))
}

/// A layer with a window costs what a layer costs whose context is no longer than that.
#[test]
fn attention_is_priced_by_the_rows_its_window_shows() {
    let kernels = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"));
    let price = |window: &str, bucket: Bucket, context: u64| {
        let mut options = on("sm_90a", bucket);
        options.context = context;
        let module = fused(&attention(window), &kernels, &options).module;
        let (op, operands, attrs, results) = found(&module, "paged_attention");
        let types: Vec<Option<&Type>> = operands.iter().map(Option::as_ref).collect();
        let work = |dims: &Dims| {
            (op.work)(&OpCall { op, operands: &types, attrs: &attrs }, &results, dims)
        };
        let prices = Prices::new(&options.costs, "sm_90a", bucket, context);
        (prices.price(op, &types, &attrs, &results).us, work(&bucket.dims(context)))
    };
    let decode = Bucket { min: 64, max: 64, decode: true };
    let (full, _) = price("none", decode, 8192);
    let (sliding, work) = price("512", decode, 8192);
    let (short, same) = price("none", decode, 512);
    assert_eq!(work, same, "64 sequences of 512 rows each");
    assert!((sliding - short).abs() < 1e-9 && full > 8.0 * sliding, "{full} {sliding} {short}");
    // A window that is longer than the context hides nothing.
    assert_eq!(price("100000", decode, 8192).1, price("none", decode, 8192).1);
    // A prompt reads the rows before its first window once, and each token sees so many.
    let prompt = Bucket { min: 2048, max: 2048, decode: false };
    let (full, all) = price("none", prompt, 8192);
    let (sliding, some) = price("512", prompt, 8192);
    assert!(full > sliding && all.flops > 15 * some.flops, "{all:?} {some:?}");
    let row = 2 * 8 * 128 * 2;
    assert_eq!(all.bytes - some.bytes, (8192 - (511 + 2048)) * row, "{all:?} {some:?}");
}
