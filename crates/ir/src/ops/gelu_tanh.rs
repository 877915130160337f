//! `gelu_tanh`.

use super::common::streaming;
use super::{Effect, OpDef, OperandDef, Pointwise, Reads, Tolerance, pointwise};

pub(super) static OP: OpDef = OpDef {
    name: "gelu_tanh",
    doc: "Gaussian error linear unit in its tanh approximation: x [..]: [..].",
    operands: &[OperandDef::required("x")],
    attrs: &[],
    infer: pointwise::infer,
    effect: Effect::Pure,
    reference: pointwise::reference,
    pointwise: Pointwise::Fixed(
        "0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))",
    ),
    work: |call, results, dims| streaming(call, results, dims, 10),
    reads: Reads::All,
    cuda: Some("pointwise"),
    tolerance: Tolerance::POINTWISE,
    memory: super::Memory::Computed,
    fused: None,
};
