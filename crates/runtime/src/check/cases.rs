//! Calls of every op, and the sizes that they are tried at.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use infernum_ir::encoding::quantised_rows::quantised_heads;
use infernum_ir::{DType, Module, Op, OpSet, text, verify};
use infernum_passes::check::{CallModule, calls};
use infernum_passes::data::Kernels;

use super::sizes::Sizes;

/// What calls are made of; of it a module has what its call needs. `H` query heads and `G` key heads
/// of `D` and `E` elements; `N` and `K` channels; `P` of queries, keys and values side by side.
const PRELUDE: &str = r#"  %ids = step tokens : u32[T]
  %pos = step positions : i32[T]
  %cpos = step context_positions : i32[S]
  %rows = step output_rows : u32[B]
  %picks = step picks : u32[B, 16]
  %freqs = table() {expr: "100 ** (-2 * i / $D)", len: $R} : const f32[$R]
  %wx = weight "x" : const DT[31, $N]
  %wy = weight "y" : const DT[31, $N]
  %wk = weight "k" : const DT[31, $K]
  %wv = weight "v" : const DT[31, $V]
  %wp = weight "p" : const DT[31, $P]
  %wc = weight "c" : const DT[31, 1]
  %wz = weight "z" : const DT[31, $N3]
  %wf = weight "f" : const f32[31, $N]
  %w384 = weight "w384" : const DT[31, 384]
  %wq = weight "eighths.q" : const DT[31, $M]
  %we = weight "eighths.k" : const DT[31, $K]
  %ws = weight "s" : const f32[31, 12]
  %norm = weight "norm" : const DT[$N]
  %head = weight "head" : const DT[$D]
  %sinks = weight "sinks" : const DT[$H]
  %w = weight "w" : const DT[$N, $K]
  %bias = weight "bias" : const f32[$N]
  %nb = weight "nb" : const DT[$N]
  %wn = weight "eighths.w" : const DT[$N, $K]
  %wr = weight "wr" : const DT[$K, $N]
  %kb = weight "kb" : const DT[$K]
  %w2 = weight "w2" : const DT[$N2, $K]
  %b2 = weight "b2" : const f32[$N2]
  %wqkv = weight "wqkv" : const DT[$P, $K]
  %pb = weight "pb" : const f32[$P]
  %wt = weight "wt" : const DT[$N, 5]
  %wh = weight "wh" : const DT[$H, $E, $D]
  %rw = weight "router" : const DT[12, $N]
  %router = map(%rw, _, _) {expr: "a / 16"} : const DT[12, $N]
  %choice = weight "choice" : const f32[12]
  %gate = weight "gate" : const DT[12, $K, $N]
  %up = weight "up" : const DT[12, $K, $N]
  %down = weight "down" : const DT[12, $N, $K]
  %gb = weight "gb" : const DT[12, $K]
  %pairs = weight "pairs" : const DT[12, $N2, $K]
  %b3 = weight "b3" : const DT[12, $N2]
  %db = weight "db" : const f32[12, $N]
  %x = embedding(%ids, %wx) : DT[T, $N]
  %y = embedding(%ids, %wy) : DT[T, $N]
  %x384 = embedding(%ids, %w384) : DT[T, 384]
  %last = gather_rows(%x, %rows) : DT[B, $N]
  %k = embedding(%ids, %wk) : DT[T, $K]
  %v = embedding(%ids, %wv) : DT[T, $V]
  %packed = embedding(%ids, %wp) : DT[T, $P]
  %z = embedding(%ids, %wz) : DT[T, $N3]
  %each = reshape(%z) {shape: [T, 3, $N]} : DT[T, 3, $N]
  %wi = weight "i" : const DT[31, $K3]
  %parts = embedding(%ids, %wi) : DT[T, $K3]
  %inner = reshape(%parts) {shape: [T, 3, $K]} : DT[T, 3, $K]
  %column = embedding(%ids, %wc) : DT[T, 1]
  %f = embedding(%ids, %wf) : f32[T, $N]
  %q = embedding(%ids, %wq) : DT[T, $M]
  %e = embedding(%ids, %we) : DT[T, $K]
  %sf = embedding(%ids, %ws) : f32[T, 12]
  %sd = cast(%sf) {dtype: DT} : DT[T, 12]
  %best, %picked = topk(%sd, _) {k: 3, groups: 1, keep: 1} : DT[T, 3], u32[T, 3]
  %order, %starts = group_rows(%picked) {groups: 12} : u32[T, 3], u32[13]
  %chosen = slice(%picked) {axis: 1, start: 0, len: 1} : u32[T, 1]
  %slots = reshape(%chosen) {shape: [T]} : u32[T]
  %la = weight "la" : const DT[11, 5, $N]
  %lb = weight "lb" : const DT[11, $NK, 5]
  %la16 = weight "la16" : const DT[11, 16, $N]
  %lb16 = weight "lb16" : const DT[11, $NK, 16]
  %qh = reshape(%x) {shape: [T, $H, $D]} : DT[T, $H, $D]
  %kh = reshape(%k) {shape: [T, $G, $D]} : DT[T, $G, $D]
  %vh = reshape(%v) {shape: [T, $G, $E]} : DT[T, $G, $E]
  %eq = reshape(%q) {shape: [T, $H, $D]} : DT[T, $H, $D]
  %ek = reshape(%e) {shape: [T, $G, $D]} : DT[T, $G, $D]
  %k0 = state k : state DT[$G, $D]
  %v0 = state v : state DT[$G, $E]
  %r0 = state r : state ring(2) DT[$G, $D]
  %c0 = state c : state slot DT[4, $N]
  %p0 = state p : state slot f32[$H, $D, $E]
  %t0 = state t : state slot f32[$H, $E, $D]
  %u0 = state u : state slot f32[$N]
