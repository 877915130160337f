//! `layernorm`.

use super::common::{like_first, rows_cols, streaming};
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "layernorm",
    doc: "Layer norm of x [.., K] over the last dimension (Ba et al. 2016), w [K], bias [K]: [.., K]: \
          `(x - mean(x)) / sqrt(var(x) + eps) * w + bias`.",
    operands: &[OperandDef::required("x"), OperandDef::optional("w"), OperandDef::optional("bias")],
    attrs: &[AttrDef {
        name: "eps",
        kind: AttrKind::Float,
        default: Default::Required,
        doc: "added to the variance, inside the root",
    }],
    infer: |call| {
        let x = call.dense(0, 1)?;
        call.channel_weight(1, x.shape[x.rank() - 1])?;
        call.channel_weight(2, x.shape[x.rank() - 1])?;
        like_first(call)
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 7),
    reads: Reads::All,
    cuda: Some("layernorm"),
    tolerance: Tolerance::REDUCTION,
    memory: super::Memory::Rowwise,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (x, w, bias) = (eval.value(0)?, eval.values[1], eval.values[2]);
    let eps = eval.call.num("eps");
    let (rows, d) = rows_cols(&x.shape);
    let mut data = Vec::with_capacity(x.data.len());
    for row in 0..rows {
        let xs = &x.data[row * d..(row + 1) * d];
        let mean = xs.iter().sum::<f64>() / d as f64;
        let variance = xs.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / d as f64;
        let inverse = 1.0 / (variance + eps).sqrt();
        data.extend(xs.iter().enumerate().map(|(i, v)| {
            (v - mean) * inverse * w.map_or(1.0, |w| w.data[i]) + bias.map_or(0.0, |b| b.data[i])
        }));
    }
    Ok(vec![Tensor { shape: x.shape.clone(), data }])
}
