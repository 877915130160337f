//! `softcap`.

use super::common::streaming;
use super::{Effect, OpDef, OperandDef, Pointwise, Reads, Tolerance, pointwise};
use crate::attr::{AttrDef, AttrKind, Default};

pub(super) static OP: OpDef = OpDef {
    name: "softcap",
    doc: "Soft capping (Gemma 2), `cap * tanh(x / cap)`: x [..]: [..].",
    operands: &[OperandDef::required("x")],
    attrs: &[AttrDef {
        name: "cap",
        kind: AttrKind::Float,
        default: Default::Required,
        doc: "the bound; not zero",
    }],
    infer: |call| {
        if call.num("cap") == 0.0 {
            return Err("attribute `cap`: expected a number that is not zero, found 0".to_owned());
        }
        pointwise::infer(call)
    },
    effect: Effect::Pure,
    reference: pointwise::reference,
    pointwise: Pointwise::Fixed("cap * tanh(x / cap)"),
    work: |call, results, dims| streaming(call, results, dims, 6),
    reads: Reads::All,
    cuda: Some("pointwise"),
    tolerance: Tolerance::POINTWISE,
    memory: super::Memory::Computed,
    fused: None,
};
