//! `softmax`.

use super::common::{like_first, rows_cols, streaming};
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "softmax",
    doc: "Softmax over the last dimension; over ragged scores [H, T, S] it is over each token's \
          own rows, where `sinks` [H] adds one more logit a head that takes probability and is \
          dropped.",
    operands: &[OperandDef::required("x"), OperandDef::optional("sinks")],
    attrs: &[],
    infer: |call| {
        let x = call.float(0, 1)?;
        if let Some(sinks) = call.optional(1)?
            && !(x.is_ragged() && x.rank() == 3 && sinks.shape == x.shape[..1])
        {
            return Err(call.mismatch(1, &format!("[H] for ragged scores, with x: {x}"), sinks));
        }
        like_first(call)
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 5),
    reads: Reads::All,
    cuda: Some("softmax"),
    tolerance: Tolerance::REDUCTION,
    memory: super::Memory::Rowwise,
    fused: None,
};

fn softmax(row: &mut [f64], sink: Option<f64>) {
    let max = row.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = row.iter().copied().chain(sink).map(|v| (v - max).exp()).sum();
    for v in row {
        *v = (*v - max).exp() / sum;
    }
}

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let mut x = eval.value(0)?.clone();
    if eval.call.tensor(0)?.is_ragged() {
        let pairs = (eval.step.dims().pairs as usize).max(1);
        for (head, values) in x.data.chunks_mut(pairs).enumerate() {
            for token in eval.step.tokens() {
                softmax(&mut values[token.pairs()], eval.values[1].map(|s| s.data[head]));
            }
        }
    } else {
        let (_, n) = rows_cols(&x.shape);
        x.data.chunks_mut(n.max(1)).for_each(|row| softmax(row, None));
    }
    Ok(vec![x])
}
