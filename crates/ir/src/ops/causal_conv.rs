//! `causal_conv`.

use super::common::streaming;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::interp::Tensor;
use crate::{Dim, StateType, Sym, TensorType};

pub(super) static OP: OpDef = OpDef {
    name: "causal_conv",
    doc: "A short convolution of each channel along the tokens of a sequence: for x [T, C] the sum over taps w [C, W] of \
          w[c, W - 1 - j] times the token's own channel, for j = 0, or that of the token j before it, and an \
          optional bias [C]: [T, C]. The state, a slot [W - 1, C], has the last W - 1 tokens' channels, zeros before the first. \
          Gives the state's next version and the rows.",
    operands: &[
        OperandDef::required("state"),
        OperandDef::required("x"),
        OperandDef::required("w"),
        OperandDef::optional("bias"),
    ],
    attrs: &[],
    infer: |call| {
        let (state, x, w) = (call.slot(0)?, call.dense(1, 2)?, call.float(2, 2)?);
        let [Dim::Sym { sym: Sym::T, times: 1 }, Dim::Const(channels)] = x.shape[..] else {
            return Err(call.mismatch(1, "[T, C] with a constant C", x));
        };
        let taps = w.last_const().filter(|taps| *taps > 1);
        if taps.is_none() || w.shape[0] != channels.into() || w.rank() != 2 {
            return Err(call.mismatch(2, &format!("[{channels}, W], W at least 2"), w));
        }
        if taps.is_some_and(|taps| state.shape != [taps - 1, channels]) || state.dtype != x.dtype {
            return Err(format!(
                "operand `state`: expected slot {}[W - 1, {channels}], found {state}",
                x.dtype
            ));
        }
        call.channel_weight(3, channels.into())?;
        Ok(vec![state.clone().into(), x.clone().into()])
    },
    effect: Effect::Writes,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| {
        let taps = call.tensor(2).ok().and_then(TensorType::last_const).unwrap_or(0);
        let mut work = streaming(call, results, dims, taps.saturating_mul(2));
        let state = call.slot(0).map_or(0, StateType::bytes);
        work.bytes =
            work.bytes.saturating_add(state.saturating_mul(2).saturating_mul(dims.seqs.max(1)));
        work
    },
    reads: Reads::All,
    cuda: Some("causal_conv"),
    tolerance: Tolerance::REDUCTION,
    memory: super::Memory::Computed,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (state, x, w) = (eval.value(0)?, eval.value(1)?, eval.value(2)?);
    let (channels, taps) = (w.shape[0], w.shape[1]);
    let bias = eval.values[3];
    let mut next = state.clone();
    let mut rows = Tensor { shape: x.shape.clone(), data: Vec::new() };
    let mut token = 0;
    for (seq, kept) in eval.step.seqs.iter().zip(next.data.chunks_exact_mut((taps - 1) * channels))
    {
        let new = &x.data[token * channels..(token + seq.new) * channels];
        let all = [&*kept, new].concat();
        for t in 0..seq.new {
            for c in 0..channels {
                let sum: f64 =
                    (0..taps).map(|j| w.data[c * taps + j] * all[(t + j) * channels + c]).sum();
                rows.data.push(sum + bias.map_or(0.0, |b| b.data[c]));
            }
        }
        kept.copy_from_slice(&all[seq.new * channels..]);
        token += seq.new;
    }
    Ok(vec![next, rows])
}
