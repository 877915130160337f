//! `mask_topk`.

use super::common::streaming;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "mask_topk",
    doc: "Sets to -inf in ragged scores x [H, T, S] what is not among the `k` context rows of a token with the largest ragged \
          `by` [1, T, S]; of equals the earlier row is kept. Of rows that a mask hid in `by`, none may be seen that it hid in x.",
    operands: &[OperandDef::required("x"), OperandDef::required("by")],
    attrs: &[AttrDef {
        name: "k",
        kind: AttrKind::Int,
        default: Default::Required,
        doc: "rows kept; at least 1",
    }],
    infer: |call| {
        let (x, by) = (call.float(0, 3)?, call.float(1, 3)?);
        if !x.is_ragged() || x.rank() != 3 {
            return Err(call.mismatch(0, "ragged scores [H, T, S]", x));
        }
        if !by.is_ragged() || by.shape[0].as_const() != Some(1) {
            return Err(call.mismatch(1, "ragged scores [1, T, S]", by));
        }
        if call.int("k") == 0 {
            return Err("attribute `k`: expected at least 1, found 0".to_owned());
        }
        Ok(vec![x.clone().into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 4),
    reads: Reads::All,
    cuda: Some("mask_topk"),
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Rowwise,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (mut x, by) = (eval.value(0)?.clone(), eval.value(1)?);
    let k = eval.call.int("k") as usize;
    let pairs = eval.step.dims().pairs as usize;
    for token in eval.step.tokens() {
        // Zeros are equal, whatever their sign.
        let ranks: Vec<f64> = by.data[token.pairs()].iter().map(|rank| rank + 0.0).collect();
        let mut order: Vec<usize> = (0..ranks.len()).collect();
        order.sort_by(|&a, &b| ranks[b].total_cmp(&ranks[a]).then(a.cmp(&b)));
        for head in x.data.chunks_mut(pairs.max(1)) {
            let row = &mut head[token.pairs()];
            order.iter().skip(k).for_each(|&s| row[s] = f64::NEG_INFINITY);
        }
    }
    Ok(vec![x])
}
