//! `kv_read`.

use super::common::streaming;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::interp::Tensor;
use crate::{Dim, StateType, Sym, TensorType};

pub(super) static OP: OpDef = OpDef {
    name: "kv_read",
    doc: "The rows of a cache plane that the step's sequences hold, sequence after sequence: \
          [S, H, D]. Rows of a ring that no token of the step may see are zero: they are kept no more.",
    operands: &[OperandDef::required("state")],
    attrs: &[],
    infer: |call| {
        let state = call.state(0)?;
        let shape = [Dim::sym(Sym::S), state.heads().into(), state.dim().into()];
        Ok(vec![TensorType::act(state.dtype, shape).into()])
    },
    effect: Effect::Reads,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| {
        let mut work = streaming(call, results, dims, 0);
        let read = call.state(0).map_or(0, StateType::bytes).saturating_mul(dims.s);
        work.bytes = work.bytes.saturating_add(read);
        work
    },
    reads: Reads::All,
    cuda: Some("kv_read"),
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Computed,
    fused: None,
};

// The interpreter keeps a plane as the very rows that `kv_read` yields.
fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let mut rows = eval.value(0)?.clone();
    let kind = eval.call.state(0)?.kind;
    let (mut start, width) = (0, rows.shape[1..].iter().product::<usize>());
    for seq in &eval.step.seqs {
        let gone = kind.first_row(seq.context - seq.new).min(seq.context);
        rows.data[start * width..(start + gone) * width].fill(0.0);
        start += seq.context;
    }
    Ok(vec![rows])
}
