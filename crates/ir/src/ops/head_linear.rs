//! `head_linear`.

use super::common::{dense, dot, streaming};
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::TensorType;
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "head_linear",
    doc: "One linear layer a head, `x[.., h, :] · w[h]ᵀ`: x [.., H, K], w [H, N, K]: [.., H, N].",
    operands: &[OperandDef::required("x"), OperandDef::required("w")],
    attrs: &[],
    infer: |call| {
        let (x, w) = (call.dense(0, 2)?, call.dense(1, 3)?);
        let rank = x.rank();
        let fits = w.rank() == 3 && x.shape[rank - 2..] == [w.shape[0], w.shape[2]];
        if !fits || w.shape.iter().any(|d| d.as_const().is_none()) {
            return Err(call.mismatch(1, &format!("[H, N, K] with H and K as in {x}"), w));
        }
        let mut shape = x.shape.clone();
        shape[rank - 1] = w.shape[1];
        dense(x.dtype, shape)
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| {
        let k = call.tensor(1).ok().and_then(TensorType::last_const).unwrap_or(0);
        streaming(call, results, dims, k.saturating_mul(2))
    },
    reads: Reads::All,
    cuda: Some("head_linear"),
    tolerance: Tolerance::REDUCTION,
    memory: super::Memory::Computed,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (x, w) = (eval.value(0)?, eval.value(1)?);
    let (heads, n, k) = (w.shape[0], w.shape[1], w.shape[2]);
    let shape = eval.sizes(0)?;
    let mut data = Vec::with_capacity(shape.iter().product());
    for (row, xs) in x.data.chunks_exact(k.max(1)).enumerate() {
        for j in 0..n {
            let ws = &w.data[(row % heads * n + j) * k..][..k];
            data.push(dot(xs, ws));
        }
    }
    Ok(vec![Tensor { shape, data }])
}
