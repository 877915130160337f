//! Holds the CPU's kernels for fused ops against the ops' bodies, behind guards.

use std::collections::HashMap;
use std::fmt;

use infernum_codegen::{Bucket, TargetKind, plan_buckets};
use infernum_ir::interp::{Carried, Interpreter, Rounding, SeqStep, States, Step, Tensor};
use infernum_ir::{DType, Dims, Module, Op, OpSet, Param, Tolerance, Type, WeightRef, text};

use super::exec::Wrap;
use super::guard::Guarded;
use super::{CpuExecutor, CpuOptions, Observed, convert, has_kernel};
use crate::{PlanExecutor, StepInputs, TensorBytes, WeightSource};

/// How one kernel did on one case.
#[derive(Clone, Debug)]
pub struct KernelVerdict {
    /// The op.
    pub op: String,
    /// Its activations' element type.
    pub dtype: DType,
    /// The call, and the sizes.
    pub case: String,
    /// Normalised root-mean-square error, the worst of all results and steps.
    pub error: f64,
    /// What the op's tolerance allows.
    pub allowed: f64,
    /// Why it could not be compared, or what is not even finite.
    pub problem: Option<String>,
}

impl KernelVerdict {
    /// Whether the kernel is right.
    pub fn passed(&self) -> bool {
        self.problem.is_none() && self.error <= self.allowed
    }
}

impl fmt::Display for KernelVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = if self.passed() { "ok  " } else { "FAIL" };
        write!(f, "{mark} {} {} ({}): ", self.op, self.dtype, self.case)?;
        match &self.problem {
            Some(problem) => f.write_str(problem),
            None => write!(f, "error {:.2e} of {:.2e}", self.error, self.allowed),
        }
    }
}

