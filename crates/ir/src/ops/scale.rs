//! `scale`.

use super::common::streaming;
use super::{Effect, OpDef, OperandDef, Pointwise, Reads, Tolerance, pointwise};
use crate::attr::{AttrDef, AttrKind, Default};

pub(super) static OP: OpDef = OpDef {
    name: "scale",
    doc: "Multiplies x [..] by a number: [..].",
    operands: &[OperandDef::required("x")],
    attrs: &[AttrDef {
        name: "by",
        kind: AttrKind::Float,
        default: Default::Required,
        doc: "the factor",
    }],
    infer: pointwise::infer,
    effect: Effect::Pure,
    reference: pointwise::reference,
    pointwise: Pointwise::Fixed("x * by"),
    work: |call, results, dims| streaming(call, results, dims, 1),
    reads: Reads::All,
    cuda: Some("pointwise"),
    tolerance: Tolerance::POINTWISE,
    memory: super::Memory::Computed,
    fused: None,
};
