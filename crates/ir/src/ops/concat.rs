//! `concat`.

use super::common::{around, const_axis, streaming};
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::Dim;
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "concat",
    doc: "Joins a [.., M, ..] and b [.., N, ..] along a constant axis: [.., M + N, ..]. Encoded weights \
          [M, K] and [N, K] of one encoding are joined along their rows, where groups allow it.",
    operands: &[OperandDef::encoded("a"), OperandDef::encoded("b")],
    attrs: &[AttrDef {
        name: "axis",
        kind: AttrKind::Int,
        default: Default::Required,
        doc: "the axis, counted from the outermost",
    }],
    infer: |call| {
        let (a, b) = (call.tensor(0)?, call.tensor(1)?);
        let axis = call.int("axis") as usize;
        let size = const_axis(a, axis)?.checked_add(const_axis(b, axis)?);
        let mut joined = a.clone();
        joined.shape[axis] = Dim::Const(size.ok_or("sizes overflow")?);
        let mut other = b.shape.clone();
        other[axis] = a.shape[axis];
        if other != a.shape || a.dtype != b.dtype || a.encoding != b.encoding {
            return Err(call.mismatch(1, &format!("{a} but for axis {axis}"), b));
        }
        if let Some(encoding) = &a.encoding {
            match (&a.shape[..], &b.shape[..]) {
                ([Dim::Const(first), Dim::Const(columns)], [Dim::Const(second), _])
                    if axis == 0 && a.constant && b.constant =>
                {
                    encoding.joins(*first, *second, *columns)?;
                }
                _ => return Err(call.mismatch(0, "encoded matrices to be joined by rows", a)),
            }
        }
        Ok(vec![joined.into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 0),
    reads: Reads::All,
    cuda: Some("concat"),
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Concat,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (a, b) = (eval.value(0)?, eval.value(1)?);
    let axis = eval.call.int("axis") as usize;
    let (outer, na, inner) = around(&a.shape, axis);
    let (_, nb, _) = around(&b.shape, axis);
    let mut data = Vec::with_capacity(a.data.len() + b.data.len());
    for o in 0..outer {
        data.extend(&a.data[o * na * inner..(o + 1) * na * inner]);
        data.extend(&b.data[o * nb * inner..(o + 1) * nb * inner]);
    }
    Ok(vec![Tensor { shape: eval.sizes(0)?, data }])
}
