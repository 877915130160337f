//! `silu`.

use super::common::streaming;
use super::{Effect, OpDef, OperandDef, Pointwise, Reads, Tolerance, pointwise};

pub(super) static OP: OpDef = OpDef {
    name: "silu",
    doc: "Sigmoid-weighted linear unit (Elfwing et al. 2017), `x * sigmoid(x)`: x [..]: [..].",
    operands: &[OperandDef::required("x")],
    attrs: &[],
    infer: pointwise::infer,
    effect: Effect::Pure,
    reference: pointwise::reference,
    pointwise: Pointwise::Fixed("x / (1 + exp(-x))"),
    work: |call, results, dims| streaming(call, results, dims, 4),
    reads: Reads::All,
    cuda: Some("pointwise"),
    tolerance: Tolerance::POINTWISE,
    memory: super::Memory::Computed,
    fused: None,
};
