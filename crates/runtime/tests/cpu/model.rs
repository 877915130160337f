//! A small decoder, run in every way a scheduler may cut it.

use infernum_codegen::{Bucket, Launch, TargetKind, VERSION, expand, plan, plan_buckets};
use infernum_ir::interp::{Rounding, States, StepShape};
use infernum_ir::{Dims, Module, text};
use infernum_passes::data::Kernels;
use infernum_runtime::cpu::{CpuExecutor, CpuOptions, has_kernel};
use infernum_runtime::{ExecError, Executor, Observed, PlanExecutor, StepInputs};

use crate::common::{BLOCKS, Checkpoint, executor, module, nmse};

const LIMITS: Dims = Dims { t: 40, b: 4, s: 80, pairs: 1600, seqs: 4 };
const VOCAB: usize = 29;

/// Three layers, one of them with a window; GQA 3; odd sizes; q, k and v as one product.
fn decoder(dtype: &str, rows: &str) -> Module {
    let layer = |name: &str, window: &str| {
        format!(
            r#"
graph {name} {{
  %x = carry 0 : DT[T, 24]
  %n1 = weight "l.{{layer}}.n1" : const DT[24]
  %n2 = weight "l.{{layer}}.n2" : const DT[24]
  %wq = weight "l.{{layer}}.q" : const DT[60, 24]
  %wk = weight "l.{{layer}}.k" : const DT[20, 24]
  %wv = weight "l.{{layer}}.v" : const DT[20, 24]
  %bo = weight "l.{{layer}}.o.bias" : const DT[24]
  %wo = weight "l.{{layer}}.o" : const DT[24, 60]
  %wg = weight "l.{{layer}}.gate" : const DT[19, 24]
  %wu = weight "l.{{layer}}.up" : const DT[19, 24]
  %wd = weight "l.{{layer}}.down" : const DT[24, 19]
  %wqk = concat(%wq, %wk) {{axis: 0}} : const DT[80, 24]
  %wqkv = concat(%wqk, %wv) {{axis: 0}} : const DT[100, 24]
  %pos = step positions : i32[T]
  %freqs = table() {{expr: "100 ** (-i / 5)", len: 5}} : const f32[5]
  %h = rmsnorm(%x, %n1) {{eps: 0.00001, offset: 0}} : DT[T, 24]
  %qkv = linear(%h, %wqkv, _) {{dtype: none}} : DT[T, 100]
  %q0 = slice(%qkv) {{axis: 1, start: 0, len: 60}} : DT[T, 60]
  %k0 = slice(%qkv) {{axis: 1, start: 60, len: 20}} : DT[T, 20]
  %v0 = slice(%qkv) {{axis: 1, start: 80, len: 20}} : DT[T, 20]
  %q1 = reshape(%q0) {{shape: [T, 6, 10]}} : DT[T, 6, 10]
  %k1 = reshape(%k0) {{shape: [T, 2, 10]}} : DT[T, 2, 10]
  %v1 = reshape(%v0) {{shape: [T, 2, 10]}} : DT[T, 2, 10]
  %q = rope(%q1, %pos, %freqs) {{style: neox, scale: 1}} : DT[T, 6, 10]
  %k = rope(%k1, %pos, %freqs) {{style: neox, scale: 1}} : DT[T, 2, 10]
  %ck0 = state k : state DT[2, 10]
  %cv0 = state v : state DT[2, 10]
  %ck = kv_write(%ck0, %k) : state DT[2, 10]
  %cv = kv_write(%cv0, %v1) : state DT[2, 10]
  %ks = kv_read(%ck) : DT[S, 2, 10]
  %vs = kv_read(%cv) : DT[S, 2, 10]
  %s0 = scores(%q, %ks) : f32[6, T, S]
  %s1 = scale(%s0) {{by: 0.31622776601683794}} : f32[6, T, S]
  %s2 = mask(%s1) {{window: {window}}} : f32[6, T, S]
  %p = softmax(%s2, _) : f32[6, T, S]
  %o0 = mix(%p, %vs) : DT[T, 6, 10]
  %o1 = reshape(%o0) {{shape: [T, 60]}} : DT[T, 60]
  %o = linear(%o1, %wo, %bo) {{dtype: none}} : DT[T, 24]
  %y = add(%x, %o) : DT[T, 24]
  %h2 = rmsnorm(%y, %n2) {{eps: 0.00001, offset: 1}} : DT[T, 24]
  %g = linear(%h2, %wg, _) {{dtype: none}} : DT[T, 19]
  %u = linear(%h2, %wu, _) {{dtype: none}} : DT[T, 19]
  %a = silu(%g) : DT[T, 19]
  %m = mul(%a, %u) : DT[T, 19]
  %d = linear(%m, %wd, _) {{dtype: none}} : DT[T, 24]
  %z = add(%y, %d) : DT[T, 24]
  return %z, %ck, %cv
}}
"#
        )
    };
    let text = format!(
        r#"module tiny
graph embed {{
  %ids = step tokens : u32[T]
  %e = weight "embed" : const DT[29, 24]
  %x = embedding(%ids, %e) : DT[T, 24]
  return %x
}}
{}{}
graph head {{
  %x = carry 0 : DT[T, 24]
  %rows = step output_rows : u32[{rows}]
  %e = weight "embed" : const DT[29, 24]
  %n = weight "norm" : const DT[24]
  %l = gather_rows(%x, %rows) : DT[{rows}, 24]
  %h = rmsnorm(%l, %n) {{eps: 0.00001, offset: 0}} : DT[{rows}, 24]
  %logits = linear(%h, %e, _) {{dtype: f32}} : f32[{rows}, 29]
  return %logits
}}

schedule embed, full 0..2, window 2..3, head
"#,
        layer("full", "none"),
        layer("window", "5"),
    );
    module(&text.replace("DT", dtype))
}