/// What calls are made of: `H` query heads and `G` key heads of `D` and `E` elements, `N` = H·D
/// channels.
const PRELUDE: &str = r#"module check
graph g {
  %ids = step tokens : u32[T]
  %pos = step positions : i32[T]
  %rows = step output_rows : u32[B]
  %freqs = table() {expr: "100 ** (-2 * i / $D)", len: $R} : const f32[$R]
  %wx = weight "x" : const DT[31, $N]
  %wy = weight "y" : const DT[31, $N]
  %wk = weight "k" : const DT[31, $K]
  %wv = weight "v" : const DT[31, $V]
  %wp = weight "p" : const DT[31, $P]
  %norm = weight "norm" : const DT[$N]
  %head = weight "head" : const DT[$D]
  %sinks = weight "sinks" : const DT[$H]
  %w = weight "w" : const DT[$N, $K]
  %bias = weight "bias" : const f32[$N]
  %wr = weight "wr" : const DT[$K, $N]
  %kb = weight "kb" : const DT[$K]
  %w2 = weight "w2" : const DT[$N2, $K]
  %b2 = weight "b2" : const f32[$N2]
  %x = embedding(%ids, %wx) : DT[T, $N]
  %y = embedding(%ids, %wy) : DT[T, $N]
  %k = embedding(%ids, %wk) : DT[T, $K]
  %v = embedding(%ids, %wv) : DT[T, $V]
  %packed = embedding(%ids, %wp) : DT[T, $P]
  %qh = reshape(%x) {shape: [T, $H, $D]} : DT[T, $H, $D]
  %kh = reshape(%k) {shape: [T, $G, $D]} : DT[T, $G, $D]
  %vh = reshape(%v) {shape: [T, $G, $E]} : DT[T, $G, $E]
  %k0 = state k : state DT[$G, $D]
  %v0 = state v : state DT[$G, $E]
"#;

/// Calls, with the results that are compared; those that write the cache leave it as `ks`, `vs`.
const CASES: &[(&str, &str)] = &[
    ("%r, %s = add_rmsnorm(%x, %y, %norm) {eps: 0.01, offset: 1} : DT[T, $N], DT[T, $N]", "%r, %s"),
    // In place of its second operand, and without a weight.
    ("%t, %u = add_rmsnorm(%x, %y, _) {eps: 0.01, offset: 0} : DT[T, $N], DT[T, $N]", "%t, %u, %x"),
    ("%r = swiglu(%x, %y) : DT[T, $N]", "%r, %y"),
    ("%r = swiglu(%x, %y) : DT[T, $N]", "%r, %x"),
    ("%r = geglu(%x, %y) : DT[T, $N]", "%r"),
    ("%r = swiglu_packed(%packed) : DT[T, $F]", "%r"),
    ("%r = geglu_packed(%packed) : DT[T, $F]", "%r"),
    ("%r = linear_add(%x, %k, %w, _) : DT[T, $N]", "%r, %x"),
    ("%r = linear_add(%x, %k, %w, %bias) : DT[T, $N]", "%r"),
    ("%r = linear_add(%y, %k, %w, _) : DT[T, $N]", "%r"),
    ("%r = norm_linear(%x, %norm, %wr, _) {eps: 0.01, offset: 0, dtype: none} : DT[T, $K]", "%r"),
    ("%r = norm_linear(%x, _, %wr, %kb) {eps: 0.01, offset: 0, dtype: f32} : f32[T, $K]", "%r"),
    (
        "%r = gather_norm_linear(%x, %rows, %norm, %wr, _) {eps: 0.01, offset: 1, dtype: f32} : f32[B, $K]",
        "%r",
    ),
    ("%r = linear_swiglu(%k, %w2, _) : DT[T, $N]", "%r"),
    ("%r = linear_geglu(%k, %w2, %b2) : DT[T, $N]", "%r"),
    ("%r = norm_linear_swiglu(%k, _, %w2, %b2) {eps: 0.1, offset: 0} : DT[T, $N]", "%r"),
    ("%r = norm_linear_geglu(%k, %kb, %w2, _) {eps: 0.1, offset: 1} : DT[T, $N]", "%r"),
    (
        "%ks, %vs = rope_kv_write(%kh, %vh, %pos, %freqs, %k0, %v0) {style: neox, scale: 1.2} : state DT[$G, $D], state DT[$G, $E]",
        "",
    ),
    (
        "%r, %ks, %vs = qk_rope_kv_write(%qh, %kh, %vh, %pos, %freqs, %k0, %v0, _, _) {eps: none, offset: none, style: interleaved, scale: 1} : DT[T, $H, $D], state DT[$G, $D], state DT[$G, $E]",
        "%r",
    ),
    (
        "%r, %ks, %vs = qk_rope_kv_write(%qh, %kh, %vh, %pos, %freqs, %k0, %v0, %head, %head) {eps: 0.1, offset: 1, style: neox, scale: 1} : DT[T, $H, $D], state DT[$G, $D], state DT[$G, $E]",
        "%r, %x",
    ),
    (
        "%r, %ks, %vs = qkv_rope_kv_write(%packed, %pos, %freqs, %k0, %v0, %head, %head) {eps: 0.1, offset: 0, style: neox, scale: 1} : DT[T, $H, $D], state DT[$G, $D], state DT[$G, $E]",
        "%r",
    ),
    (
        "%r = paged_attention(%qh, %k1, %v1, _) {scale: 0.7, cap: none, window: none} : DT[T, $H, $E]",
        "%r",
    ),
    (
        "%r = paged_attention(%qh, %k1, %v1, _) {scale: 0.9, cap: 1.5, window: 5} : DT[T, $H, $E]",
        "%r",
    ),
    (
        "%r = paged_attention(%qh, %k1, %v1, %sinks) {scale: 0.5, cap: none, window: 30} : DT[T, $H, $E]",
        "%r",
    ),
    (
        "%r = attention(%qh, %kc, %vc, %sinks) {scale: 0.7, cap: none, window: 9} : DT[T, $H, $E]",
        "%r",
    ),
    (
        "%r = attention(%qh, %kc, %vc, _) {scale: 0.7, cap: 2, window: none} : DT[T, $H, $E]",
        "%r, %x",
    ),
];

/// `[H, G, D, E]`.
const SIZES: [[usize; 4]; 4] = [[6, 3, 6, 5], [4, 4, 14, 14], [5, 1, 2, 3], [8, 2, 64, 64]];

const LIMITS: Dims = Dims { t: 120, b: 3, s: 300, pairs: 20_000 };

/// The steps of three sequences: prompts in pieces, short and long ones, and decodes. The tokens of
/// each, and how many it has then.
const STEPS: [[(usize, usize); 3]; 4] = [
    [(70, 70), (1, 1), (17, 17)],
    [(1, 71), (33, 34), (3, 20)],
    [(1, 72), (1, 35), (1, 21)],
    [(2, 74), (3, 38), (40, 61)],
];

const BLOCK: usize = 4;

/// Runs every kernel of a fused op in `ops` that there are cases for, in every element type, over
/// ragged batches on scattered blocks, dead memory filled with NaN. A kernel that writes beside its
/// results, to an operand or to another sequence's cache, or leaves an element unwritten, fails.
pub fn check(ops: &OpSet, seed: u64) -> Vec<KernelVerdict> {
    let mut verdicts = Vec::new();
    for op in ops.fused().filter(|op| has_kernel(op.name)) {
        let calls = format!(" = {}(", op.name);
        for (call, results) in CASES.iter().filter(|(call, _)| call.contains(&calls)) {
            for sizes in SIZES {
                for dtype in [DType::F32, DType::Bf16, DType::F16] {
                    verdicts.push(verdict(op, ops, (call, results), sizes, dtype, seed));
                }
            }
        }
    }
    verdicts
}

/// Fused ops with a kernel that [`check`] has no case for.
pub fn unchecked(ops: &OpSet) -> Vec<&'static str> {
    let has_case = |op: &Op| CASES.iter().any(|(c, _)| c.contains(&format!(" = {}(", op.name)));
    ops.fused().filter(|op| has_kernel(op.name) && !has_case(op)).map(|op| op.name).collect()
}

