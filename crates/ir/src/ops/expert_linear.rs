//! `expert_linear`.

use super::common::{dense, dot};
use super::{Effect, Eval, OpCall, OpDef, OperandDef, Pointwise, Reads, Tolerance, Work};
use crate::interp::Tensor;
use crate::{DType, Dim, Dims, Type};

pub(super) static OP: OpDef = OpDef {
    name: "expert_linear",
    doc: "One linear layer an expert: w [E, N, K], ids [T, k]; x [T, K], the same for each of a \
          token's experts, or [T, k, K]; bias [E, N]: [T, k, N]. `order` [T, k] and `starts` [E + 1] are what \
          `group_rows` makes of ids, for kernels that take an expert's rows together: they change \
          no result.",
    operands: &[
        OperandDef::required("x"),
        OperandDef::packed("w"),
        OperandDef::rows("ids", "w"),
        OperandDef::optional("bias"),
        OperandDef::optional("order"),
        OperandDef::optional("starts"),
    ],
    attrs: &[],
    infer: |call| {
        let (x, w, ids) = (call.dense(0, 2)?, call.dense(1, 3)?, call.index(2, 2)?);
        let shared = x.rank() == 2 && x.shape[0] == ids.shape[0];
        let each = x.rank() == 3 && x.shape[..2] == ids.shape[..];
        if w.rank() != 3 || x.shape.last() != w.shape.last() || !(shared || each) {
            return Err(call.mismatch(1, &format!("[E, N, K] for x: {x}, ids: {ids}"), w));
        }
        if let Some(bias) = call.optional(3)?
            && (bias.shape != w.shape[..2] || !bias.dtype.is_float())
        {
            return Err(call.mismatch(3, &format!("[E, N] for w: {w}"), bias));
        }
        grouped(call, 4, &ids.shape, w.shape[0])?;
        dense(x.dtype, [ids.shape[0], ids.shape[1], w.shape[1]])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work,
    reads: Reads::Part { operand: 1, bytes: |call, _, dims| hit_bytes(call, dims) },
    cuda: Some("expert_linear"),
    tolerance: Tolerance::REDUCTION,
    memory: super::Memory::Computed,
    fused: None,
};

/// Whether operands `at` and after it, if they are there, are what [`super::group_rows`] makes of ids of
/// this shape, of so many experts.
fn grouped(call: &OpCall<'_>, at: usize, ids: &[Dim], experts: Dim) -> Result<(), String> {
    let (order, starts) = match (call.optional(at)?, call.optional(at + 1)?) {
        (None, None) => return Ok(()),
        (Some(order), Some(starts)) => (order, starts),
        _ => return Err("`order` and `starts` are given together".to_owned()),
    };
    if order.dtype != DType::U32 || order.shape != ids {
        return Err(call.mismatch(at, "u32, a number for each of `ids`", order));
    }
    let bounds = [Dim::Const(experts.as_const().unwrap_or(0) + 1)];
    if starts.dtype != DType::U32 || starts.shape != bounds {
        return Err(call.mismatch(at + 1, "u32 [E + 1]", starts));
    }
    Ok(())
}

/// The experts that are hit are read once each.
fn work(call: &OpCall<'_>, results: &[Type], dims: &Dims) -> Work {
    let (Ok(w), Ok(out)) = (call.tensor(1), results[0].tensor()) else {
        return Work::default();
    };
    let activations = call.tensor(0).map_or(0, |x| x.bytes(dims)).saturating_add(out.bytes(dims));
    Work {
        bytes: hit_bytes(call, dims).saturating_add(activations),
        flops: out
            .elements(dims)
            .saturating_mul(w.shape.last().map_or(0, |d: &Dim| d.eval(dims)))
            .saturating_mul(2),
    }
}

/// Bytes of the experts' weights that are read. Of `E` experts, `T` tokens that choose `k` different
/// ones each, all equally likely, are expected to hit `E (1 - (1 - k / E)^T)`.
fn hit_bytes(call: &OpCall<'_>, dims: &Dims) -> u64 {
    let (Ok(w), Ok(ids)) = (call.tensor(1), call.tensor(2)) else { return 0 };
    let size = |d: &Dim| d.eval(dims) as f64;
    let (experts, tokens, chosen) = (size(&w.shape[0]), size(&ids.shape[0]), size(&ids.shape[1]));
    let missed = (1.0 - chosen / experts.max(1.0)).max(0.0).powf(tokens);
    (w.bytes(dims) as f64 * (1.0 - missed)).round() as u64
}

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (x, w, ids, bias) = (eval.value(0)?, eval.value(1)?, eval.value(2)?, eval.values[3]);
    let (experts, n, k) = (w.shape[0], w.shape[1], w.shape[2]);
    let per_token = ids.shape[1];
    let shared = x.shape.len() == 2;
    let mut data = Vec::with_capacity(ids.data.len() * n);
    for (slot, &id) in ids.data.iter().enumerate() {
        let expert = id as usize;
        if expert >= experts {
            return Err(format!("expert {expert} of {experts}"));
        }
        let row = if shared { slot / per_token } else { slot };
        let xs = &x.data[row * k..(row + 1) * k];
        for j in 0..n {
            let ws = &w.data[(expert * n + j) * k..][..k];
            let bias = bias.map_or(0.0, |b| b.data[expert * n + j]);
            data.push(dot(xs, ws) + bias);
        }
    }
    Ok(vec![Tensor { shape: eval.sizes(0)?, data }])
}
