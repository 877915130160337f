//! Expansion keeps what a module computes; buckets share what they can and leave no gap.

use infernum_codegen::{Bucket, Plan, PlanError, TargetKind, expand, plan_buckets};
use infernum_ir::interp::{Interpreter, Rounding, SeqShape, States, StepShape, Tensor};
use infernum_ir::{Dims, Module, NodeKind, OpCall, Type, WeightRef, text, verify};
use infernum_passes::data::Kernels;

const LIMITS: Dims = Dims { t: 16, b: 4, s: 64, pairs: 1024, seqs: 4 };

/// Head-wise norm, packed projections, a threaded cache, two results.
const FUSED: &str = r"
  %rot, %ck, %cv = norm_qkv_rope_kv_write(%x, %n, %w, _, %pos, %freqs, %ck0, %cv0, %hn, %hn) {eps: 0.01, offset: 0, head_eps: 0.1, head_offset: 1, style: neox, scale: 1} : f32[T, 4, 4], state f32[2, 4], state f32[2, 4]
  %o = paged_attention(%rot, %ck, %cv, _) {scale: 0.5, cap: 30, window: 3} : f32[T, 4, 4]
";

const PARTS: &str = r"
  %h = rmsnorm(%x, %n) {eps: 0.01, offset: 0} : f32[T, 16]
  %qkv = linear(%h, %w, _) {dtype: none} : f32[T, 32]
  %rot, %ck, %cv = qkv_rope_kv_write(%qkv, %pos, %freqs, %ck0, %cv0, %hn, %hn) {eps: 0.1, offset: 1, style: neox, scale: 1} : f32[T, 4, 4], state f32[2, 4], state f32[2, 4]
  %o = paged_attention(%rot, %ck, %cv, _) {scale: 0.5, cap: 30, window: 3} : f32[T, 4, 4]
";

fn module(attention: &str) -> Module {
    let text = format!(
        r#"module tiny
graph embed {{
  %ids = step tokens : u32[T]
  %e = weight "embed" : const f32[50, 16]
  %x = embedding(%ids, %e) : f32[T, 16]
  return %x
}}
graph layer {{
  %x = carry 0 : f32[T, 16]
  %pos = step positions : i32[T]
  %freqs = table() {{expr: "10 ** -i", len: 2}} : const f32[2]
  %n = weight "{{layer}}.n" : const f32[16]
  %hn = weight "{{layer}}.hn" : const f32[4]
  %w = weight "{{layer}}.qkv" : const f32[32, 16]
  %wo = weight "{{layer}}.o" : const f32[16, 16]
  %wg = weight "{{layer}}.gate_up" : const f32[24, 16]
  %wd = weight "{{layer}}.down" : const f32[16, 12]
  %ck0 = state k : state f32[2, 4]
  %cv0 = state v : state f32[2, 4]
{attention}
  %o1 = reshape(%o) {{shape: [T, 16]}} : f32[T, 16]
  %d = linear(%o1, %wo, _) {{dtype: none}} : f32[T, 16]
  %sum, %normed = add_rmsnorm(%x, %d, %n) {{eps: 0.01, offset: 0}} : f32[T, 16], f32[T, 16]
  %sum.normed = linear_swiglu(%normed, %wg, _) : f32[T, 12]
  %y = linear_add(%sum, %sum.normed, %wd, _) : f32[T, 16]
  return %y, %ck, %cv
}}
schedule embed, layer 0..2
"#
    );
    let kernels = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"));
    let module = text::parse_with(&text, "tiny.ir", &kernels.ops).unwrap_or_else(|e| panic!("{e}"));
    verify(&module).unwrap_or_else(|e| panic!("{e}"));
    module
}

/// Two steps of two sequences.
fn run(module: &Module) -> Vec<Vec<f64>> {
    let weights = |w: &WeightRef, layer: Option<u32>, ty: &Type| {
        let shape = ty.tensor()?.sizes(&Dims::default());
        let seed = w.name.len() + 3 * layer.unwrap_or(9) as usize;
        let data = (0..shape.iter().product()).map(|i: usize| ((i * 37 + seed) as f64).sin());
        Ok(Tensor { data: data.collect(), shape })
    };
    let mut states = States::default();
    let mut out = Vec::new();
    for sizes in [[(5, 5), (1, 1)], [(1, 6), (3, 4)]] {
        let seqs = sizes.map(|(new, context)| SeqShape { new, context }).to_vec();
        let tokens: Vec<u32> = (0..seqs.iter().map(|s| s.new as u32).sum()).collect();
        let result = Interpreter::new(&weights, Rounding::Exact)
            .step(module, &StepShape::of(seqs), &tokens, &mut states, &mut |_, _| {})
            .unwrap_or_else(|e| panic!("{e}"));
        out.push(result[0].data.clone());
    }
    out
}

