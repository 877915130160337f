//! `reshape`.

use super::common::free;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;
use crate::{Dim, TensorType};

pub(super) static OP: OpDef = OpDef {
    name: "reshape",
    doc: "The same elements in the same order under another shape: x [..]: [shape].",
    operands: &[OperandDef::required("x")],
    attrs: &[AttrDef {
        name: "shape",
        kind: AttrKind::Dims,
        default: Default::Required,
        doc: "the new shape; its product equals the old one's",
    }],
    infer: |call| {
        let x = call.tensor(0)?;
        let shape = call.dims("shape");
        let result = TensorType { shape: shape.to_vec(), ..x.clone() };
        if x.is_ragged() || result.is_ragged() {
            return Err(format!("a ragged value has no other shape: {x} to {result}"));
        }
        match (Dim::product_of(&x.shape), Dim::product_of(shape)) {
            (Some(a), Some(b)) if a == b => Ok(vec![result.into()]),
            (Some(a), Some(b)) => {
                Err(format!("expected {a} element(s) as in {x}, found {b} in {result}"))
            }
            _ => Err(format!("the number of elements of {x} or {result} is not k·symbol")),
        }
    },
    effect: Effect::View,
    reference,
    pointwise: Pointwise::No,
    work: free,
    reads: Reads::All,
    cuda: None,
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Computed,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    Ok(vec![Tensor { shape: eval.sizes(0)?, data: eval.value(0)?.data.clone() }])
}
