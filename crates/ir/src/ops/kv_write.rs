//! `kv_write`.

use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance, Work};
use crate::encoding::quantised_rows::{quantise_group, value};
use crate::interp::Tensor;
use crate::{Dim, StateType, Sym};

pub(super) static OP: OpDef = OpDef {
    name: "kv_write",
    doc: "Stores x [T, H, D], a row a token, at each token's place in the cache plane, giving the \
          plane's next version. In a plane of `quantised_heads` each head becomes `f8e4m3` with a scale of its own, so that its \
          largest magnitude is 448; with a NaN or an infinity it is NaN.",
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
    work: |call, _, dims| {
        let written = call.state(0).map_or(0, StateType::bytes).saturating_mul(dims.t);
        Work {
            bytes: call.tensor(1).map_or(0, |t| t.bytes(dims)).saturating_add(written),
            flops: 0,
        }
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
    let is_encoded = eval.call.state(0)?.encoding.is_some();
    let width = x.shape[1] * x.shape[2];
    for (t, token) in eval.step.tokens().enumerate() {
        let at = (token.context_start + token.row) * width;
        next.data[at..at + width].copy_from_slice(&x.data[t * width..(t + 1) * width]);
        if is_encoded {
            next.data[at..at + width].chunks_mut(x.shape[2].max(1)).for_each(round_head);
        }
    }
    Ok(vec![next])
}

/// A head's values become those that its codes stand for.
fn round_head(head: &mut [f64]) {
    let values: Vec<f32> = head.iter().map(|x| *x as f32).collect();
    let (codes, scale) = quantise_group(&values);
    for (x, code) in head.iter_mut().zip(codes) {
        *x = f64::from(value(code, scale));
    }
}
