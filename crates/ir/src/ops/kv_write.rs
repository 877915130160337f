//! `kv_write`.

use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance, Work};
use crate::interp::Tensor;
use crate::{Dim, Sym};

pub(super) static OP: OpDef = OpDef {
    name: "kv_write",
    doc: "Stores x [T, H, D], a row a token, at each token's place in the cache plane, giving the \
          plane's next version.",
    operands: &[OperandDef::required("state"), OperandDef::required("x")],
    attrs: &[],
    infer: |call| {
        let (state, x) = (call.state(0)?, call.float(1, 3)?);
        let row = [Dim::sym(Sym::T), state.heads().into(), state.dim().into()];
        if x.shape != row || x.dtype != state.dtype {
            return Err(call.mismatch(1, &format!("rows of {state}"), x));
        }
        Ok(vec![state.clone().into()])
    },
    effect: Effect::Writes,
    reference,
    pointwise: Pointwise::No,
    work: |call, _, dims| Work {
        bytes: call.tensor(1).map_or(0, |t| t.bytes(dims)).saturating_mul(2),
        flops: 0,
    },
    reads: Reads::All,
    cuda: Some("kv_write"),
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Computed,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (state, x) = (eval.value(0)?, eval.value(1)?);
    let mut next = state.clone();
    let width = x.shape[1] * x.shape[2];
    for (t, token) in eval.step.tokens().enumerate() {
        let at = (token.context_start + token.row) * width;
        next.data[at..at + width].copy_from_slice(&x.data[t * width..(t + 1) * width]);
    }
    Ok(vec![next])
}