"#;

/// The cache as attention finds it, and scores that are exact.
const WRITTEN: &str = "  %k1 = kv_write(%k0, %kh) : state DT[$G, $D]
  %v1 = kv_write(%v0, %vh) : state DT[$G, $E]
  %kc = kv_read(%k1) : DT[S, $G, $D]
  %vc = kv_read(%v1) : DT[S, $G, $E]
  %k2 = kv_write(%k0, %ek) : state DT[$G, $D]
  %ec = kv_read(%k2) : DT[S, $G, $D]
  %dots = scores(%eq, %ec) : f32[$H, T, S]
  %first_head = slice(%dots) {axis: 0, start: 0, len: 1} : f32[1, T, S]
  %each_head = slice(%q) {axis: 1, start: 0, len: $H} : DT[T, $H]
  %r1 = kv_write(%r0, %kh) : state ring(2) DT[$G, $D]
";

/// A call, and the results that are compared; those that write the cache leave it as `ks`, `vs`.
pub(super) struct Case(&'static str, &'static str);

impl Case {
    /// The calls, as text.
    pub(super) const fn call(&self) -> &'static str {
        self.0
    }

    /// The op that is called.
    pub(super) fn op(&self) -> &'static str {
        let call = self.0.split_once(" = ").map_or("", |(_, call)| call);
        call.split_once('(').map_or("", |(op, _)| op)
    }

    /// What is called to look at the results of the call.
    pub(super) fn after(&self) -> impl Iterator<Item = Op> {
        let calls = self.0.lines().skip(1).filter_map(|line| line.split_once(" = "));
        calls.filter_map(|(_, call)| Op::find(call.split_once('(')?.0).ok())
    }

    /// The attributes of the call.
    pub(super) fn attributes(&self) -> &'static str {
        let rest = self.0.split_once(") ").map_or("", |(_, rest)| rest);
        rest.split_once(" :").map_or("", |(attrs, _)| attrs)
    }

    /// A module that makes the call.
    pub(super) fn module(&self, sizes: Sizes, dtype: DType, ops: &OpSet) -> Result<Module, String> {
        text::parse_with(&self.text(sizes, dtype), "check", ops).map_err(|e| e.to_string())
    }

    /// Whether the call multiplies with a weight that may be packed codes, and does nothing else with it.
    pub(super) fn may_be_coded(&self) -> bool {
        let uses = |w: &&str| names(self.0).filter(|name| name == w).count() == 1;
        CODED.iter().any(uses)
    }

    /// As [`Case::module`], where the weight is stored in an encoding.
    fn coded(
        &self,
        sizes: Sizes,
        dtype: DType,
        encoding: &str,
        ops: &OpSet,
    ) -> Result<Module, String> {
        let text = self.coded_text(sizes, dtype, encoding);
        text::parse_with(&text, "check", ops).map_err(|e| e.to_string())
    }

    fn coded_text(&self, sizes: Sizes, dtype: DType, encoding: &str) -> String {
        let plain = self.text(sizes, dtype);
        let mut lines = Vec::new();
        for line in plain.lines() {
            let weight = line.trim().split_once(" = weight ").filter(|(w, _)| CODED.contains(w));
            match weight.and_then(|(w, rest)| Some((w, rest.split_once('[')?.1))) {
                Some((w, shape)) => {
                    let name = &w[1..];
                    let from = match shape.split(',').collect::<Vec<_>>()[..] {
                        // A matrix for each expert.
                        [experts, _, _] => {
                            format!("\"{name}.{{expert}}.weight\" stack {experts}")
                        }
                        _ => format!("\"{name}.weight\""),
                    };
                    lines.push(format!("  {w}stored = weight {from} : const {encoding}[{shape}"));
                    lines.push(format!(
                        "  {w} = repack({w}stored) : const packed {encoding}[{shape}"
                    ));
                }
                None => lines.push(line.to_owned()),
            }
        }
        lines.join("\n")
    }

    /// As [`Case::coded`], where the call takes `x` rounded to 8 bits; an error where no such x is taken.
    fn quantised(
        &self,
        sizes: Sizes,
        dtype: DType,
        encoding: &str,
        ops: &OpSet,
    ) -> Result<Module, String> {
        // It stands before the weight.
        let operands: Vec<&str> = names(self.0).collect();
        let weight = operands.iter().position(|name| CODED.contains(name));
        let x = weight.and_then(|i| operands.get(i.checked_sub(1)?)).ok_or("no x is multiplied")?;
        let (from, to) = (format!("{x}, %w"), "%rounded, %w");
        if !self.0.contains(&from) {
            return Err("what is multiplied is not x alone".to_owned());
        }
        let mut lines = Vec::new();
        for line in self.coded_text(sizes, dtype, encoding).lines() {
            if line.trim_start().starts_with("return ") {
                lines.push(format!("{line}, %rounded"));
                continue;
            }
            lines.push(line.replace(&from, to));
            let made = line.strip_prefix(&format!("  {x} = "));
            if let Some((_, ty)) = made.and_then(|made| made.rsplit_once(" : ")) {
                lines.push(format!("  %rounded = quantise_rows({x}) : quantised_rows {ty}"));
            }
        }
        let module = text::parse_with(&lines.join("\n"), "check", ops);
        let module = module.map_err(|e| e.to_string())?;
        verify(&module).map_err(|findings| findings.to_string())?;
        Ok(module)
    }

    /// Whether the call takes planes of the cache that have rows.
    pub(super) fn takes_rows(&self) -> bool {
        let planes = ["%k0", "%v0", "%k1", "%v1", "%r0", "%r1"];
        names(self.0.lines().next().unwrap_or_default()).any(|name| planes.contains(&name))
    }

    /// As [`Case::module`], where rows of the cache are codes.
    fn cached(&self, sizes: Sizes, dtype: DType, ops: &OpSet) -> Result<Module, String> {
        let (mut text, heads) = (self.text(sizes, dtype), quantised_heads().name());
        for kind in ["", "ring(2) "] {
            let plain = format!("state {kind}{dtype}[");
            text = text.replace(&plain, &format!("state {kind}{heads} {dtype}["));
        }
        text::parse_with(&text, "check", ops).map_err(|e| e.to_string())
    }

    fn text(&self, sizes: Sizes, dtype: DType) -> String {
        let Case(call, results) = self;
        let writes = call.contains("%ks");
        let (before, after) = if writes {
            // What the call wrote is read where its sequences find it.
            let read =
                "  %kc = kv_read(%ks) : DT[S, $G, $D]\n  %vc = kv_read(%vs) : DT[S, $G, $E]\n";
            (PRELUDE.to_owned(), read)
        } else {
            (format!("{PRELUDE}{WRITTEN}"), "")
        };
        let mut returned: Vec<&str> = results.split(", ").filter(|r| !r.is_empty()).collect();
        if writes {
            returned.extend(["%kc", "%vc", "%ks", "%vs"]);
        }
        let mut needed: HashSet<&str> = names(call).chain(returned.iter().copied()).collect();
        let mut kept = Vec::new();
        for line in before.lines().rev() {
            let (defined, from) = line.split_once(" = ").unwrap_or((line, ""));
            if names(defined).any(|name| needed.contains(name)) {
                needed.extend(names(from));
                kept.push(line);
            }
        }
        kept.reverse();
        // The last version of a plane is returned.
        let planes = ["%k1", "%k2", "%v1", "%r1", "%m1"].into_iter().filter(|p| needed.contains(p));
        let returned: Vec<&str> = returned.into_iter().chain(planes).collect();
        let text = format!(
            "module check\ngraph g {{\n{}\n  {call}\n{after}  return {}\n}}\nschedule g 0..1\n",
            kept.join("\n"),
            returned.join(", "),
        );
        let packed = if call.contains("_packed(") { 2 } else { 1 };
        sizes.fill(&text.replace("DT", dtype.name()), packed)
    }
}

