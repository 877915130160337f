//! `combine_heads`.

use super::common::streaming;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::interp::Tensor;
use crate::{DType, Dim, Sym, TensorType};

pub(super) static OP: OpDef = OpDef {
    name: "combine_heads",
    doc: "The heads of ragged scores x [H, T, S] summed, each times the token's own weight for it, w [T, H]: ragged f32 \
          [1, T, S]. An indexer's scores (DeepSeek V3.2) are made so.",
    operands: &[OperandDef::required("x"), OperandDef::required("w")],
    attrs: &[],
    infer: |call| {
        let (x, w) = (call.float(0, 3)?, call.dense(1, 2)?);
        if !x.is_ragged() || x.rank() != 3 {
            return Err(call.mismatch(0, "ragged scores [H, T, S]", x));
        }
        if w.shape != [Dim::sym(Sym::T), x.shape[0]] {
            return Err(call.mismatch(1, &format!("[T, H] for {x}"), w));
        }
        let shape = [Dim::Const(1), Dim::sym(Sym::T), Dim::sym(Sym::S)];
        Ok(vec![TensorType::act(DType::F32, shape).into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 2),
    reads: Reads::All,
    cuda: Some("combine_heads"),
    tolerance: Tolerance::REDUCTION,
    memory: super::Memory::Computed,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (x, w) = (eval.value(0)?, eval.value(1)?);
    let (heads, pairs) = (x.shape[0], eval.step.dims().pairs as usize);
    let mut data = vec![0.0; pairs];
    for (t, token) in eval.step.tokens().enumerate() {
        for head in 0..heads {
            let weight = w.data[t * heads + head];
            let from = &x.data[head * pairs..][token.pairs()];
            data[token.pairs()].iter_mut().zip(from).for_each(|(sum, v)| *sum += weight * v);
        }
    }
    Ok(vec![Tensor { shape: eval.sizes(0)?, data }])
}
