//! `group_rows`.

use super::common::streaming;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;
use crate::{DType, Dim, TensorType};

pub(super) static OP: OpDef = OpDef {
    name: "group_rows",
    doc: "Sorts the choices of a step by what was chosen (a counting sort, which keeps the order of equal \
          ones): of ids [T, k] the numbers of all T k choices, those of choice 0 first, u32 [T, k]; \
          and where each choice's begin among them, then their count, u32 [groups + 1].",
    operands: &[OperandDef::required("ids")],
    attrs: &[AttrDef {
        name: "groups",
        kind: AttrKind::Int,
        default: Default::Required,
        doc: "how many there are to choose from",
    }],
    infer: |call| {
        let (ids, groups) = (call.index(0, 2)?, call.int("groups"));
        if groups == 0 || groups > u64::from(u32::MAX) {
            return Err(format!("{groups} groups"));
        }
        let starts = TensorType::act(DType::U32, vec![Dim::Const(groups + 1)]);
        Ok(vec![TensorType::act(DType::U32, ids.shape.clone()).into(), starts.into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 4),
    reads: Reads::All,
    cuda: Some("group_rows"),
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Computed,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (ids, groups) = (eval.value(0)?, eval.call.int("groups") as usize);
    let mut order: Vec<usize> = (0..ids.data.len()).collect();
    // What no group has counts as the last one, as kernels have it.
    let group = |i: &usize| (ids.data[*i] as usize).min(groups - 1);
    order.sort_by_key(group);
    let below = |g: usize| order.partition_point(|i| group(i) < g) as f64;
    let starts = (0..=groups).map(below).collect();
    let order = order.iter().map(|i| *i as f64).collect();
    Ok(vec![
        Tensor { shape: eval.sizes(0)?, data: order },
        Tensor { shape: eval.sizes(1)?, data: starts },
    ])
}