/// [`decoder`] with fused ops, of f32, at every token.
fn fused_decoder() -> Module {
    let layer = |name: &str, window: &str| {
        format!(
            r#"
graph {name} {{
  %x = carry 0 : f32[T, 24]
  %n1 = weight "l.{{layer}}.n1" : const f32[24]
  %n2 = weight "l.{{layer}}.n2" : const f32[24]
  %wq = weight "l.{{layer}}.q" : const f32[60, 24]
  %wk = weight "l.{{layer}}.k" : const f32[20, 24]
  %wv = weight "l.{{layer}}.v" : const f32[20, 24]
  %bo = weight "l.{{layer}}.o.bias" : const f32[24]
  %wo = weight "l.{{layer}}.o" : const f32[24, 60]
  %wg = weight "l.{{layer}}.gate" : const f32[19, 24]
  %wu = weight "l.{{layer}}.up" : const f32[19, 24]
  %wd = weight "l.{{layer}}.down" : const f32[24, 19]
  %wqk = concat(%wq, %wk) {{axis: 0}} : const f32[80, 24]
  %wqkv = concat(%wqk, %wv) {{axis: 0}} : const f32[100, 24]
  %wgu = concat(%wg, %wu) {{axis: 0}} : const f32[38, 24]
  %pos = step positions : i32[T]
  %freqs = table() {{expr: "100 ** (-i / 5)", len: 5}} : const f32[5]
  %ck0 = state k : state f32[2, 10]
  %cv0 = state v : state f32[2, 10]
  %q, %ck, %cv = norm_qkv_rope_kv_write(%x, %n1, %wqkv, _, %pos, %freqs, %ck0, %cv0, _, _) {{eps: 0.00001, offset: 0, head_eps: none, head_offset: none, style: neox, scale: 1}} : f32[T, 6, 10], state f32[2, 10], state f32[2, 10]
  %o0 = paged_attention(%q, %ck, %cv, _) {{scale: 0.31622776601683794, cap: none, window: {window}}} : f32[T, 6, 10]
  %o1 = reshape(%o0) {{shape: [T, 60]}} : f32[T, 60]
  %y = linear_add(%x, %o1, %wo, %bo) : f32[T, 24]
  %m = norm_linear_swiglu(%y, %n2, %wgu, _) {{eps: 0.00001, offset: 1}} : f32[T, 19]
  %z = linear_add(%y, %m, %wd, _) : f32[T, 24]
  return %z, %ck, %cv
}}
"#
        )
    };
    let text = format!(
        r#"module tiny
graph embed {{
  %ids = step tokens : u32[T]
  %e = weight "embed" : const f32[29, 24]
  %x = embedding(%ids, %e) : f32[T, 24]
  return %x
}}
{}{}
graph head {{
  %x = carry 0 : f32[T, 24]
  %rows = step output_rows : u32[T]
  %e = weight "embed" : const f32[29, 24]
  %n = weight "norm" : const f32[24]
  %logits = gather_norm_linear(%x, %rows, %n, %e, _) {{eps: 0.00001, offset: 0, dtype: f32}} : f32[T, 29]
  return %logits
}}

schedule embed, full 0..2, window 2..3, head
"#,
        layer("full", "none"),
        layer("window", "5"),
    );
    let ops = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}")).ops;
    let module = text::parse_with(&text, "fused.ir", &ops).unwrap_or_else(|e| panic!("{e}"));
    expand(&module, &|call| has_kernel(call.op.name)).unwrap_or_else(|e| panic!("{e}"))
}

