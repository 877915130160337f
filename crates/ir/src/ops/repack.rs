//! `repack`.

use super::common::streaming;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::TensorType;
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "repack",
    doc: "An encoded weight [.., N, K] in the form that kernels read codes of: the same values, in another order, made \
          once.",
    operands: &[OperandDef::encoded("w")],
    attrs: &[],
    infer: |call| {
        let w = call.tensor(0)?;
        let Some(encoding) = w.encoding.as_ref().filter(|e| e.packing().is_none()) else {
            return Err(call.mismatch(0, "a weight as it is stored, in an encoding", w));
        };
        Ok(vec![TensorType { encoding: Some(encoding.packed()?), ..w.clone() }.into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 0),
    reads: Reads::All,
    cuda: Some("repack"),
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Repacked,
    fused: None,
};

// A tensor enters the interpreter by its values, which are the same.
fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    Ok(vec![eval.value(0)?.clone()])
}
