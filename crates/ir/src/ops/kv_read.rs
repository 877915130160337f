//! `kv_read`.

use super::common::streaming;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::interp::Tensor;
use crate::{Dim, Sym, TensorType};

pub(super) static OP: OpDef = OpDef {
    name: "kv_read",
    doc: "The rows of a cache plane that the step's sequences hold, sequence after sequence: \
          [S, H, D].",
    operands: &[OperandDef::required("state")],
    attrs: &[],
    infer: |call| {
        let state = call.state(0)?;
        let shape = [Dim::sym(Sym::S), Dim::Const(state.heads), Dim::Const(state.dim)];
        Ok(vec![TensorType::act(state.dtype, shape).into()])
    },
    effect: Effect::Reads,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| {
        let mut work = streaming(call, results, dims, 0);
        work.bytes = work.bytes.saturating_mul(2);
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
    Ok(vec![eval.value(0)?.clone()])
}
