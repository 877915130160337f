//! A step takes no memory once its scratch has grown.

#[path = "cpu/common.rs"]
#[allow(dead_code, reason = "shared with the other tests")]
mod common;

use infernum_ir::{Dims, Module, text};
use infernum_passes::data::Kernels;
use infernum_runtime::{Executor, StepInputs};

use common::{Checkpoint, executor, module};

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

const TEXT: &str = r#"module m
graph g {
  %ids = step tokens : u32[T]
  %pos = step positions : i32[T]
  %e = weight "e" : const bf16[31, 48]
  %n = weight "n" : const bf16[48]
  %w = weight "w" : const bf16[48, 48]
  %b = weight "b" : const bf16[48]
  %r = weight "r" : const bf16[5, 48]
  %we = weight "we.{expert}" stack 5 : const bf16[5, 16, 48]
  %f = table() {expr: "100 ** (-i / 4)", len: 4} : const f32[4]
  %x = embedding(%ids, %e) : bf16[T, 48]
  %h = rmsnorm(%x, %n) {eps: 0.1, offset: 0} : bf16[T, 48]
  %l = linear(%h, %w, %b) {dtype: none} : bf16[T, 48]
  %q0 = reshape(%l) {shape: [T, 6, 8]} : bf16[T, 6, 8]
  %q = rope(%q0, %pos, %f) {style: neox, scale: 1} : bf16[T, 6, 8]
  %k0 = slice(%q) {axis: 1, start: 0, len: 2} : bf16[T, 2, 8]
  %c0 = state k : state bf16[2, 8]
  %c1 = kv_write(%c0, %k0) : state bf16[2, 8]
  %ks = kv_read(%c1) : bf16[S, 2, 8]
  %s = scores(%q, %ks) : f32[6, T, S]
  %m = mask(%s) {window: 9} : f32[6, T, S]
  %p = softmax(%m, _) : f32[6, T, S]
  %o = mix(%p, %ks) : bf16[T, 6, 8]
  %o1 = reshape(%o) {shape: [T, 48]} : bf16[T, 48]
  %y = add(%x, %o1) : bf16[T, 48]
  %a = silu(%y) : bf16[T, 48]
  %g = linear(%a, %r, _) {dtype: none} : bf16[T, 5]
  %t, %i = topk(%g, _) {k: 2, groups: 1, keep: 1} : bf16[T, 2], u32[T, 2]
  %z = expert_linear(%a, %we, %i, _, _, _) : bf16[T, 2, 16]
  %z1 = reduce(%z) {by: sum, axis: 1} : bf16[T, 1, 16]
  %out = concat(%z1, %z) {axis: 1} : bf16[T, 3, 16]
  %logits = cast(%out) {dtype: f32} : f32[T, 3, 16]
  return %logits, %c1
}

schedule g 0..1
"#;

const FUSED: &str = r#"module m
graph g {
  %ids = step tokens : u32[T]
  %pos = step positions : i32[T]
  %rows = step output_rows : u32[B]
  %e = weight "e" : const bf16[31, 48]
  %n = weight "n" : const bf16[48]
  %w = weight "w" : const bf16[80, 48]
  %wo = weight "wo" : const bf16[48, 48]
  %wgu = weight "gu" : const bf16[32, 48]
  %wd = weight "d" : const bf16[48, 16]
  %f = table() {expr: "100 ** (-i / 4)", len: 4} : const f32[4]
  %x = embedding(%ids, %e) : bf16[T, 48]
  %qkv = norm_linear(%x, %n, %w, _) {eps: 0.1, offset: 0, dtype: none} : bf16[T, 80]
  %k0 = state k : state bf16[2, 8]
  %v0 = state v : state bf16[2, 8]
  %q, %k1, %v1 = qkv_rope_kv_write(%qkv, %pos, %f, %k0, %v0, _, _) {eps: none, offset: none, style: neox, scale: 1} : bf16[T, 6, 8], state bf16[2, 8], state bf16[2, 8]
  %a = paged_attention(%q, %k1, %v1, _) {scale: 0.3, cap: none, window: 9} : bf16[T, 6, 8]
  %a1 = reshape(%a) {shape: [T, 48]} : bf16[T, 48]
  %o = linear(%a1, %wo, _) {dtype: none} : bf16[T, 48]
  %y, %m = add_rmsnorm(%x, %o, %n) {eps: 0.1, offset: 0} : bf16[T, 48], bf16[T, 48]
  %g = linear_swiglu(%m, %wgu, _) : bf16[T, 16]
  %z = linear_add(%y, %g, %wd, _) : bf16[T, 48]
  %logits = gather_norm_linear(%z, %rows, %n, %e, _) {eps: 0.1, offset: 0, dtype: f32} : f32[B, 31]
  return %logits, %k1, %v1
}

schedule g 0..1
"#;

#[test]
fn a_step_takes_no_memory_once_warm() {
    let ops = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}")).ops;
    let fused = text::parse_with(FUSED, "test.ir", &ops).unwrap_or_else(|e| panic!("{e}"));
    [module(TEXT), fused].iter().for_each(takes_no_memory);
}

fn takes_no_memory(module: &Module) {
    let checkpoint = Checkpoint::random(module);
    let limits = Dims { t: 20, b: 2, s: 60, pairs: 600, seqs: 2 };
    let mut executor = executor(module, &checkpoint, limits, false);
    assert!(executor.fallbacks().is_empty());
    let mut inputs = StepInputs::new(4);
    let mut step = |executor: &mut infernum_runtime::cpu::CpuExecutor| {
        for (new, context) in [(17, 17), (1, 30)] {
            inputs.clear();
            inputs.push(&[3; 17][..new], context, &[0, 2, 4, 6, 8, 10, 12, 14]).expect("inputs");
            inputs.push(&[9], 5, &[1, 3]).expect("inputs");
            executor.run(&inputs).expect("a step");
        }
    };
    (0..20).for_each(|_| step(&mut executor));
    let _profiler = dhat::Profiler::builder().testing().build();
    let before = dhat::HeapStats::get().total_blocks;
    (0..50).for_each(|_| step(&mut executor));
    let taken = dhat::HeapStats::get().total_blocks - before;
    // Handing a step to the pool takes a block of its queues now and then; a launch that allocated
    // would show in every step.
    assert!(taken < 20, "{taken} blocks in 100 steps");
}
