//! Decode and prefill speed of a TinyLlama-1.1B-shaped decoder with random bf16 weights.
//!
//! `cargo run --release -p infernum-runtime --example llama_bench [threads] [rounds] [parts]`; with
//! `parts`, attention and the rest are done in their parts instead of by fused ops.

use std::time::Instant;

use infernum_codegen::{TargetKind, plan};
use infernum_ir::{DType, Dims, text};
use infernum_runtime::cpu::{CpuExecutor, CpuOptions};
use infernum_runtime::{Executor, StepInputs, TensorBytes, WeightSource};

const LAYERS: usize = 22;

/// Random weights of the shapes that the plan asks for, made when asked for.
struct Random(std::collections::HashMap<String, Vec<u64>>);

impl WeightSource for Random {
    fn tensor(&self, name: &str) -> Option<TensorBytes> {
        let shape = self.0.get(name)?.clone();
        let n: u64 = shape.iter().product();
        let mut state = name.bytes().fold(1u64, |h, b| h * 31 + u64::from(b)) | 1;
        let mut bytes = Vec::with_capacity(2 * n as usize);
        for _ in 0..n {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // About ±0.01.
            let bits = 0x3c00 | (state >> 48) as u16 & 0x807f;
            bytes.extend(bits.to_le_bytes());
        }
        Some(TensorBytes { dtype: DType::Bf16, shape, bytes: bytes.into() })
    }
}

/// A layer of fused ops on packed weights.
const FUSED: &str = r#"
  %n1 = weight "l.{layer}.norm1" : const bf16[2048]
  %n2 = weight "l.{layer}.norm2" : const bf16[2048]
  %wqkv = weight "l.{layer}.qkv" : const bf16[2560, 2048]
  %wo = weight "l.{layer}.o" : const bf16[2048, 2048]
  %wgu = weight "l.{layer}.gate_up" : const bf16[11264, 2048]
  %wd = weight "l.{layer}.down" : const bf16[2048, 5632]
  %ck0 = state k : state bf16[4, 64]
  %cv0 = state v : state bf16[4, 64]
  %h = rmsnorm(%x, %n1) {eps: 0.00001, offset: 0} : bf16[T, 2048]
  %qkv = linear(%h, %wqkv, _) {dtype: none} : bf16[T, 2560]
  %q, %ck, %cv = qkv_rope_kv_write(%qkv, %pos, %freqs, %ck0, %cv0, _, _) {eps: none, offset: none, style: neox, scale: 1} : bf16[T, 32, 64], state bf16[4, 64], state bf16[4, 64]
  %o0 = paged_attention(%q, %ck, %cv, _) {scale: 0.125, cap: none, window: none} : bf16[T, 32, 64]
  %o1 = reshape(%o0) {shape: [T, 2048]} : bf16[T, 2048]
  %o = linear(%o1, %wo, _) {dtype: none} : bf16[T, 2048]
  %y, %m = add_rmsnorm(%x, %o, %n2) {eps: 0.00001, offset: 0} : bf16[T, 2048], bf16[T, 2048]
  %gu = linear(%m, %wgu, _) {dtype: none} : bf16[T, 11264]
  %g = swiglu_packed(%gu) : bf16[T, 5632]
  %z = linear_add(%y, %g, %wd, _) : bf16[T, 2048]
"#;

