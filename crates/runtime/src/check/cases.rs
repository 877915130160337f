//! What calls of ops are tried with: the values that they take, and the sizes.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use infernum_ir::encoding::quantised_rows::{GROUP, quantised_heads};
use infernum_ir::{DType, Module, Op, OpSet, text, verify};
use infernum_passes::check::{CallModule, calls};
use infernum_passes::data::Kernels;

use super::calls::{CASES, OF_EIGHT_BITS, ON_GPUS, PRIMITIVES};
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
  %wrms = weight "rms" : const f32[31, $K64]
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
  %rms = embedding(%ids, %wrms) : f32[T, $K64]
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
pub(super) struct Case(pub(super) &'static str, pub(super) &'static str);

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

    /// Whether the call can be made at these sizes: heads that are rounded side by side are a group of columns each.
    pub(super) fn fits(&self, sizes: Sizes) -> bool {
        let rounds_heads = self.0.contains("quantised_rows DT[T, $HE]");
        !rounds_heads || sizes.heads[3] == GROUP
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
