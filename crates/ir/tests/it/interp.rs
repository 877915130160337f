//! The reference interpreter: steps, batches, caches, rounding.

use infernum_ir::interp::{Interpreter, Rounding, SeqShape, States, StepShape, Tensor, round};
use infernum_ir::text::parse;
use infernum_ir::{DType, Module, OPS, Param, TensorType, Type, verify};
use proptest::prelude::*;

use crate::random;

/// Two layers of attention with grouped heads, soft capping and keys that are rotated at read.
const DECODER: &str = r#"
module tiny
graph embed {
  %ids = step tokens : u32[T]
  %table = weight "embed" : const f32[50, 8]
  %h = embedding(%ids, %table) : f32[T, 8]
  return %h
}
graph layer {
  %h = carry 0 : f32[T, 8]
  %pos = step positions : i32[T]
  %cpos = step context_positions : i32[S]
  %f = table() {expr: "10 ** -i", len: 2} : const f32[2]
  %wq = weight "{layer}.q" : const f32[16, 8]
  %wk = weight "{layer}.k" : const f32[8, 8]
  %wv = weight "{layer}.v" : const f32[8, 8]
  %wo = weight "{layer}.o" : const f32[8, 16]
  %n = rmsnorm(%h, _) {eps: 1e-6, offset: 0} : f32[T, 8]
  %q0 = linear(%n, %wq, _) {dtype: none} : f32[T, 16]
  %q1 = reshape(%q0) {shape: [T, 4, 4]} : f32[T, 4, 4]
  %q = rope(%q1, %pos, %f) {style: neox, scale: 1} : f32[T, 4, 4]
  %k0 = linear(%n, %wk, _) {dtype: none} : f32[T, 8]
  %k1 = reshape(%k0) {shape: [T, 2, 4]} : f32[T, 2, 4]
  %v0 = linear(%n, %wv, _) {dtype: none} : f32[T, 8]
  %v1 = reshape(%v0) {shape: [T, 2, 4]} : f32[T, 2, 4]
  %ks = state k : state f32[2, 4]
  %vs = state v : state f32[2, 4]
  %ks1 = kv_write(%ks, %k1) : state f32[2, 4]
  %vs1 = kv_write(%vs, %v1) : state f32[2, 4]
  %kr = kv_read(%ks1) : f32[S, 2, 4]
  %k = rope(%kr, %cpos, %f) {style: neox, scale: 1} : f32[S, 2, 4]
  %v = kv_read(%vs1) : f32[S, 2, 4]
  %s0 = scores(%q, %k) : f32[4, T, S]
  %s1 = scale(%s0) {by: 0.5} : f32[4, T, S]
  %s2 = softcap(%s1) {cap: 2} : f32[4, T, S]
  %s3 = mask(%s2) {window: WINDOW} : f32[4, T, S]
  %p = softmax(%s3, _) : f32[4, T, S]
  %o0 = mix(%p, %v) : f32[T, 4, 4]
  %o1 = reshape(%o0) {shape: [T, 16]} : f32[T, 16]
  %o = linear(%o1, %wo, _) {dtype: none} : f32[T, 8]
  %y = add(%h, %o) : f32[T, 8]
  return %y, %ks1, %vs1
}
graph head {
  %h = carry 0 : f32[T, 8]
  %rows = step output_rows : u32[T]
  %table = weight "embed" : const f32[50, 8]
  %x = gather_rows(%h, %rows) : f32[T, 8]
  %y = linear(%x, %table, _) {dtype: none} : f32[T, 50]
  return %y
}
schedule embed, layer 0..2, head
"#;

fn decoder(window: &str) -> Module {
    let module =
        parse(&DECODER.replace("WINDOW", window), "tiny.ir").unwrap_or_else(|e| panic!("{e}"));
    verify(&module).unwrap_or_else(|e| panic!("{e}"));
    module
}

/// Logits of every token, fed in steps of these sizes.
fn run(module: &Module, tokens: &[u32], steps: &[usize]) -> Vec<f64> {
    let interpreter = Interpreter::new(&random::weight, Rounding::Exact);
    let (mut states, mut logits, mut done) = (States::default(), Vec::new(), 0);
    for &new in steps {
        let step = StepShape::one(new, done + new);
        let part = &tokens[done..done + new];
        let out = interpreter.step(module, &step, part, &mut states, &mut |_, _| {}).unwrap();
        logits.extend(&out[0].data);
        done += new;
    }
    assert_eq!(done, tokens.len());
    logits
}

const TOKENS: [u32; 11] = [3, 1, 4, 1, 5, 9, 26, 5, 35, 8, 9];

