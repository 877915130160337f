//! `cast`.

use super::common::streaming;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;
use crate::{DType, TensorType};

pub(super) static OP: OpDef = OpDef {
    name: "cast",
    doc: "Converts x [..], floats or integers such as positions, to another element type, rounding to nearest even: \
          [..].",
    operands: &[OperandDef::required("x")],
    attrs: &[AttrDef {
        name: "dtype",
        kind: AttrKind::DType,
        default: Default::Required,
        doc: "the element type of the result; a float",
    }],
    infer: |call| {
        let x = match call.tensor(0)? {
            x if matches!(x.dtype, DType::I32 | DType::U32) && !x.shape.is_empty() => x,
            _ => call.float(0, 1)?,
        };
        let dtype = call.dtype("dtype").filter(|d| d.is_float());
        let dtype = dtype.ok_or("attribute `dtype`: expected a float type")?;
        Ok(vec![TensorType { dtype, ..x.clone() }.into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 0),
    reads: Reads::All,
    cuda: Some("cast"),
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Converted,
    fused: None,
};

// The interpreter rounds results to their type where it is asked to round at all.
fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    Ok(vec![eval.value(0)?.clone()])
}
