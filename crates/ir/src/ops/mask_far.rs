//! `mask_far`.

use super::common::streaming;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "mask_far",
    doc: "Sets to -inf in ragged scores [H, T, S] the rows that are more than `reach` places before or after a token's own. \
          Other rows after its own stay as they are: `mask` hides those.",
    operands: &[OperandDef::required("x")],
    attrs: &[AttrDef {
        name: "reach",
        kind: AttrKind::Int,
        default: Default::Required,
        doc: "how many places away a row is seen",
    }],
    infer: |call| {
        let x = call.float(0, 2)?;
        if !x.is_ragged() {
            return Err(call.mismatch(0, "ragged scores [H, T, S]", x));
        }
        Ok(vec![x.clone().into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 0),
    reads: Reads::All,
    cuda: Some("mask_far"),
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Rowwise,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let mut x = eval.value(0)?.clone();
    let reach = eval.call.int("reach") as usize;
    let pairs = eval.step.dims().pairs as usize;
    for head in x.data.chunks_mut(pairs.max(1)) {
        for token in eval.step.tokens() {
            for (row, v) in head[token.pairs()].iter_mut().enumerate() {
                if row.abs_diff(token.row) > reach {
                    *v = f64::NEG_INFINITY;
                }
            }
        }
    }
    Ok(vec![x])
}
