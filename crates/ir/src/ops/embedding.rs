//! `embedding`.

use super::common::dense;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Tolerance, Work};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "embedding",
    doc: "Rows of `table` [V, D] picked by `ids` [N]: [N, D].",
    operands: &[OperandDef::required("ids"), OperandDef::required("table")],
    attrs: &[],
    infer: |call| {
        let (ids, table) = (call.index(0, 1)?, call.dense(1, 2)?);
        if table.rank() != 2 {
            return Err(call.mismatch(1, "[V, D]", table));
        }
        dense(table.dtype, [ids.shape[0], table.shape[1]])
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

pub(super) fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (ids, table) = (eval.value(0)?, eval.value(1)?);
    let (rows, d) = (table.shape[0], table.shape[1..].iter().product::<usize>());
    let mut data = Vec::with_capacity(ids.data.len() * d);
    for &id in &ids.data {
        let row = id as usize;
        if row >= rows {
            return Err(format!("row {row} is outside a table of {rows}"));
        }
        data.extend(&table.data[row * d..(row + 1) * d]);
    }
    Ok(vec![Tensor { shape: eval.sizes(0)?, data }])
}
