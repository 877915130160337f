//! `embedding`.

use super::common::{bytes_of, dense, pick_rows};
use super::{Effect, OpDef, OperandDef, Pointwise, Reads, Tolerance, Work};

pub(super) static OP: OpDef = OpDef {
    name: "embedding",
    doc: "Rows of `table` [V, D] picked by `ids` [N] or [N, k]: [N, D] or [N, k, D]. Of what is encoded, \
          the table may be in the packed form; its values are f32.",
    operands: &[OperandDef::rows("ids", "table"), OperandDef::packed("table")],
    attrs: &[],
    infer: |call| {
        let rank = call.tensor(0)?.rank().clamp(1, 2);
        let (ids, table) = (call.index(0, rank)?, call.dense(1, 2)?);
        if table.rank() != 2 {
            return Err(call.mismatch(1, "[V, D]", table));
        }
        dense(table.dtype, [&ids.shape[..], &table.shape[1..]].concat())
    },
    effect: Effect::Pure,
    reference: |eval| pick_rows(eval.value(1)?, eval.value(0)?, eval.sizes(0)?),
    pointwise: Pointwise::No,
    work: |_, results, dims| Work {
        bytes: results[0].tensor().map_or(0, |t| t.bytes(dims)).saturating_mul(2),
        flops: 0,
    },
    reads: Reads::Part { operand: 1, bytes: |_, results, dims| bytes_of(&results[0], dims) },
    cuda: Some("embedding"),
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Lookup { table: 1, rows: 0 },
    fused: None,
};