fn module_text(parts: bool) -> String {
    let linear = |y: &str, x: &str, w: &str, n: usize, k: usize| {
        format!(
            "  %w_{w} = weight \"l.{{layer}}.{w}\" : const bf16[{n}, {k}]\n  \
             %{y} = linear(%{x}, %w_{w}, _) {{dtype: none}} : bf16[T, {n}]\n"
        )
    };
    let norm = |y: &str, x: &str, w: &str| {
        format!(
            "  %w_{w} = weight \"l.{{layer}}.{w}\" : const bf16[2048]\n  \
             %{y} = rmsnorm(%{x}, %w_{w}) {{eps: 0.00001, offset: 0}} : bf16[T, 2048]\n"
        )
    };
    let heads = |x: &str, h: usize| {
        format!("  %{x}h = reshape(%{x}0) {{shape: [T, {h}, 64]}} : bf16[T, {h}, 64]\n")
    };
    let rope = |x: &str, h: usize| {
        format!("  %{x} = rope(%{x}h, %pos, %freqs) {{style: neox, scale: 1}} : bf16[T, {h}, 64]\n")
    };
    let cache = |x: &str, from: &str| {
        format!(
            "  %c{x}0 = state {x} : state bf16[4, 64]\n  \
             %c{x} = kv_write(%c{x}0, %{from}) : state bf16[4, 64]\n  \
             %{x}s = kv_read(%c{x}) : bf16[S, 4, 64]\n"
        )
    };
    let body = [
        norm("n1", "x", "norm1"),
        linear("q0", "n1", "q", 2048, 2048),
        linear("k0", "n1", "k", 256, 2048),
        linear("v0", "n1", "v", 256, 2048),
        heads("q", 32),
        heads("k", 4),
        heads("v", 4),
        rope("q", 32),
        rope("k", 4),
        cache("k", "k"),
        cache("v", "vh"),
        "  %s0 = scores(%q, %ks) : f32[32, T, S]
  %s1 = scale(%s0) {by: 0.125} : f32[32, T, S]
  %s2 = mask(%s1) {window: none} : f32[32, T, S]
  %p = softmax(%s2, _) : f32[32, T, S]
  %o0 = mix(%p, %vs) : bf16[T, 32, 64]
  %o1 = reshape(%o0) {shape: [T, 2048]} : bf16[T, 2048]\n"
            .to_owned(),
        linear("o", "o1", "o", 2048, 2048),
        "  %y = add(%x, %o) : bf16[T, 2048]\n".to_owned(),
        norm("n2", "y", "norm2"),
        linear("g", "n2", "gate", 5632, 2048),
        linear("u", "n2", "up", 5632, 2048),
        "  %a = silu(%g) : bf16[T, 5632]\n  %m = mul(%a, %u) : bf16[T, 5632]\n".to_owned(),
        linear("d", "m", "down", 2048, 5632),
        "  %z = add(%y, %d) : bf16[T, 2048]\n".to_owned(),
    ]
    .concat();
    let body = if parts { body.as_str() } else { FUSED };
    format!(
        r#"module tinyllama
graph embed {{
  %ids = step tokens : u32[T]
  %e = weight "embed" : const bf16[32000, 2048]
  %x = embedding(%ids, %e) : bf16[T, 2048]
  return %x
}}
graph layer {{
  %x = carry 0 : bf16[T, 2048]
  %pos = step positions : i32[T]
  %freqs = table() {{expr: "10000 ** (-i / 32)", len: 32}} : const f32[32]
{body}  return %z, %ck, %cv
}}
graph head {{
  %x = carry 0 : bf16[T, 2048]
  %rows = step output_rows : u32[B]
  %wn = weight "norm" : const bf16[2048]
  %wh = weight "head" : const bf16[32000, 2048]
  %l = gather_rows(%x, %rows) : bf16[B, 2048]
  %h = rmsnorm(%l, %wn) {{eps: 0.00001, offset: 0}} : bf16[B, 2048]
  %logits = linear(%h, %wh, _) {{dtype: f32}} : f32[B, 32000]
  return %logits
}}
schedule embed, layer 0..{LAYERS}, head
"#
    )
}

fn print_profile(what: &str, executor: &CpuExecutor) {
    let ops = executor.profile().into_iter().take(8);
    let ops = ops.map(|(op, time)| format!("{op} {:.1}", time.as_secs_f64() * 1e3));
    println!("   ms in {what}: {}", ops.collect::<Vec<_>>().join(", "));
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let threads = std::env::args().nth(1).map_or(Ok(0), |a| a.parse())?;
    let parts = std::env::args().nth(3).as_deref() == Some("parts");
    let kernels = infernum_passes::data::Kernels::load(None, &[])?;
    let module = text::parse_with(&module_text(parts), "bench", &kernels.ops)?;
    let limits = Dims { t: 128, b: 4, s: 2048, pairs: 128 * 512 };
    let plan = plan(&module, TargetKind::Cpu, limits)?;
    println!("{}", plan.summary());
    let mut shapes = std::collections::HashMap::new();
    for site in &module.schedule {
        for (_, param, ty) in module.graphs[site.graph].params() {
            if let (infernum_ir::Param::Weight(w), Ok(ty)) = (param, ty.tensor()) {
                let shape: Vec<u64> = ty.shape.iter().filter_map(|d| d.as_const()).collect();
                shapes.insert(w.tensors(site.layer).remove(0), shape);
            }
        }
    }
    let options = CpuOptions { kv_blocks: 128, threads, profile: true, ..CpuOptions::default() };
    let mut executor = CpuExecutor::new(plan, &Random(shapes), options)?;
    let mut inputs = StepInputs::new(StepInputs::BLOCK_SIZE);
    let blocks: Vec<u32> = (0..128).collect();
    let mut step = |executor: &mut CpuExecutor, new: usize, context: usize| {
        inputs.clear();
        let tokens = vec![7; new];
        inputs.push(&tokens, context, &blocks)?;
        let start = Instant::now();
        let ticket = executor.submit(&inputs)?;
        let output = executor.wait(ticket)?;
        assert!(output.logits.iter().all(|v| v.is_finite()));
        Ok::<f64, infernum_runtime::ExecError>(start.elapsed().as_secs_f64())
    };
    let rounds = std::env::args().nth(2).map_or(Ok(3), |a| a.parse())?;
    for round in 0..rounds {
        let prefill = step(&mut executor, 128, 128)?;
        println!("{round}: prefill 128: {:.1} tok/s ({:.0} ms)", 128.0 / prefill, prefill * 1e3);
        if round == 0 {
            print_profile("prefill", &executor);
        }
        let later = step(&mut executor, 32, 2000)?;
        println!("{round}: 32 tokens at 2000: {:.0} ms", later * 1e3);
        for context in [129, 512, 1024, 2000] {
            let mut best = f64::INFINITY;
            for _ in 0..4 {
                best = best.min(step(&mut executor, 1, context)?);
            }
            println!(
                "{round}: decode at {context}: {:.2} tok/s ({:.1} ms)",
                1.0 / best,
                best * 1e3
            );
        }
    }
    print_profile("all", &executor);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().filter(|l| l.starts_with("VmHWM")).for_each(|l| println!("{l}"));
    Ok(())
}
