//! `shrink`.

use super::common::{adapter_of, dot, rows_cols};
use super::{Effect, Eval, OpCall, OpDef, OperandDef, Pointwise, Reads, Tolerance, Work};
use crate::interp::Tensor;
use crate::{DType, Dim, Dims, TensorType, Type};

pub(super) static OP: OpDef = OpDef {
    name: "shrink",
    doc: "The first half of `adapt`: `a[s - 1] · x` of each token, whose slot s is not 0, else zeros. x [T, K], a [L, R, K], \
          slots [T]: f32 [T, R].",
    operands: &[
        OperandDef::required("x"),
        OperandDef::required("a"),
        OperandDef::required("slots"),
    ],
    attrs: &[],
    infer: |call| {
        let (x, a, slots) = (call.dense(0, 2)?, call.dense(1, 3)?, call.index(2, 1)?);
        if x.rank() != 2 || x.shape[0] != slots.shape[0] {
            return Err(call.mismatch(0, &format!("[T, K] with T as in {slots}"), x));
        }
        if a.rank() != 3
            || a.shape[2] != x.shape[1]
            || a.shape.iter().any(|d| d.as_const().is_none())
        {
            return Err(call.mismatch(1, &format!("[L, R, K] with K as in {x}"), a));
        }
        let shape = vec![x.shape[0], a.shape[1]];
        Ok(vec![TensorType { dtype: DType::F32, shape, ..x.clone() }.into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work,
    reads: Reads::All,
    cuda: Some("shrink"),
    tolerance: Tolerance::REDUCTION,
    memory: super::Memory::Rowwise,
    fused: None,
};

/// As if each token had another adapter, as far as there are some.
fn work(call: &OpCall<'_>, results: &[Type], dims: &Dims) -> Work {
    let (Ok(low), Ok(x), Ok(a)) = (results[0].tensor(), call.tensor(0), call.tensor(1)) else {
        return Work::default();
    };
    let size = |d: Option<&Dim>| d.map_or(0, |d| d.eval(dims));
    let (tokens, adapters, rank) =
        (size(low.shape.first()), size(a.shape.first()), size(a.shape.get(1)));
    let each = a.bytes(dims) / adapters.max(1);
    let moved = low.bytes(dims).saturating_add(x.bytes(dims));
    Work {
        bytes: each.saturating_mul(tokens.min(adapters)).saturating_add(moved),
        flops: x.elements(dims).saturating_mul(rank).saturating_mul(2),
    }
}

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (x, a, slots) = (eval.value(0)?, eval.value(1)?, eval.value(2)?);
    let (tokens, k) = rows_cols(&x.shape);
    let (adapters, rank) = (a.shape[0], a.shape[1]);
    let mut data = vec![0.0; tokens * rank];
    for token in 0..tokens {
        let Some(adapter) = adapter_of(slots.data[token], adapters)? else { continue };
        let xs = &x.data[token * k..(token + 1) * k];
        for r in 0..rank {
            data[token * rank + r] = dot(xs, &a.data[(adapter * rank + r) * k..][..k]);
        }
    }
    Ok(vec![Tensor { shape: eval.sizes(0)?, data }])
}
