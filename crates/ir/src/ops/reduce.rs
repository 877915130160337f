//! `reduce`.

use super::common::{around, const_axis, streaming};
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::Dim;
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "reduce",
    doc: "Reduces a constant axis of x [.., N, ..] to one position, which stays: [.., 1, ..].",
    operands: &[OperandDef::required("x")],
    attrs: &[
        AttrDef {
            name: "by",
            kind: AttrKind::Enum(&["sum", "mean", "max"]),
            default: Default::Required,
            doc: "the operation",
        },
        AttrDef {
            name: "axis",
            kind: AttrKind::Int,
            default: Default::Required,
            doc: "the axis, counted from the outermost",
        },
    ],
    infer: |call| {
        let x = call.float(0, 1)?;
        let axis = call.int("axis") as usize;
        if const_axis(x, axis)? == 0 {
            return Err(format!("axis {axis} of {x} is empty"));
        }
        let mut result = x.clone();
        result.shape[axis] = Dim::Const(1);
        Ok(vec![result.into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| {
        let mut work = streaming(call, results, dims, 0);
        work.flops = call.tensor(0).map_or(0, |t| t.elements(dims));
        work
    },
    reads: Reads::All,
    cuda: Some("reduce"),
    tolerance: Tolerance::REDUCTION,
    memory: super::Memory::Computed,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let x = eval.value(0)?;
    let (outer, n, inner) = around(&x.shape, eval.call.int("axis") as usize);
    let by = eval.call.choice("by");
    let mut data = Vec::with_capacity(outer * inner);
    for o in 0..outer {
        for i in 0..inner {
            let column = (0..n).map(|a| x.data[(o * n + a) * inner + i]);
            data.push(match by {
                "max" => column.fold(f64::NEG_INFINITY, f64::max),
                "mean" => column.sum::<f64>() / n as f64,
                _ => column.sum(),
            });
        }
    }
    Ok(vec![Tensor { shape: eval.sizes(0)?, data }])
}
