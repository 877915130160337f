//! `dequantise`.

use super::common::streaming;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::TensorType;
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "dequantise",
    doc: "The values of a block-quantised weight [.., K] as floats: [.., K].",
    operands: &[OperandDef::required("w")],
    attrs: &[AttrDef {
        name: "dtype",
        kind: AttrKind::DType,
        default: Default::Required,
        doc: "the element type of the result; a float",
    }],
    infer: |call| {
        let w = call.tensor(0)?;
        let (block, _) = w.dtype.block();
        if !w.dtype.is_quantised() || w.last_const().is_none_or(|k| k % block != 0) {
            return Err(call.mismatch(0, "a block-quantised weight of whole blocks", w));
        }
        let dtype = call.dtype("dtype").filter(|d| d.is_float());
        let dtype = dtype.ok_or("attribute `dtype`: expected a float type")?;
        Ok(vec![TensorType { dtype, ..w.clone() }.into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 2),
    reads: Reads::All,
    cuda: Some("dequantise"),
    tolerance: Tolerance::POINTWISE,
    memory: super::Memory::Computed,
    fused: None,
};

// A tensor enters the interpreter by its values, so the blocks are decoded on the way in.
fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    Ok(vec![eval.value(0)?.clone()])
}
