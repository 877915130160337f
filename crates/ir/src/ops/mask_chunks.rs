//! `mask_chunks`.

use super::common::streaming;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "mask_chunks",
    doc: "Sets to -inf what a token may not see in ragged scores [H, T, S] where sequences are cut into chunks of \
          `chunk` rows, counted from the first: rows of chunks before its own. It does not hide rows after a \
          token's own: `mask` does.",
    operands: &[OperandDef::required("x")],
    attrs: &[AttrDef {
        name: "chunk",
        kind: AttrKind::Int,
        default: Default::Required,
        doc: "rows of a chunk; at least 1",
    }],
    infer: |call| {
        let x = call.float(0, 2)?;
        if !x.is_ragged() {
            return Err(call.mismatch(0, "ragged scores [H, T, S]", x));
        }
        if call.int("chunk") == 0 {
            return Err("attribute `chunk`: expected at least 1, found 0".to_owned());
        }
        Ok(vec![x.clone().into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 0),
    // What is `chunk` rows or more before a token's own is of a chunk before.
    reads: Reads::Window("chunk"),
    cuda: Some("mask_chunks"),
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Rowwise,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let mut x = eval.value(0)?.clone();
    let chunk = eval.call.int("chunk") as usize;
    let pairs = eval.step.dims().pairs as usize;
    for head in x.data.chunks_mut(pairs.max(1)) {
        for token in eval.step.tokens() {
            let first = token.row / chunk * chunk;
            head[token.pairs()][..first].fill(f64::NEG_INFINITY);
        }
    }
    Ok(vec![x])
}
