//! `alibi`.

use super::common::streaming;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "alibi",
    doc: "Linear biases of attention (Press et al. 2022): to ragged scores x [H, T, S] of a head is added its of \
          slopes [H] times how far a row is after the token's own, a number of at most 0 in what a causal mask \
          leaves: [H, T, S].",
    operands: &[OperandDef::required("x"), OperandDef::required("slopes")],
    attrs: &[],
    infer: |call| {
        let (x, slopes) = (call.float(0, 3)?, call.float(1, 1)?);
        if !x.is_ragged() || x.rank() != 3 {
            return Err(call.mismatch(0, "ragged scores [H, T, S]", x));
        }
        if slopes.shape != x.shape[..1] {
            return Err(call.mismatch(1, &format!("[H] for {x}"), slopes));
        }
        Ok(vec![x.clone().into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 2),
    reads: Reads::All,
    cuda: Some("alibi"),
    tolerance: Tolerance::POINTWISE,
    memory: super::Memory::Rowwise,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (mut x, slopes) = (eval.value(0)?.clone(), eval.value(1)?);
    let pairs = eval.step.dims().pairs as usize;
    for (head, slope) in x.data.chunks_mut(pairs.max(1)).zip(&slopes.data) {
        for token in eval.step.tokens() {
            for (s, v) in head[token.pairs()].iter_mut().enumerate() {
                *v += slope * (s as f64 - token.row as f64);
            }
        }
    }
    Ok(vec![x])
}