fn fused_ops(module: &Module) -> Vec<&'static str> {
    let nodes = module.graphs.iter().flat_map(|g| g.nodes().map(|(_, n)| n));
    nodes
        .filter_map(|n| match &n.kind {
            NodeKind::Op { op, .. } if op.fused.is_some() => Some(op.name),
            _ => None,
        })
        .collect()
}

#[test]
fn expansion_keeps_the_meaning_and_only_kept_ops() {
    let module = module(FUSED);
    let exact = run(&module);
    let keeps: [&[&str]; 3] =
        [&[], &["swiglu", "rope_kv_write"], &["paged_attention", "linear_add"]];
    for names in keeps {
        let keep = |call: &OpCall<'_>| names.contains(&call.op.name);
        let expanded = expand(&module, &keep).unwrap_or_else(|e| panic!("{e}"));
        verify(&expanded).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(run(&expanded), exact);
        let mut left = fused_ops(&expanded);
        left.sort_unstable();
        let mut expected = names.to_vec();
        expected.sort_unstable();
        assert_eq!(left, expected);
        // The results keep their names, and what is within is named after them: not after others.
        let layer = expanded.graph("layer").expect("a layer");
        for name in ["rot", "ck", "cv", "sum", "normed", "y"] {
            assert!(layer.find(name).is_some(), "{name}");
        }
        if names.is_empty() {
            assert!(layer.find("rot.qkv").is_some() && layer.find("sum.normed.gate_up").is_some());
        }
    }
    assert_eq!(expand(&module, &|_| true).expect("as it was"), module);
}

fn bucket(min: u64, max: u64, decode: bool) -> Bucket {
    Bucket { min, max, decode }
}

fn plan(buckets: &[(Bucket, Module)]) -> Result<Plan, PlanError> {
    plan_buckets(buckets, TargetKind::Cpu, LIMITS)
}

#[test]
fn buckets_share_weights_planes_and_programs() {
    let (fused, parts) = (module(FUSED), module(PARTS));
    let one = plan(&[(Bucket::ALL, fused.clone())]).expect("a plan");
    let both = plan(&[(bucket(2, 16, false), parts), (bucket(1, 4, true), fused)]).expect("a plan");
    let named = |p: &Plan| -> std::collections::HashSet<_> { p.weights.iter().cloned().collect() };
    assert_eq!(named(&both), named(&one));
    assert_eq!(both.states.len(), 4);
    assert_eq!((one.programs.len(), both.programs.len()), (2, 3));
    assert_eq!(both.schedules[0].calls[0].program, both.schedules[1].calls[0].program);
    // The most specific one runs.
    let picked = [(1, true), (4, true), (4, false), (16, false)].map(|(t, d)| both.schedule(t, d));
    assert_eq!(picked, [Some(1), Some(1), Some(0), Some(0)]);
    assert_eq!(both.schedule(17, false), None);
}

#[test]
fn attributes_go_by_name_and_the_residual_stays_in_place() {
    let plan = plan(&[(Bucket::ALL, module(FUSED))]).expect("a plan");
    let launches = &plan.programs[1].launches;
    let find = |op: &str| launches.iter().find(|l| l.op == op).expect("a launch");
    assert_eq!(find("paged_attention").attr("window"), Some(&infernum_ir::Attr::Int(3)));
    assert!(find("add_rmsnorm").is_in_place() && find("linear_add").is_in_place());
    assert!(launches.iter().all(|l| l.op != "copy"));
}

#[test]
fn gaps_and_different_planes_are_refused() {
    let m = || module(FUSED);
    let gap = |buckets: &[(Bucket, Module)]| match plan(buckets) {
        Err(PlanError::Gap { tokens, decode_only }) => (tokens, decode_only),
        other => panic!("{:?}", other.map(|_| ())),
    };
    assert_eq!(gap(&[(bucket(1, 4, true), m())]), (2, false));
    assert_eq!(gap(&[(bucket(1, 8, false), m())]), (9, false));
    assert_eq!(gap(&[(bucket(2, 16, false), m())]), (1, true));
    assert_eq!(gap(&[(bucket(1, 8, false), m()), (bucket(10, 16, false), m())]), (9, false));
    assert!(plan(&[(bucket(1, 8, false), m()), (bucket(9, 16, false), m())]).is_ok());
    let mut short = m();
    short.schedule.truncate(2);
    let error =
        plan(&[(bucket(1, 1, true), short), (bucket(2, 16, false), m())]).expect_err("k, v");
    assert!(matches!(error, PlanError::Planes { .. }), "{error}");
}
