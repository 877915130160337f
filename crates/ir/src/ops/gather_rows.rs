//! `gather_rows`.

use super::common::{bytes_of, dense, pick_rows};
use super::{Effect, OpDef, OperandDef, Pointwise, Reads, Tolerance, Work};

pub(super) static OP: OpDef = OpDef {
    name: "gather_rows",
    doc: "Rows of `x` [N, ..] picked by `rows` [M]: [M, ..].",
    operands: &[OperandDef::required("x"), OperandDef::rows("rows", "x")],
    attrs: &[],
    infer: |call| {
        let (x, rows) = (call.dense(0, 1)?, call.index(1, 1)?);
        let mut shape = x.shape.clone();
        shape[0] = rows.shape[0];
        dense(x.dtype, shape)
    },
    effect: Effect::Pure,
    reference: |eval| pick_rows(eval.value(0)?, eval.value(1)?, eval.sizes(0)?),
    pointwise: Pointwise::No,
    work: |_, results, dims| Work {
        bytes: results[0].tensor().map_or(0, |t| t.bytes(dims)).saturating_mul(2),
        flops: 0,
    },
    reads: Reads::Part { operand: 0, bytes: |_, results, dims| bytes_of(&results[0], dims) },
    cuda: Some("gather_rows"),
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Lookup { table: 0, rows: 1 },
    fused: None,
};