/// Calls that take activations of 8 bits, and no others.
pub(super) const OF_EIGHT_BITS: &[Case] =
    &[Case("%r = quantise_linear_swiglu(%k, %w2, _) : quantised_rows DT[T, $N]", "%r")];

/// Weights that are tried as packed codes, too.
const CODED: [&str; 8] = ["%w", "%wr", "%w2", "%wqkv", "%gate", "%up", "%down", "%pairs"];

/// The values that a text names.
fn names(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices('%').map(|(at, _)| {
        let rest = &text[at + 1..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(rest.len());
        &text[at..=at + end]
    })
}

/// A call to try a kernel on.
#[derive(Clone)]
pub(super) enum Tried {
    /// One that is written here, at some sizes.
    Written(&'static Case, Sizes),
    /// One whose weight is stored in the encoding of this name, and read in its packed form.
    Coded(&'static Case, Sizes, String),
    /// The same, with activations of 8 bits.
    Quantised(&'static Case, Sizes, String),
    /// One whose rows of the cache are codes.
    Cached(&'static Case, Sizes),
    /// One that was made as the op's file, or a rule that makes the op, says.
    Made(Arc<CallModule>),
}

impl Tried {
    /// A module that makes the call.
    pub(super) fn module(&self, dtype: DType, ops: &OpSet) -> Result<Module, String> {
        match self {
            Tried::Written(case, sizes) => case.module(*sizes, dtype, ops),
            Tried::Coded(case, sizes, encoding) => case.coded(*sizes, dtype, encoding, ops),
            Tried::Quantised(case, sizes, encoding) => case.quantised(*sizes, dtype, encoding, ops),
            Tried::Cached(case, sizes) => case.cached(*sizes, dtype, ops),
            Tried::Made(call) => Ok(call.module.clone()),
        }
    }

    /// The error that a call is allowed, given that of its op. What is written as codes may be the next one where what is rounded
    /// was computed, and a step of `f8e4m3` is up to an eighth.
    pub(super) fn allowed(&self, of_op: f64) -> f64 {
        const CODES: f64 = 1.0 / 32.0;
        match self {
            Tried::Cached(case, _) if case.call().contains("%ks, %vs") => of_op.max(CODES),
            _ => of_op,
        }
    }
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tried::Written(case, sizes) => write!(f, "{} {sizes}", case.attributes()),
            Tried::Coded(case, sizes, encoding) => {
                write!(f, "{} {sizes}, codes of {encoding}", case.attributes())
            }
            Tried::Quantised(case, sizes, encoding) => {
                let attributes = case.attributes();
                write!(f, "{attributes} {sizes}, codes of {encoding} and of activations")
            }
            Tried::Cached(case, sizes) => {
                write!(f, "{} {sizes}, a cache of codes", case.attributes())
            }
            Tried::Made(call) => f.write_str(&call.shown),
        }
    }
}

/// Calls that are made of an op, besides those at sizes that its file gives.
const MADE: usize = 6;

/// Calls of an op that none are written of: a fused op of a user's own, whose kernels are checked
/// by what its file says.
pub(super) fn made(
    kernels: &Kernels,
    op: Op,
    dtype: DType,
    seed: u64,
) -> Result<Vec<Tried>, String> {
    let calls = calls(kernels, op, dtype, seed, MADE)?;
    Ok(calls.into_iter().map(|call| Tried::Made(Arc::new(call))).collect())
}

/// Whether calls of an op are written here.
pub(super) fn is_written(op: Op) -> bool {
    CASES
        .iter()
        .chain(ON_GPUS)
        .chain(PRIMITIVES)
        .chain(OF_EIGHT_BITS)
        .any(|case| case.op() == op.name)
}

/// Calls of fused ops.
pub(super) const CASES: &[Case] = &[
    Case(
        "%r, %s = add_rmsnorm(%x, %y, %norm) {eps: 0.01, offset: 1} : DT[T, $N], DT[T, $N]",
        "%r, %s",
    ),
    // In place of its second operand, and without a weight.
    Case(
        "%t, %u = add_rmsnorm(%x, %y, _) {eps: 0.01, offset: 0} : DT[T, $N], DT[T, $N]",
        "%t, %u, %x",
    ),
    Case("%r = swiglu(%x, %y) : DT[T, $N]", "%r, %y"),
    Case("%r = swiglu(%x, %y) : DT[T, $N]", "%r, %x"),
    Case("%r = geglu(%x, %y) : DT[T, $N]", "%r"),
    Case("%r = swiglu_packed(%packed) : DT[T, $F]", "%r"),
    Case("%r = geglu_packed(%packed) : DT[T, $F]", "%r"),
    Case("%r = linear_add(%x, %k, %w, _) : DT[T, $N]", "%r, %x"),
    Case("%r = linear_add(%x, %k, %w, %bias) : DT[T, $N]", "%r"),
    Case("%r = linear_add(%y, %k, %w, _) : DT[T, $N]", "%r"),
    Case(
        "%r = norm_linear(%x, %norm, %wr, _) {eps: 0.01, offset: 0, dtype: none} : DT[T, $K]",
        "%r",
    ),
    Case("%r = norm_linear(%x, _, %wr, %kb) {eps: 0.01, offset: 0, dtype: f32} : f32[T, $K]", "%r"),
    Case(
        "%r = gather_norm_linear(%x, %rows, %norm, %wr, _) {eps: 0.01, offset: 1, dtype: f32} : f32[B, $K]",
        "%r",
    ),
    Case("%r = linear_swiglu(%k, %w2, _) : DT[T, $N]", "%r"),
    Case("%r = linear_geglu(%k, %w2, %b2) : DT[T, $N]", "%r"),
    Case("%r = norm_linear_swiglu(%k, _, %w2, %b2) {eps: 0.1, offset: 0} : DT[T, $N]", "%r"),
    Case("%r = norm_linear_geglu(%k, %kb, %w2, _) {eps: 0.1, offset: 1} : DT[T, $N]", "%r"),
    Case(
        "%ks, %vs = rope_kv_write(%kh, %vh, %pos, %freqs, %k0, %v0) {style: neox, scale: 1.2} : state DT[$G, $D], state DT[$G, $E]",
        "",
    ),
    Case(
        "%r, %ks, %vs = qk_rope_kv_write(%qh, %kh, %vh, %pos, %freqs, %k0, %v0, _, _) {eps: none, offset: none, style: interleaved, scale: 1} : DT[T, $H, $D], state DT[$G, $D], state DT[$G, $E]",
        "%r",
    ),
    Case(
        "%r, %ks, %vs = qk_rope_kv_write(%qh, %kh, %vh, %pos, %freqs, %k0, %v0, %head, %head) {eps: 0.1, offset: 1, style: neox, scale: 1} : DT[T, $H, $D], state DT[$G, $D], state DT[$G, $E]",
        "%r, %x",
    ),
    Case(
        "%r, %ks, %vs = qkv_rope_kv_write(%packed, %pos, %freqs, %k0, %v0, %head, %head) {eps: 0.1, offset: 0, style: neox, scale: 1} : DT[T, $H, $D], state DT[$G, $D], state DT[$G, $E]",
        "%r",
    ),
    Case(
        "%r = paged_attention(%qh, %k1, %v1, _) {scale: 0.7, cap: none, window: none} : DT[T, $H, $E]",
        "%r",
    ),
    Case(
        "%r = paged_attention(%qh, %k1, %v1, _) {scale: 0.9, cap: 1.5, window: 5} : DT[T, $H, $E]",
        "%r",
    ),
    Case(
        "%r = paged_attention(%qh, %k1, %v1, %sinks) {scale: 0.5, cap: none, window: 30} : DT[T, $H, $E]",
        "%r",
    ),
    Case(
        "%r = attention(%qh, %kc, %vc, %sinks) {scale: 0.7, cap: none, window: 9} : DT[T, $H, $E]",
        "%r",
    ),
    Case(
        "%r = attention(%qh, %kc, %vc, _) {scale: 0.7, cap: 2, window: none} : DT[T, $H, $E]",
        "%r, %x",
    ),
];

/// Calls of fused ops that run on GPUs only.
pub(super) const ON_GPUS: &[Case] = &[
    Case(
        "%r, %ks, %vs = norm_qkv_rope_kv_write(%k, %kb, %wqkv, _, %pos, %freqs, %k0, %v0, _, _) {eps: 0.1, offset: 0, head_eps: none, head_offset: none, style: neox, scale: 1} : DT[T, $H, $D], state DT[$G, $D], state DT[$G, $E]",
        "%r",
    ),
    Case(
        "%r, %ks, %vs = norm_qkv_rope_kv_write(%k, _, %wqkv, %pb, %pos, %freqs, %k0, %v0, %head, %head) {eps: 0.1, offset: 1, head_eps: 0.1, head_offset: 0, style: neox, scale: 1.2} : DT[T, $H, $D], state DT[$G, $D], state DT[$G, $E]",
        "%r, %k",
    ),
    Case(
        "%r, %ks, %vs = norm_qkv_rope_kv_write(%k, %kb, %wqkv, %pb, %pos, %freqs, %k0, %v0, _, _) {eps: 0.1, offset: 1, head_eps: none, head_offset: none, style: interleaved, scale: 1} : DT[T, $H, $D], state DT[$G, $D], state DT[$G, $E]",
        "%r",
    ),
    // Sums of eighths are exact, so that equal ones are; the row of the weights shows which was taken.
    Case(
        "%r = linear_argmax(%e, %wn, _) {dtype: f32} : u32[T]\n  %row = gather_rows(%wn, %r) : DT[T, $K]",
        "%row",
    ),
    Case(
        "%r = linear_argmax(%e, %wn, %bias) {dtype: none} : u32[T]\n  %row = gather_rows(%wn, %r) : DT[T, $K]",
        "%row",
    ),
    // What is normed is not exact: of nearly equal ones either may be taken.
    Case(
        "%r = gather_norm_linear_argmax(%x, %rows, %norm, %wr, _) {eps: 0.01, offset: 1, dtype: f32} : u32[B]
  %row = gather_rows(%wr, %r) : DT[B, $N]
  %from = gather_rows(%x, %rows) : DT[B, $N]
  %normed = rmsnorm(%from, %norm) {eps: 0.01, offset: 1} : DT[B, $N]
  %terms = mul(%normed, %row) : DT[B, $N]
  %largest = reduce(%terms) {by: sum, axis: 1} : DT[B, 1]",
        "%largest",
    ),
    Case(
        r#"%r = expert_gated(%x, %gate, %up, %picked, _, _, _, _) {act: "a / (1 + exp(-a)) * b"} : DT[T, 3, $K]"#,
        "%r",
    ),
    Case(
        r#"%r = expert_gated(%x, %gate, %up, %picked, %gb, %gb, %order, %starts) {act: "max(a, 0) * (b + 1)"} : DT[T, 3, $K]"#,
        "%r",
    ),
    Case(
        r#"%r = expert_gated_interleaved(%k, %pairs, %picked, _, _, _) {act: "a / (1 + exp(-a)) * b"} : DT[T, 3, $N]"#,
        "%r",
    ),
    Case(
        r#"%r = expert_gated_interleaved(%k, %pairs, %picked, %b3, %order, %starts) {act: "min(a, 7) * (b + 1)"} : DT[T, 3, $N]"#,
        "%r",
    ),
    Case("%r = expert_sum(%inner, %best, %picked, %down, _, _) : DT[T, $N]", "%r"),
    Case("%r = expert_sum(%inner, %best, %picked, %down, %db, %x) : DT[T, $N]", "%r"),
    Case("%r = combine_experts(%each, %best, _) : DT[T, $N]", "%r"),
    Case("%r = combine_experts(%each, %best, %x) : DT[T, $N]", "%r"),
    Case(
        r#"%r, %i = route(%sf, _) {softmax: true, sigmoid: false, k: 3, groups: 1, keep: 1, chosen: false, share: "a / b", factor: 2.5, dtype: none} : f32[T, 3], u32[T, 3]"#,
        "%r, %i",
    ),
    Case(
        r#"%r, %i = route(%sf, %choice) {softmax: false, sigmoid: true, k: 4, groups: 4, keep: 2, chosen: false, share: "a / (b + 1e-20)", factor: none, dtype: DT} : DT[T, 4], u32[T, 4]"#,
        "%r, %i",
    ),
    Case(
        "%r, %i = route(%sf, _) {softmax: false, sigmoid: false, k: 2, groups: 1, keep: 1, chosen: true, share: none, factor: none, dtype: DT} : DT[T, 2], u32[T, 2]",
        "%r, %i",
    ),
    Case(
        r#"%r, %i = router_topk(%x, %router, _, _) {logits_dtype: f32, softmax: true, sigmoid: false, k: 3, groups: 1, keep: 1, chosen: false, share: "a / b", factor: none, dtype: none} : f32[T, 3], u32[T, 3]"#,
        "%r, %i",
    ),
    Case(
        "%r, %i = router_topk(%x, %router, %choice, %choice) {logits_dtype: f32, softmax: false, sigmoid: true, k: 4, groups: 4, keep: 2, chosen: false, share: none, factor: 1.5, dtype: DT} : DT[T, 4], u32[T, 4]",
        "%r, %i",
    ),
    Case(
        r#"%r, %s, %i = norm_router_topk(%x, %norm, %router, _, _) {eps: 0.01, offset: 1, logits_dtype: f32, softmax: true, sigmoid: false, k: 3, groups: 1, keep: 1, chosen: false, share: "a / b", factor: none, dtype: DT} : DT[T, $N], DT[T, 3], u32[T, 3]"#,
        "%r, %s, %i",
    ),
    Case(
        "%r, %s, %i = norm_router_topk(%x, _, %router, %choice, %choice) {eps: 0.01, offset: 0, logits_dtype: f32, softmax: false, sigmoid: true, k: 4, groups: 4, keep: 2, chosen: false, share: none, factor: none, dtype: none} : DT[T, $N], f32[T, 4], u32[T, 4]",
        "%r, %s, %i",
    ),
];

/// Calls of primitives.
pub(super) const PRIMITIVES: &[Case] = &[
    Case("%r = add(%x, %y) : DT[T, $N]", "%r, %x"),
    Case("%r = add(%x, %bias) : DT[T, $N]", "%r"),
    Case("%r = add(%x, %column) : DT[T, $N]", "%r"),
    Case("%r = mul(%x, %y) : DT[T, $N]", "%r"),
    Case("%r = mul(%x, %bias) : DT[T, $N]", "%r"),
    Case("%r = scale(%x) {by: -0.125} : DT[T, $N]", "%r"),
    Case("%r = silu(%x) : DT[T, $N]", "%r"),
    Case("%r = gelu(%x) : DT[T, $N]", "%r"),
    Case("%r = gelu_tanh(%x) : DT[T, $N]", "%r"),
    Case("%r = softcap(%x) {cap: 0.7} : DT[T, $N]", "%r"),
    Case("%r = softcap(%dots) {cap: 5} : f32[$H, T, S]", "%r"),
    Case(r#"%r = map(%x, _, _) {expr: "a > 0 ? a ** 2 : -a"} : DT[T, $N]"#, "%r"),
    Case(r#"%r = map(%x, %y, _) {expr: "max(a, b) / (1 + exp(-b))"} : DT[T, $N]"#, "%r"),
    Case(r#"%r = map(%x, %y, %bias) {expr: "a * c + (1 - c) * b"} : DT[T, $N]"#, "%r"),
    Case("%r = cast(%x) {dtype: f32} : f32[T, $N]", "%r"),
    Case("%r = cast(%f) {dtype: DT} : DT[T, $N]", "%r"),
    Case("%r = cast(%x) {dtype: bf16} : bf16[T, $N]", "%r"),
    Case("%r = cast(%pos) {dtype: f32} : f32[T]", "%r"),
    Case("%r = argmax(%x) : u32[T]", "%r"),
    Case("%r = argmax(%qh) : u32[T, $H]", "%r"),
    Case(
        "%r, %i, %l, %t = pick(%last, %ids, %rows, %picks) {top: 20} : DT[B, $N], u32[B], f32[B, 21], u32[B, 21]",
        "%r, %i, %l, %t",
    ),
    // Not in place.
    Case(
        "%r, %i, %l, %t = pick(%last, %ids, %rows, %picks) {top: 3} : DT[B, $N], u32[B], f32[B, 4], u32[B, 4]",
        "%r, %i, %l, %t, %last",
    ),
    Case("%r = concat(%x, %k) {axis: 1} : DT[T, $NK]", "%r"),
    Case("%r = concat(%qh, %kh) {axis: 1} : DT[T, $HG, $D]", "%r"),
    Case("%r = slice(%x) {axis: 1, start: 1, len: 3} : DT[T, 3]", "%r"),
    Case("%r = slice(%qh) {axis: 1, start: 1, len: 2} : DT[T, 2, $D]", "%r"),
    Case("%r = embedding(%ids, %wx) : DT[T, $N]", "%r"),
    Case("%r = expert_linear(%x, %gate, %picked, _, _, _) : DT[T, 3, $K]", "%r"),
    Case("%r = expert_linear(%each, %gate, %picked, %gb, _, _) : DT[T, 3, $K]", "%r"),
    Case("%r = expert_linear(%x, %gate, %picked, _, %order, %starts) : DT[T, 3, $K]", "%r"),
    Case("%r = expert_linear(%each, %gate, %picked, %gb, %order, %starts) : DT[T, 3, $K]", "%r"),
    Case("%r, %s = group_rows(%picked) {groups: 12} : u32[T, 3], u32[13]", "%r, %s"),
    Case("%r = gather_rows(%x, %rows) : DT[B, $N]", "%r"),
    Case("%r = adapt(%k, %x, %la, %lb, %slots) {start: 0} : DT[T, $K]", "%r, %x"),
    Case("%r = adapt(%k, %x, %la, %lb, %slots) {start: 1} : DT[T, $K]", "%r, %k"),
    Case("%r = adapt(%k, %x, %la16, %lb16, %slots) {start: $N} : DT[T, $K]", "%r, %x"),
    Case("%r = shrink(%x, %la, %slots) : f32[T, 5]", "%r, %x"),
    Case("%r = shrink(%x, %la16, %slots) : f32[T, 16]", "%r, %x"),
    Case("%r = expand(%k, %sf, %lb, %slots) {start: 1, from: 3} : DT[T, $K]", "%r, %k"),
    Case("%r = head_linear(%qh, %wh) : DT[T, $H, $E]", "%r, %x"),
    Case(
        "%ks = kv_write(%k0, %kh) : state DT[$G, $D]\n  %vs = kv_write(%v0, %vh) : state DT[$G, $E]",
        "",
    ),
    Case("%r = kv_read(%k1) : DT[S, $G, $D]", "%r"),
    Case(
        "%near = kv_read(%r1) : DT[S, $G, $D]\n  %q2 = scores(%qh, %near) : f32[$H, T, S]
  %hidden = mask(%q2) {window: 2} : f32[$H, T, S]\n  %p = softmax(%hidden, _) : f32[$H, T, S]
  %r = mix(%p, %near) : DT[T, $H, $D]",
        "%r",
    ),
    Case("%r = layernorm(%x, %norm, %bias) {eps: 0.01} : DT[T, $N]", "%r"),
    Case("%r = layernorm(%x, _, _) {eps: 0.01} : DT[T, $N]", "%r"),
    Case("%r = quantise_rows(%x384) : quantised_rows DT[T, 384]", "%r"),
    Case("%r = linear(%k, %w, %nb) {dtype: none} : DT[T, $N]", "%r"),
    Case("%r = linear(%k, %w, _) {dtype: f32} : f32[T, $N]", "%r"),
    Case("%r = linear(%k, %w, %bias) {dtype: none} : DT[T, $N]", "%r"),
    Case("%r = mask(%dots) {window: none} : f32[$H, T, S]", "%r"),
    Case("%r = mask(%dots) {window: 5} : f32[$H, T, S]", "%r"),
    Case("%r = mask_chunks(%dots) {chunk: 5} : f32[$H, T, S]", "%r"),
    Case("%r = mask_far(%dots) {reach: 3} : f32[$H, T, S]", "%r"),
    Case("%r = combine_heads(%dots, %each_head) : f32[1, T, S]", "%r"),
    Case("%r = mask_topk(%dots, %first_head) {k: 4} : f32[$H, T, S]", "%r"),
    Case("%r = alibi(%dots, %sinks) : f32[$H, T, S]", "%r"),
    Case(
        "%one = slice(%dots) {axis: 0, start: 0, len: 1} : f32[1, T, S]\n  %r = mask_topk(%dots, %first_head) {k: 3} : f32[$H, T, S]",
        "%r",
    ),
    Case(
        "%hw = slice(%x) {axis: 1, start: 0, len: $H} : DT[T, $H]\n  %r = combine_heads(%dots, %hw) : f32[1, T, S]",
        "%r",
    ),
    Case("%r = transpose(%qh) : DT[T, $D, $H]", "%r"),
    Case("%m1, %r = causal_conv(%c0, %x, %wt, _) : state slot DT[4, $N], DT[T, $N]", "%r, %x"),
    Case("%m1, %r = causal_conv(%c0, %x, %wt, %bias) : state slot DT[4, $N], DT[T, $N]", "%r"),
    // The sum over the axis in the middle, over the innermost, and none; inputs that neighbours share.
    Case(
        r#"%m1, %r = scan(%p0, %qh, %kh, %vh, %each_head, %sinks, _, _, _, _) {body: "s[h, k, v], q[h, k], key[h, k], value[h, v], rate[h], bias[h] -> out[h, v]: keep[h] = exp(-abs(rate + bias)); kept[h, k, v] = s * keep; seen[h, v] = sum(kept * key); delta[h, v] = (value - seen) / 64; s[h, k, v] = kept + key * delta; out[h, v] = sum(s * q)", dtype: none} : state slot f32[$H, $D, $E], DT[T, $H, $E]"#,
        "%r",
    ),
    Case(
        r#"%m1, %r = scan(%t0, %vh, %each_head, %kh, %qh, %head, _, _, _, _) {body: "s[h, p, n], x[h, p], step[h], b[h, n], c[h, n], d[n] -> y[h, p]: kept[h] = exp(-exp(step)); s[h, p, n] = s * kept + x * b; seen[h, p] = sum(s * c * d); y[h, p] = seen + x * step", dtype: f32} : state slot f32[$H, $E, $D], f32[T, $H, $E]"#,
        "%r",
    ),
    Case(
        r#"%m1, %r = scan(%u0, %x, %y, _, _, _, _, _, _, _) {body: "s[c], x[c], a[c] -> y[c]: gate[c] = 1 / (1 + exp(-a)); s[c] = s * gate + x; y[c] = s", dtype: none} : state slot f32[$N], DT[T, $N]"#,
        "%r",
    ),
    Case("%r = embedding(%picked, %router) : DT[T, 3, $N]", "%r"),
    Case("%r = matmul(%x, %wt) : DT[T, 5]", "%r"),
    Case("%r = scores(%qh, %kc) : f32[$H, T, S]", "%r"),
    Case("%r = softmax(%dots, _) : f32[$H, T, S]", "%r"),
    Case("%r = softmax(%dots, %sinks) : f32[$H, T, S]", "%r"),
    Case("%r = softmax(%x, _) : DT[T, $N]", "%r"),
    Case("%r = mix(%dots, %vc) : DT[T, $H, $E]", "%r"),
    Case("%r = reduce(%qh) {by: sum, axis: 1} : DT[T, 1, $D]", "%r"),
    Case("%r = reduce(%qh) {by: max, axis: 2} : DT[T, $H, 1]", "%r"),
    Case("%r = reduce(%f) {by: mean, axis: 1} : f32[T, 1]", "%r"),
    Case("%r = rmsnorm(%x, %norm) {eps: 0.01, offset: 1} : DT[T, $N]", "%r, %x"),
    Case("%r = rmsnorm(%x, _) {eps: 0.01, offset: 0} : DT[T, $N]", "%r"),
    Case("%r = rmsnorm(%qh, %head) {eps: 0.01, offset: 0} : DT[T, $H, $D]", "%r"),
    Case("%r = rope(%qh, %pos, %freqs) {style: neox, scale: 1} : DT[T, $H, $D]", "%r"),
    Case("%r = rope(%qh, %pos, %freqs) {style: interleaved, scale: 0.9} : DT[T, $H, $D]", "%r, %x"),
    Case("%r = rope(%kc, %cpos, %freqs) {style: neox, scale: 1.2} : DT[S, $G, $D]", "%r"),
    Case("%r, %i = topk(%f, _) {k: 5, groups: 1, keep: 1} : f32[T, 5], u32[T, 5]", "%r, %i"),
    Case("%r, %i = topk(%sf, %choice) {k: 4, groups: 4, keep: 2} : f32[T, 4], u32[T, 4]", "%r, %i"),
    // The same value twice: the second is a copy.
    Case("%r = scale(%x) {by: 3} : DT[T, $N]", "%r, %r"),
];