#[test]
fn chunks_and_single_tokens_equal_prefill() {
    for window in ["none", "1", "4"] {
        let module = decoder(window);
        let whole = run(&module, &TOKENS, &[11]);
        assert_eq!(run(&module, &TOKENS, &[4, 7]), whole);
        assert_eq!(run(&module, &TOKENS, &[1; 11]), whole);
        assert!(whole.iter().all(|v| v.is_finite()));
    }
    // The window matters, so the comparison means something.
    assert_ne!(run(&decoder("4"), &TOKENS, &[11]), run(&decoder("none"), &TOKENS, &[11]));
}

#[test]
fn a_batch_equals_its_sequences_alone() {
    let module = decoder("4");
    let (a, b) = (&TOKENS[..7], &TOKENS[2..]);
    let alone = [run(&module, a, &[7]), run(&module, b, &[9])];
    let interpreter = Interpreter::new(&random::weight, Rounding::Exact);
    let mut states = States::default();
    let mut logits: [Vec<f64>; 2] = Default::default();
    // Both in prefill; then one decodes while the other goes on in a chunk; then both decode.
    let mut done = [0, 0];
    for new in [[5, 3], [1, 5], [1, 1]] {
        let seqs = [0, 1].map(|i| SeqShape { new: new[i], context: done[i] + new[i] }).to_vec();
        let tokens = [&a[done[0]..done[0] + new[0]], &b[done[1]..done[1] + new[1]]].concat();
        let out =
            interpreter.step(&module, &StepShape::of(seqs), &tokens, &mut states, &mut |_, _| {});
        let (first, second) = out.as_ref().unwrap()[0].data.split_at(new[0] * 50);
        logits[0].extend(first);
        logits[1].extend(second);
        done = [done[0] + new[0], done[1] + new[1]];
    }
    assert_eq!(logits, alone);
}

#[test]
fn output_rows_of_sequences_are_their_last_tokens() {
    let text =
        DECODER.replace("%rows = step output_rows : u32[T]", "%rows = step output_rows : u32[B]");
    let text = text.replace("(%h, %rows) : f32[T, 8]", "(%h, %rows) : f32[B, 8]");
    let text = text.replace("_) {dtype: none} : f32[T, 50]", "_) {dtype: none} : f32[B, 50]");
    let last = parse(&text.replace("WINDOW", "none"), "last.ir").unwrap();
    verify(&last).unwrap_or_else(|e| panic!("{e}"));
    let all = run(&decoder("none"), &TOKENS, &[11]);
    assert_eq!(run(&last, &TOKENS, &[11]), all[10 * 50..]);
}

#[test]
fn observers_see_every_call() {
    let (module, mut seen) = (decoder("none"), Vec::new());
    let interpreter = Interpreter::new(&random::weight, Rounding::Exact);
    let mut observe = |i: usize, carried: &Vec<Tensor>| seen.push((i, carried[0].shape.clone()));
    let step = StepShape::one(3, 3);
    interpreter.step(&module, &step, &[1, 2, 3], &mut States::default(), &mut observe).unwrap();
    assert_eq!(seen, [(0, vec![3, 8]), (1, vec![3, 8]), (2, vec![3, 8]), (3, vec![3, 50])]);
}

#[test]
fn what_does_not_fit_is_an_error() {
    let module = decoder("none");
    let wrong = |_: &_, _, _: &Type| Ok(Tensor { shape: vec![2], data: vec![0.0; 2] });
    let fails = |weights: &infernum_ir::interp::Weights<'_>, step: &StepShape, tokens: &[u32]| {
        let interpreter = Interpreter::new(weights, Rounding::Exact);
        interpreter.step(&module, step, tokens, &mut States::default(), &mut |_, _| {}).unwrap_err()
    };
    assert!(fails(&wrong, &StepShape::one(1, 1), &[1]).contains("expected [50, 8], found [2]"));
    assert!(
        fails(&random::weight, &StepShape::one(2, 2), &[1]).contains("expected [2], found [1]")
    );
    assert!(fails(&random::weight, &StepShape::one(1, 1), &[50]).contains("row 50 is outside"));
    assert!(
        fails(&random::weight, &StepShape::one(1, 2), &[1]).contains("sequence 0 holds fewer rows")
    );
}

