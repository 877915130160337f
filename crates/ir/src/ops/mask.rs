//! `mask`.

use super::common::streaming;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "mask",
    doc: "Sets to -inf what a token may not see in ragged scores [H, T, S]: rows after its own, \
          and with `window` rows that are `window` or more before it.",
    operands: &[OperandDef::required("x")],
    attrs: &[AttrDef {
        name: "window",
        kind: AttrKind::Int,
        default: Default::Absent,
        doc: "rows seen, the token's own included; all earlier ones when absent",
    }],
    infer: |call| {
        let x = call.float(0, 2)?;
        if !x.is_ragged() {
            return Err(call.mismatch(0, "ragged scores [H, T, S]", x));
        }
        if call.maybe_int("window") == Some(0) {
            return Err("attribute `window`: expected at least 1, found 0".to_owned());
        }
        Ok(vec![x.clone().into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 0),
    reads: Reads::Window("window"),
    cuda: Some("mask"),
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Rowwise,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let mut x = eval.value(0)?.clone();
    let window = eval.call.maybe_int("window").unwrap_or(u64::MAX) as usize;
    let pairs = eval.step.dims().pairs as usize;
    for head in x.data.chunks_mut(pairs.max(1)) {
        for token in eval.step.tokens() {
            for (s, v) in head[token.pairs()].iter_mut().enumerate() {
                if s > token.row || token.row - s >= window {
                    *v = f64::NEG_INFINITY;
                }
            }
        }
    }
    Ok(vec![x])
}
