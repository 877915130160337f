//! `matmul`.

use super::common::{dense, rows_cols, streaming};
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "matmul",
    doc: "Batched product of activations: a [.., M, K], b [.., K, N]: [.., M, N]; leading \
          dimensions are equal.",
    operands: &[OperandDef::required("a"), OperandDef::required("b")],
    attrs: &[],
    infer: |call| {
        let (a, b) = (call.dense(0, 2)?, call.dense(1, 2)?);
        let r = a.rank();
        let agree = b.rank() == r
            && a.shape[..r - 2] == b.shape[..r - 2]
            && a.shape[r - 1] == b.shape[r - 2]
            && (a.dtype == b.dtype || b.constant);
        if !agree {
            return Err(call.mismatch(1, &format!("[.., K, N] to follow {a}"), b));
        }
        let mut shape = a.shape.clone();
        shape[r - 1] = b.shape[r - 1];
        dense(a.dtype, shape)
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| {
        let k = call.operands[0].and_then(|t| Some(t.tensor().ok()?.shape.last()?.eval(dims)));
        streaming(call, results, dims, k.unwrap_or(0).saturating_mul(2))
    },
    reads: Reads::All,
    cuda: Some("matmul"),
    tolerance: Tolerance::REDUCTION,
    memory: super::Memory::Computed,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (a, b) = (eval.value(0)?, eval.value(1)?);
    let (am, k) = rows_cols(&a.shape);
    let (bm, n) = rows_cols(&b.shape);
    let m = a.shape[a.shape.len() - 2];
    let batches = am.checked_div(m).unwrap_or(0);
    let mut data = Vec::with_capacity(am * n);
    for batch in 0..batches {
        let right = &b.data[batch * (bm / batches) * n..];
        for i in 0..m {
            let left = &a.data[(batch * m + i) * k..][..k];
            for j in 0..n {
                data.push(left.iter().enumerate().map(|(p, x)| x * right[p * n + j]).sum());
            }
        }
    }
    Ok(vec![Tensor { shape: eval.sizes(0)?, data }])
}
