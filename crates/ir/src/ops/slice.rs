//! `slice`.

use super::common::{around, bytes_of, const_axis, streaming};
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::Dim;
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "slice",
    doc: "Takes `len` consecutive positions of a constant axis of x [.., N, ..]: [.., len, ..].",
    operands: &[OperandDef::required("x")],
    attrs: &[
        AttrDef {
            name: "axis",
            kind: AttrKind::Int,
            default: Default::Required,
            doc: "the axis, counted from the outermost",
        },
        AttrDef {
            name: "start",
            kind: AttrKind::Int,
            default: Default::Required,
            doc: "first position taken",
        },
        AttrDef {
            name: "len",
            kind: AttrKind::Int,
            default: Default::Required,
            doc: "positions taken; at least 1",
        },
    ],
    infer: |call| {
        let x = call.tensor(0)?;
        let axis = call.int("axis") as usize;
        let size = const_axis(x, axis)?;
        let (start, len) = (call.int("start"), call.int("len"));
        if len == 0 || start.checked_add(len).is_none_or(|end| end > size) {
            return Err(format!(
                "{len} position(s) from {start} are not within axis {axis} of {x}"
            ));
        }
        let mut result = x.clone();
        result.shape[axis] = Dim::Const(len);
        Ok(vec![result.into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| {
        // Only what is taken is read.
        let mut work = streaming(call, results, dims, 0);
        let taken = results[0].tensor().map_or(0, |t| t.bytes(dims));
        work.bytes = taken.saturating_mul(2);
        work
    },
    reads: Reads::Part { operand: 0, bytes: |_, results, dims| bytes_of(&results[0], dims) },
    cuda: Some("slice"),
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Slice,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let x = eval.value(0)?;
    let (start, len) = (eval.call.int("start") as usize, eval.call.int("len") as usize);
    let (outer, n, inner) = around(&x.shape, eval.call.int("axis") as usize);
    let mut data = Vec::with_capacity(outer * len * inner);
    for o in 0..outer {
        data.extend(&x.data[(o * n + start) * inner..(o * n + start + len) * inner]);
    }
    Ok(vec![Tensor { shape: eval.sizes(0)?, data }])
}
