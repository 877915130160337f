//! `expand`.

use super::common::{adapter_of, dot, rows_cols};
use super::{Effect, Eval, OpCall, OpDef, OperandDef, Pointwise, Reads, Tolerance, Work};
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;
use crate::{DType, Dim, Dims, Type};

pub(super) static OP: OpDef = OpDef {
    name: "expand",
    doc: "The second half of `adapt`: `base + b[s - 1] · low` of each token, whose slot s is not 0, else base. base [T, N], \
          low f32 [T, P], of whose columns those from `from` on are used, b [L, M, R], of whose M rows those from `start` on \
          are used, slots [T]: [T, N].",
    operands: &[
        OperandDef::required("base"),
        OperandDef::required("low"),
        OperandDef::required("b"),
        OperandDef::required("slots"),
    ],
    attrs: &[
        AttrDef {
            name: "start",
            kind: AttrKind::Int,
            default: Default::Int(0),
            doc: "the first of the rows of `b` that are used: base may be a part of the product",
        },
        AttrDef {
            name: "from",
            kind: AttrKind::Int,
            default: Default::Int(0),
            doc: "the first of the columns of `low` that are used: it may be of several products",
        },
    ],
    infer: |call| {
        let (y, low, slots) = (call.dense(0, 2)?, call.dense(1, 2)?, call.index(3, 1)?);
        let b = call.dense(2, 3)?;
        if slots.shape[0] != y.shape[0] || y.rank() != 2 {
            return Err(call.mismatch(0, &format!("[T, N] with T as in {slots}"), y));
        }
        let end = y.last_const().and_then(|n| call.int("start").checked_add(n));
        let holds = |d: &Dim, end: Option<u64>| {
            end.zip(d.as_const()).is_some_and(|(end, rows)| end <= rows)
        };
        if b.rank() != 3
            || b.shape.iter().any(|d| d.as_const().is_none())
            || !holds(&b.shape[1], end)
        {
            let start = call.int("start");
            let expected = format!("[L, M, R] with rows for {y} from {start} on");
            return Err(call.mismatch(2, &expected, b));
        }
        let end = b.last_const().and_then(|r| call.int("from").checked_add(r));
        if low.rank() != 2
            || low.shape[0] != y.shape[0]
            || low.dtype != DType::F32
            || !holds(&low.shape[1], end)
        {
            let expected = format!("f32 [T, P] with T as in {y} and columns for {b}");
            return Err(call.mismatch(1, &expected, low));
        }
        Ok(vec![y.clone().into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work,
    reads: Reads::All,
    cuda: Some("expand"),
    tolerance: Tolerance::REDUCTION,
    memory: super::Memory::Rowwise,
    fused: None,
};

/// As if each token had another adapter, as far as there are some.
fn work(call: &OpCall<'_>, results: &[Type], dims: &Dims) -> Work {
    let (Ok(y), Ok(low), Ok(b)) = (results[0].tensor(), call.tensor(1), call.tensor(2)) else {
        return Work::default();
    };
    let size = |d: Option<&Dim>| d.map_or(0, |d| d.eval(dims));
    let (tokens, adapters, rank) =
        (size(y.shape.first()), size(b.shape.first()), size(b.shape.get(2)));
    let each = b.bytes(dims) / adapters.max(1);
    let moved = y.bytes(dims).saturating_mul(2).saturating_add(low.bytes(dims));
    Work {
        bytes: each.saturating_mul(tokens.min(adapters)).saturating_add(moved),
        flops: y.elements(dims).saturating_mul(rank).saturating_mul(2),
    }
}

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (y, low, b, slots) = (eval.value(0)?, eval.value(1)?, eval.value(2)?, eval.value(3)?);
    let ((tokens, n), columns) = (rows_cols(&y.shape), rows_cols(&low.shape).1);
    let (adapters, rows, rank) = (b.shape[0], b.shape[1], b.shape[2]);
    let (start, from) = (eval.call.int("start") as usize, eval.call.int("from") as usize);
    let mut data = y.data.clone();
    for token in 0..tokens {
        let Some(adapter) = adapter_of(slots.data[token], adapters)? else { continue };
        let low = &low.data[token * columns + from..][..rank];
        for j in 0..n {
            let row = adapter * rows + start + j;
            data[token * n + j] += dot(low, &b.data[row * rank..][..rank]);
        }
    }
    Ok(vec![Tensor { shape: eval.sizes(0)?, data }])
}
