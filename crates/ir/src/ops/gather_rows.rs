//! `gather_rows`.

use super::common::dense;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Tolerance, Work};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "gather_rows",
    doc: "Rows of `x` [N, ..] picked by `rows` [M]: [M, ..].",
    operands: &[OperandDef::required("x"), OperandDef::required("rows")],
    attrs: &[],
    infer: |call| {
        let (x, rows) = (call.dense(0, 1)?, call.index(1, 1)?);
        let mut shape = x.shape.clone();
        shape[0] = rows.shape[0];
        dense(x.dtype, shape)
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |_, results, dims| Work {
        bytes: results[0].tensor().map_or(0, |t| t.bytes(dims)).saturating_mul(2),
        flops: 0,
    },
    cuda: None,
    tolerance: Tolerance::EXACT,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (x, rows) = (eval.value(0)?, eval.value(1)?);
    let (n, d) = (x.shape[0], x.shape[1..].iter().product::<usize>());
    let mut data = Vec::with_capacity(rows.data.len() * d);
    for &row in &rows.data {
        let row = row as usize;
        if row >= n {
            return Err(format!("row {row} is outside a tensor of {n} row(s)"));
        }
        data.extend(&x.data[row * d..(row + 1) * d]);
    }
    Ok(vec![Tensor { shape: eval.sizes(0)?, data }])
}