#[test]
fn rounding_is_to_nearest_even() {
    let tiny = 2f64.powi(-40);
    for (dtype, from, to) in [
        (DType::F32, 1.0 + 2f64.powi(-24), 1.0),
        (DType::F32, 1.0 + 2f64.powi(-24) + tiny, 1.0 + 2f64.powi(-23)),
        (DType::F32, 1e300, f64::INFINITY),
        (DType::F32, 2f64.powi(-149) * 0.75, 2f64.powi(-149)),
        (DType::Bf16, 1.0 + 2f64.powi(-8), 1.0),
        // Just above a tie: an implementation that first drops low bits goes down.
        (DType::Bf16, 1.0 + 2f64.powi(-8) + tiny, 1.0 + 2f64.powi(-7)),
        (DType::Bf16, -(1.0 + 3.0 * 2f64.powi(-8)), -(1.0 + 2f64.powi(-6))),
        (DType::F16, 1.0 + 2f64.powi(-11) + tiny, 1.0 + 2f64.powi(-10)),
        (DType::F16, 65519.0, 65504.0),
        (DType::F16, -65520.0, f64::NEG_INFINITY),
        (DType::F16, 2f64.powi(-25), 0.0),
        (DType::F16, 2f64.powi(-25) + tiny, 2f64.powi(-24)),
        (DType::F8e4m3, 17.0, 16.0),
        (DType::F8e4m3, 19.0, 20.0),
        (DType::F8e4m3, 464.0, 448.0),
        (DType::F8e5m2, 61440.0, f64::INFINITY),
        (DType::I32, 1.5, 1.5),
        (DType::Bf16, f64::NEG_INFINITY, f64::NEG_INFINITY),
    ] {
        let mut t = Tensor { shape: vec![1], data: vec![from] };
        round(&mut t, &TensorType::act(dtype, [1.into()]).into());
        assert_eq!(t.data, [to], "{dtype} {from}");
    }
    let mut t = Tensor { shape: vec![2], data: vec![465.0, f64::NAN] };
    round(&mut t, &TensorType::act(DType::F8e4m3, [2.into()]).into());
    assert!(t.data.iter().all(|v| v.is_nan()));
}

proptest! {
    /// Every `f32` is a fixed point, and rounding an `f64` is the hardware's conversion.
    #[test]
    fn rounding_to_f32_is_the_hardwares(x in any::<f64>()) {
        let mut t = Tensor { shape: vec![1], data: vec![x] };
        round(&mut t, &TensorType::act(DType::F32, [1.into()]).into());
        let want = f64::from(x as f32);
        prop_assert!(t.data[0].to_bits() == want.to_bits() || want.is_nan());
    }

    /// Whatever the type rules accept, the references compute, and their results have the shapes
    /// that were inferred.
    #[test]
    fn references_agree_with_type_rules(seeds in prop::collection::vec(any::<u64>(), 0..40)) {
        let module = random::module(&seeds);
        check_shapes(&module).map_err(TestCaseError::fail)?;
    }
}

fn check_shapes(module: &Module) -> Result<(), String> {
    let step =
        StepShape::of(vec![SeqShape { new: 2, context: 2 }, SeqShape { new: 3, context: 3 }]);
    // Every tensor value of the graph is made a result, so that its shape is seen.
    let mut graph = module.graphs[0].clone();
    let states: Vec<_> = graph.results().to_vec();
    let all = graph.nodes().flat_map(|(node, n)| {
        (0..n.types.len()).map(move |result| infernum_ir::ValueId { node, result })
    });
    let mut values: Vec<_> = all.filter(|&v| graph.ty(v).tensor().is_ok()).collect();
    let count = values.len();
    values.extend(states.into_iter().filter(|&v| graph.ty(v).state().is_ok()));
    graph.set_results(values.clone());
    let out = Interpreter::new(&random::weight, Rounding::ToType).graph(
        &graph,
        Some(0),
        &step,
        &[1, 2, 3, 0, 63],
        &[],
        &mut States::default(),
    );
    let out = match out {
        Ok(out) => out,
        // Indices and table lookups are data: the types cannot vouch for them.
        Err(e) if e.contains("outside") || e.contains("expert") => return Ok(()),
        Err(e) => return Err(e),
    };
    for (tensor, &v) in out.iter().zip(&values[..count]) {
        let want = graph.ty(v).tensor()?.sizes(&step.dims());
        let found = (&tensor.shape, tensor.data.len());
        if found != (&want, want.iter().product()) {
            return Err(format!("%{}: expected {want:?}, found {found:?}", graph.value_name(v)));
        }
    }
    Ok(())
}

/// The generator reaches every op, or the properties above say less than they seem to.
#[test]
fn random_graphs_use_every_op() {
    let mut rng = random::Rng(1);
    let seeds: Vec<u64> = (0..128_000).map(|_| rng.below(usize::MAX) as u64).collect();
    let mut unused: Vec<&str> = OPS.iter().map(|op| op.name).collect();
    for seeds in seeds.chunks(80) {
        let module = random::module(seeds);
        check_shapes(&module).unwrap();
        for (_, node) in module.graphs[0].nodes() {
            if let infernum_ir::NodeKind::Op { op, .. } = &node.kind {
                unused.retain(|name| *name != op.name);
            }
        }
    }
    assert_eq!(unused, [""; 0]);
}

#[test]
fn stacked_weights_name_every_expert() {
    let module = parse(
        "module m\ngraph g {\n  %w = weight \"{layer}.{expert}\" stack 3 : const f32[3, 2]\n}",
        "m",
    );
    let module = module.unwrap();
    let (_, param, _) = module.graphs[0].params().next().unwrap();
    let Param::Weight(w) = param else { panic!() };
    assert_eq!(w.tensors(Some(4)), ["4.0", "4.1", "4.2"]);
}
