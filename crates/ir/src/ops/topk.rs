//! `topk`.

use super::common::streaming;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;
use crate::{DType, Dim, TensorType};

pub(super) static OP: OpDef = OpDef {
    name: "topk",
    doc: "The `k` largest of scores [T, E] a token, largest first, ties to the lower index: their \
          scores [T, k] and indices u32 [T, k]. `bias` [E] takes part in the choice only. With \
          groups (DeepSeek-V3), the E experts form `groups` equal groups ranked by the sum of \
          their two best biased scores, and only the best `keep` groups compete.",
    operands: &[OperandDef::required("scores"), OperandDef::optional("bias")],
    attrs: &[
        AttrDef { name: "k", kind: AttrKind::Int, default: Default::Required, doc: "how many" },
        AttrDef {
            name: "groups",
            kind: AttrKind::Int,
            default: Default::Int(1),
            doc: "number of expert groups",
        },
        AttrDef {
            name: "keep",
            kind: AttrKind::Int,
            default: Default::Int(1),
            doc: "groups that compete",
        },
    ],
    infer: |call| {
        let x = call.float(0, 2)?;
        let (k, groups, keep) = (call.int("k"), call.int("groups"), call.int("keep"));
        let experts = x.last_const().filter(|_| x.rank() == 2);
        let experts = experts.ok_or_else(|| call.mismatch(0, "[T, E]", x))?;
        call.channel_weight(1, Dim::Const(experts))?;
        if groups == 0 || experts % groups != 0 || keep == 0 || keep > groups {
            return Err(format!("{keep} of {groups} groups do not divide {experts} experts"));
        }
        if k == 0 || k > experts / groups * keep {
            return Err(format!("k = {k} of {} competing experts", experts / groups * keep));
        }
        let shape = vec![x.shape[0], Dim::Const(k)];
        let ids = TensorType::act(DType::U32, shape.clone());
        Ok(vec![TensorType::act(x.dtype, shape).into(), ids.into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 8),
    reads: Reads::All,
    cuda: Some("topk"),
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Computed,
    fused: None,
};

/// Indices of the `k` largest, largest first, ties to the lower index.
fn largest(values: &[f64], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
    order.truncate(k);
    order
}

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (x, bias) = (eval.value(0)?, eval.values[1]);
    let attr = |name| eval.call.int(name) as usize;
    let (k, groups, keep) = (attr("k"), attr("groups"), attr("keep"));
    let size = x.shape[1] / groups;
    let shape = eval.sizes(0)?;
    let (mut weights, mut ids) = (Vec::new(), Vec::new());
    for row in x.data.chunks(x.shape[1]) {
        let mut choice: Vec<f64> =
            row.iter().enumerate().map(|(e, v)| v + bias.map_or(0.0, |b| b.data[e])).collect();
        if groups > 1 {
            let two_best = |g: &[f64]| largest(g, 2).iter().map(|&i| g[i]).sum::<f64>();
            let ranks: Vec<f64> = choice.chunks(size).map(two_best).collect();
            let kept = largest(&ranks, keep);
            for (e, v) in choice.iter_mut().enumerate() {
                if !kept.contains(&(e / size)) {
                    *v = f64::NEG_INFINITY;
                }
            }
        }
        for e in largest(&choice, k) {
            weights.push(row[e]);
            ids.push(e as f64);
        }
    }
    Ok(vec![Tensor { shape: shape.clone(), data: weights }, Tensor { shape, data: ids }])
}
