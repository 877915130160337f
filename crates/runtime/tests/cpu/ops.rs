//! Every op on the CPU, through its kernel, its constant form or the fallback.

use std::collections::BTreeSet;

use infernum_ir::interp::{Rounding, SeqShape, States, StepShape};
use infernum_ir::{DType, Dims, Memory, OPS, Op};
use infernum_runtime::check::{Comparison, allowed};
use infernum_runtime::{Executor, Observed, PlanExecutor, StepInputs, most_blocks, tables};

use crate::common::{BLOCKS, Checkpoint, executor, module, ops};

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
    ("%r = round_groups(%x) {group: 32} : f32[T, 42]", "%r"),
    (
        r#"%w128 = weight "w128" : const DT[31, 128]
  %x128 = embedding(%ids, %w128) : DT[T, 128]
  %r = quantise_rows(%x128) : quantised_rows DT[T, 128]"#,
        "%x128, %r",
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
        "%r, %i, %s, %order, %starts",
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
    ("%r = mask_far(%sc) {reach: 2} : f32[6, T, S]", "%r, %sc"),
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
        r#"%taps = weight "taps" : const DT[42, 3]
  %c0 = state c : state slot DT[2, 42]
  %c1, %r = causal_conv(%c0, %x, %taps, %ch) : state slot DT[2, 42], DT[T, 42]
  %d0 = state d : state slot DT[2, 42]
  %d1, %s = causal_conv(%d0, %r, %taps, _) : state slot DT[2, 42], DT[T, 42]"#,
        "%r, %s, %c1, %d1",
    ),
    // Large enough to be shared among threads, along an axis that is not summed over.
    (
        r#"%a = weight "decay" : const f32[130]
  %m0 = state m : state slot f32[42, 130]
  %m1, %r = scan(%m0, %x, %a, %chd, _, _, _, _, _, _) {body: "s[c, n], x[c], a[n], d[c] -> y[c]: s[c, n] = s * exp(-abs(a)) + x * a; seen[c] = sum(s * a); y[c] = seen / 8 + d * x", dtype: f32} : state slot f32[42, 130], f32[T, 42]"#,
        "%r, %m1",
    ),
    // Summed over the first axis, and neighbours that share an input's elements.
    (
        "%m0 = state m : state slot f32[6, 3, 7]
  %m1, %r = scan(%m0, %kt, %q, _, _, _, _, _, _, _) {body: \"s[a, b, c], k[b, c], q[a, c] -> y[b, c]: s[a, b, c] = s / 2 + k * q; y[b, c] = sum(s * q)\", dtype: none} : state slot f32[6, 3, 7], DT[T, 3, 7]
  %n0 = state n : state slot f32[12, 7]
  %n1, %t = scan(%n0, %q, %kt, _, _, _, _, _, _, _) {body: \"s[h, d], q[h, d], k[h, d] -> y[h, d]: s[h, d] = max(s, q) * 0.75 + k; y[h, d] = s\", dtype: none} : state slot f32[12, 7], DT[T, 12, 7]",
        "%r, %t, %m1, %n1",
    ),
    (
        r#"%w = weight "heads" : const DT[6, 5, 7]
  %r = head_linear(%q, %w) : DT[T, 6, 5]"#,
        "%r",
    ),
    // Ids of tokens stand for adapters; 0 is none.
    (
        r#"%a = weight "low" : const DT[31, 4, 42]
  %b = weight "high" : const DT[31, 45, 4]
  %r = adapt(%y, %x, %a, %b, %ids) {start: 3} : DT[T, 42]"#,
        "%r",
    ),
    (
        r#"%w = weight "router" : const DT[5, 42]
  %l = linear(%x, %w, _) {dtype: f32} : f32[T, 5]
  %t, %i = topk(%l, _) {k: 3, groups: 1, keep: 1} : f32[T, 3], u32[T, 3]
  %parts, %tokens = expert_slots(%ids, %i) {experts: 5} : u32[T*3], u32[T*3]
  %banks = weight "banks" : const DT[156, 9]
  %r = embedding(%parts, %banks) : DT[T*3, 9]
  %s = gather_rows(%x, %tokens) : DT[T*3, 42]"#,
        "%r, %s",
    ),
    // Rows that are codes.
    (
        "%c0 = state c : state quantised_heads DT[3, 7]
  %c1 = kv_write(%c0, %kt) : state quantised_heads DT[3, 7]
  %r = kv_read(%c1) : DT[S, 3, 7]",
        "%r, %c1",
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
        let groups = executor.groups();
        let mut inputs = StepInputs::new(4).with_groups(&groups);
        let each = most_blocks(&groups, 16, 4, 16) as u32;
        let mut at = 0;
        for (i, seq) in step.seqs.iter().enumerate() {
            let own = i as u32 * each..(i as u32 + 1) * each;
            let blocks = tables(&groups, 16, 4, 16, own.map(|b| b * 7 % BLOCKS));
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

/// States of a fixed size go on from one step to the next as if there had been one, to the bit.
#[test]
fn chunks_of_a_sequence_give_the_same_bits() {
    let recurrent = (0..CASES.len()).filter(|i| CASES[*i].0.contains("state slot"));
    for index in recurrent {
        let module = module(&case(index, "bf16"));
        let checkpoint = Checkpoint::random(&module);
        let run = |chunk: usize| {
            let limits = Dims { pairs: 900, ..LIMITS };
            let mut executor = executor(&module, &checkpoint, limits, true);
            let groups = executor.groups();
            let each = most_blocks(&groups, 30, 4, 30) as u32;
            let blocks = tables(&groups, 30, 4, 30, (0..each).rev());
            let (mut rows, all) = (Vec::new(), (0..30).map(|i| i * 11 % 31).collect::<Vec<u32>>());
            let mut inputs = StepInputs::new(4).with_groups(&groups);
            for (i, tokens) in all.chunks(chunk).enumerate() {
                inputs.clear();
                inputs.push(tokens, i * chunk + tokens.len(), &blocks).expect("inputs");
                let mut observe = |_: usize, found: Vec<Observed>| {
                    let rank = found[0].shape[1..].iter().product();
                    rows.extend(found[0].data.chunks(rank).map(<[f64]>::to_vec));
                };
                executor.submit_observed(&inputs, &mut observe).expect("a step");
            }
            rows
        };
        let whole = run(30);
        assert_eq!(whole.len(), 30);
        for chunk in [1, 7] {
            assert_eq!(run(chunk), whole, "{} in steps of {chunk}", CASES[index].0);
        }
    }
}

#[test]
fn every_op_has_a_case() {
    let covered: BTreeSet<&str> =
        (0..CASES.len()).flat_map(|i| ops(&module(&case(i, "f32")))).collect();
    // What repacks weights is put into plans of GPUs alone.
    let ours = OPS.iter().filter(|op| op.memory != Memory::Repacked);
    // A step of whole sequences is tried with the models that have such; sequences here have a past.
    let ours = ours.filter(|op| op.name != "context_rows");
    let all: BTreeSet<&str> = ours.map(|op| op.name).collect();
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
            "expert_slots",
            "gather_rows",
            "group_rows",
            "mask_chunks",
            "mask_topk",
            "pick",
            "quantise_rows",
            "round_groups",
            "transpose"
        ]
    );
}