fn verdict(
    op: Op,
    ops: &OpSet,
    (call, results): (&str, &str),
    sizes: [usize; 4],
    dtype: DType,
    seed: u64,
) -> KernelVerdict {
    let mut verdict = KernelVerdict {
        op: op.name.to_owned(),
        dtype,
        case: format!("{} H, G, D, E = {sizes:?}", attributes(call)),
        error: 0.0,
        allowed: allowed(op.tolerance, dtype),
        problem: None,
    };
    let module = text::parse_with(&module_text(call, results, sizes, dtype), "check", ops);
    let run = module
        .map_err(|e| e.to_string())
        .and_then(|m| compare(&m, seed, &|launch, kernel| Box::new(Guarded::new(launch, kernel))));
    match run {
        Ok(error) => verdict.error = error,
        Err(problem) => verdict.problem = Some(problem),
    }
    verdict
}

fn attributes(call: &str) -> &str {
    let rest = call.split_once(") ").map_or("", |(_, rest)| rest);
    rest.split_once(" :").map_or("", |(attrs, _)| attrs)
}

fn allowed(tolerance: Tolerance, dtype: DType) -> f64 {
    match dtype {
        DType::Bf16 => tolerance.ulps16 / 256.0,
        DType::F16 => tolerance.ulps16 / 2048.0,
        _ => tolerance.f32,
    }
}

fn module_text(call: &str, results: &str, [h, g, d, e]: [usize; 4], dtype: DType) -> String {
    let mut text = PRELUDE.to_owned();
    // What the call does not write itself is written before it.
    let writes = call.contains("%ks, %vs");
    if !writes {
        text += "  %k1 = kv_write(%k0, %kh) : state DT[$G, $D]
  %v1 = kv_write(%v0, %vh) : state DT[$G, $E]
  %kc = kv_read(%k1) : DT[S, $G, $D]
  %vc = kv_read(%v1) : DT[S, $G, $E]\n";
    }
    let comma = if results.is_empty() { "" } else { ", " };
    let rest = if writes {
        format!(
            "  {call}
  %kc = kv_read(%ks) : DT[S, $G, $D]
  %vc = kv_read(%vs) : DT[S, $G, $E]
  return {results}{comma}%kc, %vc, %ks, %vs\n"
        )
    } else {
        format!("  {call}\n  return {results}, %k1, %v1\n")
    };
    text += &rest;
    text += "}\nschedule g 0..1\n";
    let packed = h * d + g * d + g * e;
    let packed = if call.contains("_packed(") { packed.next_multiple_of(2) } else { packed };
    let sizes = [
        ("$N2", 2 * h * d),
        ("$N", h * d),
        ("$K", g * d),
        ("$V", g * e),
        ("$P", packed),
        ("$F", packed / 2),
        ("$R", d / 2),
        ("$H", h),
        ("$G", g),
        ("$D", d),
        ("$E", e),
    ];
    let text = text.replace("DT", dtype.name());
    sizes.iter().fold(text, |text, (name, size)| text.replace(name, &size.to_string()))
}

