//! `adapt`.

use super::common::{adapter_of, dot, rows_cols};
use super::{Effect, Eval, OpCall, OpDef, OperandDef, Pointwise, Reads, Tolerance, Work};
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;
use crate::{Dim, Dims, Type};

pub(super) static OP: OpDef = OpDef {
    name: "adapt",
    doc: "The low-rank part of an adapted product (Hu et al. 2021), each token with its own adapter: `base + b[s - 1] · \
          (a[s - 1] · x)` where its slot s is not 0, else base. base [T, N], x [T, K], a [L, R, K], b [L, M, R], of whose M rows \
          those from `start` on are used, slots [T]: [T, N]. Scales are in b.",
    operands: &[
        OperandDef::required("base"),
        OperandDef::required("x"),
        OperandDef::required("a"),
        OperandDef::required("b"),
        OperandDef::required("slots"),
    ],
    attrs: &[AttrDef {
        name: "start",
        kind: AttrKind::Int,
        default: Default::Int(0),
        doc: "the first of the rows of `b` that are used: base may be a part of the product",
    }],
    infer: |call| {
        let (y, x, slots) = (call.dense(0, 2)?, call.dense(1, 2)?, call.index(4, 1)?);
        let (a, b) = (call.dense(2, 3)?, call.dense(3, 3)?);
        if slots.shape[0] != y.shape[0] || y.rank() != 2 {
            return Err(call.mismatch(0, &format!("[T, N] with T as in {slots}"), y));
        }
        if x.rank() != 2 || x.shape[0] != y.shape[0] {
            return Err(call.mismatch(1, &format!("[T, K] with T as in {y}"), x));
        }
        if a.rank() != 3
            || a.shape[2] != x.shape[1]
            || a.shape.iter().any(|d| d.as_const().is_none())
        {
            return Err(call.mismatch(2, &format!("[L, R, K] with K as in {x}"), a));
        }
        let end = y.last_const().and_then(|n| call.int("start").checked_add(n));
        let holds = |d: &Dim| end.zip(d.as_const()).is_some_and(|(end, rows)| end <= rows);
        if b.rank() != 3
            || b.shape[0] != a.shape[0]
            || b.shape[2] != a.shape[1]
            || !holds(&b.shape[1])
        {
            let start = call.int("start");
            let expected =
                format!("[L, M, R] with L and R as in {a} and rows for {y} from {start} on");
            return Err(call.mismatch(3, &expected, b));
        }
        Ok(vec![y.clone().into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work,
    reads: Reads::All,
    cuda: Some("adapt"),
    tolerance: Tolerance::REDUCTION,
    memory: super::Memory::Rowwise,
    fused: None,
};

/// As if each token had another adapter, as far as there are some.
fn work(call: &OpCall<'_>, results: &[Type], dims: &Dims) -> Work {
    let (Ok(y), Ok(x), Ok(a), Ok(b)) =
        (results[0].tensor(), call.tensor(1), call.tensor(2), call.tensor(3))
    else {
        return Work::default();
    };
    let size = |d: Option<&Dim>| d.map_or(0, |d| d.eval(dims));
    let (tokens, adapters, rank) =
        (size(y.shape.first()), size(a.shape.first()), size(a.shape.get(1)));
    let each = (a.bytes(dims) + b.bytes(dims)) / adapters.max(1);
    let moved = y.bytes(dims).saturating_mul(2).saturating_add(x.bytes(dims));
    let elements = x.elements(dims).saturating_add(y.elements(dims));
    Work {
        bytes: each.saturating_mul(tokens.min(adapters)).saturating_add(moved),
        flops: elements.saturating_mul(rank).saturating_mul(2),
    }
}

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (y, x, slots) = (eval.value(0)?, eval.value(1)?, eval.value(4)?);
    let (a, b) = (eval.value(2)?, eval.value(3)?);
    let ((tokens, k), n) = (rows_cols(&x.shape), rows_cols(&y.shape).1);
    let (adapters, rank, rows) = (a.shape[0], a.shape[1], b.shape[1]);
    let start = eval.call.int("start") as usize;
    let mut data = y.data.clone();
    for token in 0..tokens {
        let Some(adapter) = adapter_of(slots.data[token], adapters)? else { continue };
        let xs = &x.data[token * k..(token + 1) * k];
        let low: Vec<f64> =
            (0..rank).map(|r| dot(xs, &a.data[(adapter * rank + r) * k..][..k])).collect();
        for j in 0..n {
            let row = adapter * rows + start + j;
            data[token * n + j] += dot(&low, &b.data[row * rank..][..rank]);
        }
    }
    Ok(vec![Tensor { shape: eval.sizes(0)?, data }])
}
