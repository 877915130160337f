//! `gelu`.

use super::common::streaming;
use super::{Effect, OpDef, OperandDef, Pointwise, Reads, Tolerance, pointwise};

pub(super) static OP: OpDef = OpDef {
    name: "gelu",
    doc: "Gaussian error linear unit (Hendrycks & Gimpel 2016), exact: x [..]: [..].",
    operands: &[OperandDef::required("x")],
    attrs: &[],
    infer: pointwise::infer,
    effect: Effect::Pure,
    reference: pointwise::reference,
    pointwise: Pointwise::Fixed("0.5 * x * (1 + erf(x * 0.7071067811865476))"),
    work: |call, results, dims| streaming(call, results, dims, 8),
    reads: Reads::All,
    cuda: Some("pointwise"),
    tolerance: Tolerance::POINTWISE,
    memory: super::Memory::Computed,
    fused: None,
};
