//! `map`.

use super::common::streaming;
use super::{Effect, OpDef, OperandDef, Pointwise, Reads, Tolerance, pointwise};
use crate::attr::{AttrDef, AttrKind, Default};

pub(super) static OP: OpDef = OpDef {
    name: "map",
    doc: "Any elementwise function of up to three operands: a [..], b and c, which broadcast onto `a`: [..].",
    operands: &[OperandDef::required("a"), OperandDef::optional("b"), OperandDef::optional("c")],
    attrs: &[AttrDef {
        name: "expr",
        kind: AttrKind::Expr,
        default: Default::Required,
        doc: "scalar expression over `a`, `b`, `c`",
    }],
    infer: pointwise::infer,
    effect: Effect::Pure,
    reference: pointwise::reference,
    pointwise: Pointwise::Attr("expr"),
    work: |call, results, dims| streaming(call, results, dims, 4),
    reads: Reads::All,
    cuda: Some("pointwise"),
    tolerance: Tolerance::POINTWISE,
    memory: super::Memory::Computed,
    fused: None,
};
