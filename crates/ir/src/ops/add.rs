//! `add`.

use super::common::streaming;
use super::{Effect, OpDef, OperandDef, Pointwise, Reads, Tolerance, pointwise};

pub(super) static OP: OpDef = OpDef {
    name: "add",
    doc: "Elementwise `a + b`: a [..], b [..], which broadcasts onto `a`: [..].",
    operands: &[OperandDef::required("a"), OperandDef::required("b")],
    attrs: &[],
    infer: pointwise::infer,
    effect: Effect::Pure,
    reference: pointwise::reference,
    pointwise: Pointwise::Fixed("a + b"),
    work: |call, results, dims| streaming(call, results, dims, 1),
    reads: Reads::All,
    cuda: Some("pointwise"),
    tolerance: Tolerance::POINTWISE,
    memory: super::Memory::Computed,
    fused: None,
};