/// Decodes by fused ops and larger steps by primitives, and the other way round.
#[test]
fn buckets_work_on_one_cache() {
    let (parts, fused) = (decoder("f32", "T"), fused_decoder());
    let checkpoint = Checkpoint::random(&parts);
    let decode = Bucket { min: 1, max: 2, decode: true };
    for modules in [
        [(Bucket::ALL, parts.clone()), (decode, fused.clone())],
        [(decode, parts.clone()), (Bucket::ALL, fused.clone())],
    ] {
        let plan = plan_buckets(&modules, TargetKind::Cpu, LIMITS).expect("a plan");
        // Of the fused one alone: gate and up as one.
        assert_eq!(plan.weights.len(), 3 + 3 * 9);
        assert_eq!((plan.states.len(), plan.programs.len()), (6, 7));
        let options =
            CpuOptions { kv_blocks: 40, block_size: 4, threads: 2, poison: true, profile: false };
        let mut executor = CpuExecutor::new(plan, &checkpoint, options).expect("an executor");
        let mut seqs = sequences(&parts, &checkpoint, &[17, 5, 9], Rounding::Exact);
        let cuts = [[7, 1, 0], [1, 1, 0], [6, 0, 7], [1, 2, 1], [1, 1, 0], [1, 0, 1]];
        for by in cuts {
            let worst = advance(&mut executor, &mut seqs, &by, true);
            assert!(worst < 1e-11, "NMSE {worst:e}");
        }
    }
}

/// A sequence on its way, its blocks scattered over the cache.
struct Seq {
    tokens: Vec<u32>,
    blocks: Vec<u32>,
    done: usize,
    /// Logits by position.
    expected: Vec<Vec<f64>>,
}

fn sequences(
    module: &Module,
    checkpoint: &Checkpoint,
    lens: &[usize],
    rounding: Rounding,
) -> Vec<Seq> {
    let seq = |(i, &len): (usize, &usize)| {
        let tokens: Vec<u32> =
            (0..len).map(|t| ((t * t * 7 + t * 3 + i * 5) % VOCAB) as u32).collect();
        let step = StepShape::one(len, len);
        let carried =
            checkpoint.interpret(module, &step, &tokens, &mut States::default(), rounding);
        let logits = &carried[carried.len() - 1][0].data;
        let blocks = (0..len.div_ceil(4)).map(|b| ((b * 3 + i) * 17 % 40) as u32).collect();
        Seq {
            tokens,
            blocks,
            done: 0,
            expected: logits.chunks(VOCAB).map(<[f64]>::to_vec).collect(),
        }
    };
    lens.iter().enumerate().map(seq).collect()
}

/// Runs one step that advances each sequence by so many tokens; worst error of a row.
fn advance(executor: &mut CpuExecutor, seqs: &mut [Seq], by: &[usize], all_rows: bool) -> f64 {
    let mut inputs = StepInputs::new(4);
    let mut expected = Vec::new();
    for (seq, &n) in seqs.iter_mut().zip(by).filter(|(_, n)| **n > 0) {
        let end = seq.done + n;
        inputs.push(&seq.tokens[seq.done..end], end, &seq.blocks).expect("inputs");
        let first = if all_rows { seq.done } else { end - 1 };
        expected.extend(seq.expected[first..end].iter().cloned());
        seq.done = end;
    }
    let output = executor.run(&inputs).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!((output.rows, output.columns), (expected.len(), VOCAB));
    let row = |(i, exact): (usize, &Vec<f64>)| {
        let found: Vec<f64> = output.row(i).iter().map(|v| f64::from(*v)).collect();
        nmse(&found, exact)
    };
    expected.iter().enumerate().map(row).fold(0.0, f64::max)
}

/// The worst error over all the ways to cut three sequences into steps.
fn worst(dtype: &str, rounding: Rounding) -> f64 {
    let mut worst: f64 = 0.0;
    for rows in ["T", "B"] {
        let module = decoder(dtype, rows);
        let all = decoder(dtype, "T");
        let checkpoint = Checkpoint::random(&module);
        let mut run = |lens: &[usize], cuts: &[&[usize]]| {
            let mut executor = executor(&module, &checkpoint, LIMITS, true);
            assert_eq!(executor.fallbacks(), Vec::<String>::new());
            let mut seqs = sequences(&all, &checkpoint, lens, rounding);
            for by in cuts {
                worst = worst.max(advance(&mut executor, &mut seqs, by, rows == "T"));
            }
            assert!(seqs.iter().all(|s| s.done == s.tokens.len()));
        };
        run(&[23], &[&[23]]);
        run(&[23], &[&[9], &[1], &[13]]);
        run(&[11], &[&[1][..]; 11]);
        run(&[17, 5, 9], &[&[7, 1, 0], &[1, 1, 6], &[6, 0, 1], &[1, 2, 1], &[2, 1, 1]]);
    }
    worst
}