/// The worst error of a module's plan against its interpretation.
pub(super) fn compare(module: &Module, seed: u64, wrap: &Wrap<'_>) -> Result<f64, String> {
    let weights = Weights::of(module, seed)?;
    let buckets = [(Bucket::ALL, module.clone())];
    let plan = plan_buckets(&buckets, TargetKind::Cpu, LIMITS).map_err(|e| e.to_string())?;
    let blocks_of_one = LIMITS.s as usize / BLOCK;
    let options = CpuOptions {
        kv_blocks: 3 * blocks_of_one,
        block_size: BLOCK,
        threads: 2,
        poison: true,
        profile: false,
    };
    let executor = CpuExecutor::with_kernels(plan, &weights, options, wrap);
    let mut executor = executor.map_err(|e| e.to_string())?;
    let (mut states, mut worst) = (States::default(), 0.0_f64);
    for (n, sizes) in STEPS.iter().enumerate() {
        let seqs = sizes.iter().map(|&(new, context)| SeqStep { new, context }).collect();
        let step = Step { seqs };
        let tokens = step.dims().t as usize;
        let tokens: Vec<u32> = (0..tokens).map(|i| ((i * 11 + 7 * n + 3) % 31) as u32).collect();
        let exact = weights.interpret(module, &step, &tokens, &mut states)?;
        let mut inputs = StepInputs::new(BLOCK);
        let mut at = 0;
        for (i, seq) in step.seqs.iter().enumerate() {
            // None lies behind another; but for the second sequence, whose blocks do.
            let block =
                |b: usize| if i == 1 { b } else { blocks_of_one * (1 + i / 2) + b * 7 % 71 };
            let blocks: Vec<u32> =
                (0..seq.context.div_ceil(BLOCK)).map(|b| block(b) as u32).collect();
            let new = &tokens[at..at + seq.new];
            inputs.push(new, seq.context, &blocks).map_err(|e| e.to_string())?;
            at += seq.new;
        }
        let mut observe = |_: usize, found: Vec<Observed>| {
            for (found, exact) in found.iter().zip(&exact) {
                worst = worst.max(error(&found.data, &exact.data));
            }
        };
        executor.submit_observed(&inputs, &mut observe).map_err(|e| e.to_string())?;
    }
    if worst.is_nan() { Err("a result is not finite".to_owned()) } else { Ok(worst) }
}

/// Normalised; NaN where an element is not finite, or missing.
fn error(found: &[f64], exact: &[f64]) -> f64 {
    let square = |(a, b): (&f64, &f64)| (a - b).powi(2);
    let error: f64 = found.iter().zip(exact).map(square).sum();
    let norm: f64 = exact.iter().map(|b| b * b).sum();
    match (found.len() == exact.len(), error.is_finite()) {
        (true, true) if error == 0.0 => 0.0,
        (true, true) => (error / norm).sqrt(),
        _ => f64::NAN,
    }
}

/// Random weights, as they are stored and as they are meant.
struct Weights(HashMap<String, (TensorBytes, Vec<f64>)>);

impl Weights {
    fn of(module: &Module, seed: u64) -> Result<Weights, String> {
        let mut all = HashMap::new();
        for (_, param, ty) in module.graphs.iter().flat_map(infernum_ir::Graph::params) {
            let (Param::Weight(w), Type::Tensor(ty)) = (param, ty) else { continue };
            let sizes = ty.sizes(&Dims::default());
            let values = noise(&w.name, seed, sizes.iter().product());
            let size = convert::size(ty.dtype).ok_or("weights of a block format")?;
            let mut bytes = vec![0; values.len() * size];
            convert::encode(ty.dtype, &values, &mut bytes)?;
            let mut values = Vec::new();
            convert::decode(ty.dtype, &bytes, &mut values)?;
            let shape = sizes.iter().map(|&n| n as u64).collect();
            let stored = TensorBytes { dtype: ty.dtype, shape, bytes: bytes.into() };
            all.insert(w.name.clone(), (stored, values));
        }
        Ok(Weights(all))
    }

    /// What a step carries at its end.
    fn interpret(
        &self,
        module: &Module,
        step: &Step,
        tokens: &[u32],
        states: &mut States,
    ) -> Result<Carried, String> {
        let weights = |w: &WeightRef, _: Option<u32>, ty: &Type| {
            let shape = ty.tensor()?.sizes(&Dims::default());
            let (_, values) = self.0.get(&w.name).ok_or("no such weight")?;
            Ok(Tensor { shape, data: values.clone() })
        };
        let interpreter = Interpreter::new(&weights, Rounding::ToType);
        interpreter.step(module, step, tokens, states, &mut |_, _| {})
    }
}

impl WeightSource for Weights {
    fn tensor(&self, name: &str) -> Option<TensorBytes> {
        self.0.get(name).map(|(stored, _)| stored.clone())
    }
}

/// Numbers in -1..1 that depend on the name and the seed (SplitMix64).
fn noise(name: &str, seed: u64, n: usize) -> Vec<f64> {
    let start = name.bytes().fold(seed, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    let number = |i: u64| {
        let z = start.wrapping_add((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    (0..n as u64).map(number).collect()
}
