//! Every op on the CPU, through its kernel, its constant form or the fallback.

use std::collections::BTreeSet;

use infernum_ir::interp::{Rounding, SeqShape, States, StepShape};
use infernum_ir::{DType, Dims, OPS, Op};
use infernum_runtime::check::{Comparison, allowed};
use infernum_runtime::{Observed, PlanExecutor, StepInputs};

use crate::common::{Checkpoint, executor, module, ops};

/// Activations of every kind, with odd sizes; a case uses what it needs.
const PRELUDE: &str = r#"
  %ids = step tokens : u32[T]
  %pos = step positions : i32[T]
  %cpos = step context_positions : i32[S]
  %wx = weight "x" : const DT[31, 42]
  %wy = weight "y" : const DT[31, 42]
  %wk = weight "k" : const DT[31, 21]
  %ch = weight "ch" : const f32[42]
  %chd = weight "chd" : const DT[42]
  %x = embedding(%ids, %wx) : DT[T, 42]
  %y = embedding(%ids, %wy) : DT[T, 42]
  %q = reshape(%x) {shape: [T, 6, 7]} : DT[T, 6, 7]
  %kf = embedding(%ids, %wk) : DT[T, 21]
  %kt = reshape(%kf) {shape: [T, 3, 7]} : DT[T, 3, 7]
  %k0 = state k : state DT[3, 7]
  %k1 = kv_write(%k0, %kt) : state DT[3, 7]
  %ks = kv_read(%k1) : DT[S, 3, 7]
  %sc = scores(%q, %ks) : f32[6, T, S]
"#;