#[test]
fn f32_equals_the_interpreter_however_the_steps_are_cut() {
    let worst = worst("f32", Rounding::Exact);
    assert!(worst < 1e-11, "NMSE {worst:e}");
}

#[test]
fn sixteen_bits_round_where_the_interpreter_rounds() {
    // Sums are rounded to the next value where they fall close to the middle, and one such
    // difference spreads through the layers.
    let (bf16, f16) = (worst("bf16", Rounding::ToType), worst("f16", Rounding::ToType));
    assert!(bf16 < 3e-3, "NMSE {bf16:e}");
    assert!(f16 < 5e-5, "NMSE {f16:e}");
}

#[test]
fn every_call_carries_what_the_interpreter_carries() {
    let module = decoder("f32", "T");
    let checkpoint = Checkpoint::random(&module);
    let mut executor = executor(&module, &checkpoint, LIMITS, true);
    let tokens: Vec<u32> = (0..13).collect();
    let step = StepShape::one(13, 13);
    let exact =
        checkpoint.interpret(&module, &step, &tokens, &mut States::default(), Rounding::Exact);
    let mut inputs = StepInputs::new(4);
    inputs.push(&tokens, 13, &[3, 1, 0, 2]).expect("inputs");
    let mut seen = 0;
    let mut observe = |call: usize, values: Vec<Observed>| {
        seen += 1;
        assert_eq!(values.len(), 1);
        assert_eq!(values[0].shape, exact[call][0].shape);
        assert!(nmse(&values[0].data, &exact[call][0].data) < 1e-11, "call {call}");
    };
    executor.submit_observed(&inputs, &mut observe).expect("a step");
    assert_eq!(seen, 5);
}

#[test]
fn tied_weights_and_joined_weights_are_loaded_once() {
    let plan = plan(&decoder("bf16", "B"), TargetKind::Cpu, LIMITS).expect("a plan");
    // The embedding (used twice), the last norm, the frequencies, and for each layer two norms,
    // one joined q, k, v, o and its bias, gate, up and down.
    assert_eq!(plan.weights.len(), 3 + 3 * 8);
    assert_eq!(plan.states.len(), 6);
    let copies = plan.programs.iter().flat_map(|p| &p.launches).filter(|l| l.op == Launch::COPY);
    assert_eq!(copies.count(), 0);
    assert_eq!(plan.kv_bytes_per_token(), 3 * 2 * 20 * 2);
}

#[test]
fn steps_that_cannot_run_are_refused() {
    let module = decoder("f32", "B");
    let checkpoint = Checkpoint::random(&module);
    let mut executor = executor(&module, &checkpoint, LIMITS, true);
    let mut inputs = StepInputs::new(4);
    assert!(matches!(inputs.push(&[1; 5], 5, &[0]), Err(ExecError::Inputs(_))));
    assert!(matches!(inputs.push(&[1; 5], 4, &[0, 1]), Err(ExecError::Inputs(_))));
    inputs.push(&[1; 41], 41, &(0..11).collect::<Vec<_>>()).expect("inputs");
    let error = executor.submit(&inputs).expect_err("too many tokens").to_string();
    assert_eq!(error, "the step has 41 token(s), the plan holds at most 40; split the step");
    inputs.clear();
    inputs.push(&[1, 2], 2, &[BLOCKS]).expect("inputs");
    let error = executor.submit(&inputs).expect_err("no such block").to_string();
    let message = format!("block {BLOCKS} is outside a KV cache of {BLOCKS} block(s)");
    assert!(error.contains(&message), "{error}");
    inputs.clear();
    inputs.push(&[1, 29], 2, &[0]).expect("inputs");
    let error = executor.submit(&inputs).expect_err("no such token").to_string();
    assert_eq!(error, "embed/%x: row 29 is outside a table of 29");
    let mut other = StepInputs::new(8);
    other.push(&[1], 1, &[0]).expect("inputs");
    assert!(executor.submit(&other).expect_err("block size").to_string().contains("blocks of 4"));
}

#[test]
fn a_plan_of_another_version_or_target_is_refused() {
    let module = decoder("f32", "B");
    let checkpoint = Checkpoint::random(&module);
    for (version, target) in [(0, TargetKind::Cpu), (VERSION, TargetKind::Cuda)] {
        let mut plan = plan(&module, TargetKind::Cpu, LIMITS).expect("a plan");
        (plan.version, plan.target) = (version, target);
        assert!(CpuExecutor::new(plan, &checkpoint, CpuOptions::default()).is_err());
    }
}
