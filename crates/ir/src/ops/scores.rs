//! `scores`.

use super::common::dot;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance, Work};
use crate::interp::Tensor;
use crate::{DType, Dim, Sym, TensorType};

pub(super) static OP: OpDef = OpDef {
    name: "scores",
    doc: "Attention scores `q · k`, unscaled: q [T, H, D], k [S, Hkv, D], ragged f32 [H, T, S]. \
          Head `h` reads key head `h / (H / Hkv)`.",
    operands: &[OperandDef::required("q"), OperandDef::required("k")],
    attrs: &[],
    infer: |call| {
        let (q, k) = (call.float(0, 3)?, call.float(1, 3)?);
        let heads = (q.rank() == 3).then(|| q.shape[1].as_const()).flatten();
        let kv_heads = (k.rank() == 3).then(|| k.shape[1].as_const()).flatten();
        let fits = q.shape[0] == Dim::sym(Sym::T)
            && k.shape[0] == Dim::sym(Sym::S)
            && q.shape.last() == k.shape.last();
        match (heads, kv_heads) {
            (Some(h), Some(g)) if fits && g > 0 && h % g == 0 => {
                let shape = [Dim::Const(h), Dim::sym(Sym::T), Dim::sym(Sym::S)];
                Ok(vec![TensorType::act(DType::F32, shape).into()])
            }
            _ => Err(call.mismatch(1, &format!("[S, Hkv, D] with H % Hkv = 0 for {q}"), k)),
        }
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| {
        let d = call.tensor(0).ok().and_then(TensorType::last_const).unwrap_or(0);
        let out = results[0].tensor().map_or(0, |t| t.elements(dims));
        let operand = |i| call.tensor(i).map_or(0, |t: &TensorType| t.bytes(dims));
        Work {
            bytes: operand(0).saturating_add(operand(1)).saturating_add(out.saturating_mul(4)),
            flops: out.saturating_mul(d).saturating_mul(2),
        }
    },
    reads: Reads::All,
    cuda: Some("scores"),
    tolerance: Tolerance::REDUCTION,
    memory: super::Memory::Computed,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (q, k) = (eval.value(0)?, eval.value(1)?);
    let (h, d, kv_heads) = (q.shape[1], q.shape[2], k.shape[1]);
    let shape = eval.sizes(0)?;
    let mut data = Vec::with_capacity(shape.iter().product());
    for head in 0..h {
        let group = head / (h / kv_heads);
        for (t, token) in eval.step.tokens().enumerate() {
            let qs = &q.data[(t * h + head) * d..][..d];
            for s in token.context_start..token.context_start + token.context_len {
                let ks = &k.data[(s * kv_heads + group) * d..][..d];
                data.push(dot(qs, ks));
            }
        }
    }
    Ok(vec![Tensor { shape, data }])
}