/// Statements, and what they return.
const CASES: &[(&str, &str)] = &[
    ("%r = add(%x, %y) : DT[T, 42]", "%r"),
    ("%r = add(%x, %ch) : DT[T, 42]", "%r, %x"),
    // Both operands die, but only one of them lies where the result goes.
    ("%t = scale(%x) {by: 3} : DT[T, 42]\n  %r = mul(%t, %t) : DT[T, 42]", "%r"),
    (
        r#"%one = weight "one" : const DT[1]
  %r = mul(%x, %one) : DT[T, 42]"#,
        "%r",
    ),
    (
        "%m = reduce(%q) {by: max, axis: 2} : DT[T, 6, 1]
  %r = mul(%q, %m) : DT[T, 6, 7]",
        "%r",
    ),
    (
        "%m = reduce(%q) {by: mean, axis: 1} : DT[T, 1, 7]
  %r = add(%q, %m) : DT[T, 6, 7]",
        "%r, %m",
    ),
    ("%r = reduce(%x) {by: sum, axis: 1} : DT[T, 1]", "%r"),
    ("%r = reduce(%sc) {by: max, axis: 0} : f32[1, T, S]", "%r"),
    (
        "%r = cast(%x) {dtype: f32} : f32[T, 42]\n  %s = cast(%r) {dtype: f16} : f16[T, 42]",
        "%r, %s",
    ),
    ("%r = cast(%x) {dtype: bf16} : bf16[T, 42]", "%r"),
    (
        "%r = cast(%pos) {dtype: f32} : f32[T]\n  %s = cast(%cpos) {dtype: bf16} : bf16[S]",
        "%r, %s",
    ),
    ("%r = concat(%x, %y) {axis: 1} : DT[T, 84]", "%r"),
    ("%r = concat(%q, %kt) {axis: 1} : DT[T, 9, 7]", "%r"),
    ("%r = concat(%sc, %sc) {axis: 0} : f32[12, T, S]", "%r"),
    ("%r = slice(%q) {axis: 1, start: 2, len: 3} : DT[T, 3, 7]", "%r"),
    ("%r = slice(%x) {axis: 1, start: 5, len: 1} : DT[T, 1]", "%r"),
    ("%r = slice(%sc) {axis: 0, start: 1, len: 2} : f32[2, T, S]", "%r"),
    (
        r#"%wq = weight "quantised.weight" : const q8_0[5, 64]
  %w = dequantise(%wq) {dtype: f32} : f32[5, 64]
  %p = slice(%w) {axis: 1, start: 3, len: 42} : f32[5, 42]
  %r = linear(%x, %p, _) {dtype: f32} : f32[T, 5]"#,
        "%r",
    ),
    (
        r#"%w = weight "lin" : const DT[33, 42]
  %b = weight "bias" : const f32[33]
  %r = linear(%x, %w, %b) {dtype: none} : DT[T, 33]
  %s = linear(%q, %wq, _) {dtype: f32} : f32[T, 6, 5]"#,
        "%r, %s",
    ),
    (
        r#"%w = weight "e.{expert}" stack 5 : const DT[5, 9, 42]
  %wr = weight "router" : const DT[5, 42]
  %l = linear(%x, %wr, _) {dtype: f32} : f32[T, 5]
  %t, %i = topk(%l, _) {k: 3, groups: 1, keep: 1} : f32[T, 3], u32[T, 3]
  %b = weight "b" : const DT[5, 9]
  %rb = embedding(%i, %b) : DT[T, 3, 9]
  %biases = weight "biases" : const f32[5, 9]
  %order, %starts = group_rows(%i) {groups: 5} : u32[T, 3], u32[6]
  %re = expert_linear(%x, %w, %i, %biases, %order, %starts) : DT[T, 3, 9]
  %r = add(%re, %rb) : DT[T, 3, 9]
  %w2 = weight "d.{expert}" stack 5 : const DT[5, 4, 9]
  %s = expert_linear(%r, %w2, %i, _, _, _) : DT[T, 3, 4]"#,
        "%r, %i, %s",
    ),
    (
        r#"%b = weight "rbias" : const f32[42]
  %r, %i = topk(%x, %b) {k: 5, groups: 6, keep: 2} : DT[T, 5], u32[T, 5]"#,
        "%r, %i",
    ),
    ("%o = step output_rows : u32[B]\n  %r = gather_rows(%q, %o) : DT[B, 6, 7]", "%r"),
    ("%r = argmax(%x) : u32[T]", "%r"),
    ("%z = scale(%q) {by: 0} : DT[T, 6, 7]\n  %r = argmax(%z) : u32[T, 6]", "%r"),
    (
        "%o = step output_rows : u32[B]
  %picks = step picks : u32[B, 16]
  %last = gather_rows(%x, %o) : DT[B, 42]
  %r, %i, %l, %t = pick(%last, %ids, %o, %picks) {top: 3} : DT[B, 42], u32[B], f32[B, 4], u32[B, 4]",
        "%r, %i, %l, %t",
    ),
    ("%r = gelu(%x) : DT[T, 42]", "%r"),
    ("%r = gelu_tanh(%x) : DT[T, 42]", "%r"),
    ("%r = silu(%x) : DT[T, 42]", "%r"),
    ("%r = scale(%x) {by: 1.7} : DT[T, 42]", "%r"),
    ("%r = softcap(%x) {cap: 0.7} : DT[T, 42]", "%r"),
    ("%r = softcap(%x) {cap: 50} : DT[T, 42]", "%r"),
    (
        r#"%r = map(%x, %y, %ch) {expr: "a > b ? max(a, c) ** 2 : sqrt(abs(b * c)) - log(2 + a) % 3"} : DT[T, 42]"#,
        "%r",
    ),
    (r#"%r = map(%x, _, _) {expr: "erf(a) + sin(a) * cos(a) + floor(3 * a)"} : DT[T, 42]"#, "%r"),
    (r#"%r = map(%x, _, _) {expr: "round(8 * a) / 8"} : DT[T, 42]"#, "%r"),
    ("%r = layernorm(%x, %ch, %chd) {eps: 0.1} : DT[T, 42]", "%r"),
    ("%r = layernorm(%q, _, _) {eps: 0.00001} : DT[T, 6, 7]", "%r"),
    ("%r = rmsnorm(%x, %ch) {eps: 0.1, offset: 1} : DT[T, 42]", "%r, %x"),
    ("%r = rmsnorm(%q, _) {eps: 0.00001, offset: 0} : DT[T, 6, 7]", "%r"),
    ("%r = mask(%sc) {window: none} : f32[6, T, S]", "%r"),
    ("%r = mask(%sc) {window: 3} : f32[6, T, S]", "%r, %sc"),
    ("%m = mask(%sc) {window: 4} : f32[6, T, S]\n  %r = softmax(%m, _) : f32[6, T, S]", "%r"),
    (
        r#"%sinks = weight "sinks" : const DT[6]
  %m = mask(%sc) {window: none} : f32[6, T, S]
  %r = softmax(%m, %sinks) : f32[6, T, S]"#,
        "%r, %m",
    ),
    ("%r = mask_chunks(%sc) {chunk: 4} : f32[6, T, S]", "%r, %sc"),
    (
        "%six = slice(%x) {axis: 1, start: 3, len: 6} : DT[T, 6]
  %by = combine_heads(%sc, %six) : f32[1, T, S]
  %r = mask_topk(%sc, %by) {k: 4} : f32[6, T, S]",
        "%by",
    ),
    (
        "%one = slice(%sc) {axis: 0, start: 2, len: 1} : f32[1, T, S]
  %r = mask_topk(%sc, %one) {k: 4} : f32[6, T, S]",
        "%r",
    ),
    (
        r#"%slopes = weight "slopes" : const f32[6]
  %r = alibi(%sc, %slopes) : f32[6, T, S]"#,
        "%r",
    ),
    ("%r = transpose(%q) : DT[T, 7, 6]", "%r"),
    // A constant that is turned when it is loaded.
    (
        r#"%w = weight "turned" : const DT[6, 7, 35]
  %t = transpose(%w) : const DT[6, 35, 7]
  %r = head_linear(%q, %t) : DT[T, 6, 35]"#,
        "%r",
    ),
    (
        r#"%w = weight "heads" : const DT[6, 5, 7]
  %r = head_linear(%q, %w) : DT[T, 6, 5]"#,
        "%r",
    ),
    ("%r = softmax(%x, _) : DT[T, 42]", "%r"),
    ("%r = mix(%sc, %ks) : DT[T, 6, 7]", "%r"),
    (
        "%w = reshape(%y) {shape: [T, 7, 6]} : DT[T, 7, 6]
  %r = matmul(%q, %w) : DT[T, 6, 6]",
        "%r",
    ),
    (
        r#"%b = weight "square" : const f32[7, 7]
  %x1 = slice(%q) {axis: 1, start: 1, len: 1} : DT[T, 1, 7]
  %x2 = reshape(%x1) {shape: [T, 7]} : DT[T, 7]
  %r = matmul(%x2, %b) : DT[T, 7]"#,
        "%r",
    ),
    // A constant where the kernel wants activations.
    (
        r#"%t = weight "rows" : const DT[31, 3, 2]
  %r = gather_rows(%t, %ids) : DT[T, 3, 2]"#,
        "%r",
    ),
    (
        r#"%f = table() {expr: "100 ** (-i / 3)", len: 3} : const f32[3]
  %r = rope(%q, %pos, %f) {style: neox, scale: 1.2} : DT[T, 6, 7]
  %s = rope(%ks, %cpos, %f) {style: interleaved, scale: 1} : DT[S, 3, 7]"#,
        "%r, %s",
    ),
];

fn case(index: usize, dtype: &str) -> String {
    let (statements, results) = CASES[index];
    let weight = "%wq = weight \"narrow\" : const DT[5, 7]\n  ";
    let extra =
        if statements.contains("%wq,") && !statements.contains("quantised") { weight } else { "" };
    let text = format!(
        "module case\n\ngraph g {{{PRELUDE}  {extra}{statements}\n  return {results}, %k1\n}}\n\nschedule g 0..1\n"
    );
    text.replace("DT", dtype)
}

const LIMITS: Dims = Dims { t: 30, b: 3, s: 60, pairs: 400, seqs: 3 };

/// Two steps of three ragged sequences; blocks are shuffled.
fn steps() -> Vec<(StepShape, Vec<u32>)> {
    let step = |sizes: &[(usize, usize)]| {
        StepShape::of(sizes.iter().map(|&(new, context)| SeqShape { new, context }).collect())
    };
    let tokens = |n: usize, seed: usize| (0..n).map(|i| ((i * 11 + seed) % 31) as u32).collect();
    vec![
        (step(&[(7, 7), (1, 1), (13, 13)]), tokens(21, 3)),
        (step(&[(1, 8), (5, 6), (1, 14)]), tokens(7, 8)),
    ]
}

fn check(index: usize, dtype: DType) {
    let module = module(&case(index, dtype.name()));
    let checkpoint = Checkpoint::random(&module);
    let mut executor = executor(&module, &checkpoint, LIMITS, true);
    let mut states = States::default();
    let own = ops(&module)[PRELUDE.matches(" = embedding(").count() + 5..].to_vec();
    for (step, tokens) in steps() {
        let exact = checkpoint.interpret(&module, &step, &tokens, &mut states, Rounding::ToType);
        let mut inputs = StepInputs::new(4);
        let mut at = 0;
        for (i, seq) in step.seqs.iter().enumerate() {
            let blocks: Vec<u32> = (0..4).map(|b| (b * 7 + i as u32 * 3 + 1) % 40).collect();
            inputs.push(&tokens[at..at + seq.new], seq.context, &blocks).expect("inputs");
            at += seq.new;
        }
        let mut observe = |_: usize, found: Vec<Observed>| {
            assert_eq!(found.len(), exact[0].len());
            for (found, exact) in found.iter().zip(&exact[0]) {
                assert_eq!(found.shape, exact.shape);
                let tolerance =
                    |op| allowed(Op::find(op).expect("an op").tolerance, found.ty.dtype);
                // The scores that a case starts from are sums too.
                let allowed = own.iter().map(|op| tolerance(op)).sum::<f64>() + tolerance("scores");
                let mut compared = Comparison::default();
                let data = (&found.data[..], &exact.data[..]);
                compared
                    .add(&found.name, &found.shape, data, allowed)
                    .unwrap_or_else(|e| panic!("{dtype} {own:?}: {e}"));
                assert!(compared.is_within(allowed), "{dtype} {own:?} {allowed:e}: {compared:?}");
            }
        };
        executor.submit_observed(&inputs, &mut observe).unwrap_or_else(|e| panic!("{e}"));
    }
}

#[test]
fn every_op_agrees_with_its_reference() {
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        (0..CASES.len()).for_each(|i| check(i, dtype));
    }
}

#[test]
fn every_op_has_a_case() {
    let covered: BTreeSet<&str> =
        (0..CASES.len()).flat_map(|i| ops(&module(&case(i, "f32")))).collect();
    let all: BTreeSet<&str> = OPS.iter().map(|op| op.name).collect();
    assert_eq!(covered, all);
}

#[test]
fn only_these_ops_fall_back() {
    let mut slow = BTreeSet::new();
    for i in 0..CASES.len() {
        let module = module(&case(i, "bf16"));
        let executor = executor(&module, &Checkpoint::random(&module), LIMITS, true);
        slow.extend(
            executor
                .fallbacks()
                .into_iter()
                .filter_map(|f| f.rsplit(' ').next().map(str::to_owned)),
        );
    }
    assert_eq!(
        slow.into_iter().collect::<Vec<_>>(),
        [
            "alibi",
            "cast",
            "combine_heads",
            "gather_rows",
            "mask_chunks",
            "mask_topk",
            "pick",
            "transpose"
        ]
    );
}
