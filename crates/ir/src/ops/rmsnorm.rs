//! `rmsnorm`.

use super::common::{like_first, rows_cols, streaming};
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "rmsnorm",
    doc: "Root-mean-square norm of x [.., K] over the last dimension (Zhang & Sennrich 2019), w [K]: [.., K]: \
          `x / sqrt(mean(x²) + eps) * (w + offset)`. On [.., H, D] it is a head-wise norm.",
    operands: &[OperandDef::required("x"), OperandDef::optional("w")],
    attrs: &[
        AttrDef {
            name: "eps",
            kind: AttrKind::Float,
            default: Default::Required,
            doc: "added to the mean square, inside the root",
        },
        AttrDef {
            name: "offset",
            kind: AttrKind::Float,
            default: Default::Float(0.0),
            doc: "added to the weight (1 in Gemma)",
        },
    ],
    infer: |call| {
        let x = call.dense(0, 1)?;
        call.channel_weight(1, x.shape[x.rank() - 1])?;
        like_first(call)
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 4),
    reads: Reads::All,
    cuda: Some("rmsnorm"),
    tolerance: Tolerance::REDUCTION,
    memory: super::Memory::Rowwise,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (x, w) = (eval.value(0)?, eval.values[1]);
    let (eps, offset) = (eval.call.num("eps"), eval.call.num("offset"));
    let (rows, d) = rows_cols(&x.shape);
    let mut data = Vec::with_capacity(x.data.len());
    for row in 0..rows {
        let xs = &x.data[row * d..(row + 1) * d];
        let mean_square = xs.iter().map(|v| v * v).sum::<f64>() / d as f64;
        let inverse = 1.0 / (mean_square + eps).sqrt();
        data.extend(
            xs.iter().enumerate().map(|(i, v)| v * inverse * w.map_or(1.0, |w| w.data[i] + offset)),
        );
    }
    Ok(vec![Tensor { shape: x.shape.clone(), data }])
}
