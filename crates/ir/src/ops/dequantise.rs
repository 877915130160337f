//! `dequantise`.

use super::common::streaming;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::TensorType;
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "dequantise",
    doc: "The values of an encoded weight [.., N, K] as floats, computed in each step: [.., N, K].",
    operands: &[OperandDef::encoded("w")],
    attrs: &[AttrDef {
        name: "dtype",
        kind: AttrKind::DType,
        default: Default::Required,
        doc: "the element type of the result; a float",
    }],
    infer: |call| {
        let w = call.tensor(0)?;
        if w.encoding.is_none() {
            return Err(call.mismatch(0, "an encoded weight", w));
        }
        let dtype = call.dtype("dtype").filter(|d| d.is_float());
        let dtype = dtype.ok_or("attribute `dtype`: expected a float type")?;
        Ok(vec![TensorType { dtype, encoding: None, ..w.clone() }.into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 2),
    reads: Reads::All,
    cuda: Some("dequantise"),
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Decoded,
    fused: None,
};

// A tensor enters the interpreter by its values: what is stored is decoded on the way in.
fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    Ok(vec![eval.value(0)?.clone()])
}
