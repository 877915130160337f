//! `mix`.

use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance, Work};
use crate::interp::Tensor;
use crate::{Dim, Sym, TensorType};

pub(super) static OP: OpDef = OpDef {
    name: "mix",
    doc: "Attention output: ragged probabilities p [H, T, S] times values v [S, Hkv, D]: [T, H, D] \
          of the type of `v`. Head `h` reads value head `h / (H / Hkv)`.",
    operands: &[OperandDef::required("p"), OperandDef::required("v")],
    attrs: &[],
    infer: |call| {
        let (p, v) = (call.float(0, 3)?, call.float(1, 3)?);
        let fits = p.rank() == 3 && p.is_ragged() && v.rank() == 3;
        match (p.shape[0], v.shape[1], v.shape[2]) {
            (Dim::Const(h), Dim::Const(g), Dim::Const(d))
                if fits && v.shape[0] == Dim::sym(Sym::S) && g > 0 && h % g == 0 =>
            {
                let shape = [Dim::sym(Sym::T), Dim::Const(h), Dim::Const(d)];
                Ok(vec![TensorType::act(v.dtype, shape).into()])
            }
            _ => Err(call.mismatch(1, &format!("[S, Hkv, D] with H % Hkv = 0 for {p}"), v)),
        }
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| {
        let p = call.tensor(0).map_or(0, |t: &TensorType| t.elements(dims));
        let v = call.tensor(1).map_or(0, |t: &TensorType| t.bytes(dims));
        let d = call.tensor(1).ok().and_then(TensorType::last_const).unwrap_or(0);
        let out = results[0].tensor().map_or(0, |t| t.bytes(dims));
        Work {
            bytes: p.saturating_mul(4).saturating_add(v).saturating_add(out),
            flops: p.saturating_mul(d).saturating_mul(2),
        }
    },
    reads: Reads::All,
    cuda: Some("mix"),
    tolerance: Tolerance::REDUCTION,
    memory: super::Memory::Computed,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (p, v) = (eval.value(0)?, eval.value(1)?);
    let (h, kv_heads, d) = (p.shape[0], v.shape[1], v.shape[2]);
    let pairs = eval.step.dims().pairs as usize;
    let shape = eval.sizes(0)?;
    let mut data = vec![0.0; shape.iter().product()];
    for (t, token) in eval.step.tokens().enumerate() {
        for head in 0..h {
            let group = head / (h / kv_heads);
            let out = &mut data[(t * h + head) * d..][..d];
            let weights = &p.data[head * pairs..][token.pairs()];
            for (s, weight) in weights.iter().enumerate() {
                let vs = &v.data[((token.context_start + s) * kv_heads + group) * d..][..d];
                out.iter_mut().zip(vs).for_each(|(o, x)| *o += weight * x);
            }
        }
    }
    Ok(vec![Tensor { shape, data }])
}
