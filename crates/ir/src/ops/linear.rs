//! `linear`.

use super::common::{dense, dot, rows_cols, streaming};
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "linear",
    doc: "`x · wᵀ + bias` over the last dimension: x [.., K], w [N, K], bias [N]: [.., N]. Of what is \
          encoded, w may be in the packed form, and x [T, K] what `quantise_rows` makes.",
    operands: &[OperandDef::quantised("x"), OperandDef::packed("w"), OperandDef::optional("bias")],
    attrs: &[AttrDef {
        name: "dtype",
        kind: AttrKind::DType,
        default: Default::Absent,
        doc: "element type of the result; that of `x` when absent",
    }],
    infer: |call| {
        let (x, w) = (call.dense(0, 1)?, call.dense(1, 2)?);
        if w.rank() != 2 || x.shape.last() != w.shape.last() {
            return Err(call.mismatch(1, &format!("[N, K] with K as in {x}"), w));
        }
        call.channel_weight(2, w.shape[0])?;
        let mut shape = x.shape.clone();
        shape[x.rank() - 1] = w.shape[0];
        let dtype = call.dtype("dtype").unwrap_or(x.dtype);
        if !dtype.is_float() {
            return Err(format!("attribute `dtype`: expected a float type, found {dtype}"));
        }
        dense(dtype, shape)
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| {
        let k = call.operands[1].and_then(|t| t.tensor().ok()?.last_const()).unwrap_or(0);
        streaming(call, results, dims, k.saturating_mul(2))
    },
    reads: Reads::All,
    cuda: Some("linear"),
    tolerance: Tolerance::REDUCTION,
    memory: super::Memory::Computed,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (x, w, bias) = (eval.value(0)?, eval.value(1)?, eval.values[2]);
    let (rows, k) = rows_cols(&x.shape);
    let n = w.shape[0];
    let mut data = vec![0.0; rows * n];
    // Some rows of x at a time, so that a large w comes from memory once for all of them.
    for first in (0..rows).step_by(16) {
        for j in 0..n {
            let ws = &w.data[j * k..(j + 1) * k];
            for row in first..(first + 16).min(rows) {
                let xs = &x.data[row * k..(row + 1) * k];
                data[row * n + j] = dot(xs, ws) + bias.map_or(0.0, |b| b.data[j]);
            }
        }
    }
    Ok(vec![Tensor { shape: eval.sizes(0)?, data }])
}
