//! `expert_slots`.

use super::common::{adapter_of, streaming};
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;
use crate::{DType, Dim, TensorType};

pub(super) static OP: OpDef = OpDef {
    name: "expert_slots",
    doc: "The choices of a step as rows of their own, for `adapt`: of each, where its adapter has the part of its expert, and \
          its token. slots [T] and ids [T, k], of `experts`: u32 [T k] twice. A token's slot s and a choice's expert e give \
          slot (s - 1) `experts` + e + 1, or 0 where s is 0.",
    operands: &[OperandDef::required("slots"), OperandDef::required("ids")],
    attrs: &[AttrDef {
        name: "experts",
        kind: AttrKind::Int,
        default: Default::Required,
        doc: "how many there are to choose from",
    }],
    infer: |call| {
        let (slots, ids, experts) = (call.index(0, 1)?, call.index(1, 2)?, call.int("experts"));
        if ids.shape[0] != slots.shape[0] {
            return Err(call.mismatch(1, &format!("[T, k] with T as in {slots}"), ids));
        }
        if experts == 0 || experts > u64::from(u32::MAX) {
            return Err(format!("{experts} experts"));
        }
        let rows = Dim::product_of(&ids.shape).ok_or_else(|| format!("the size of {ids}"))?;
        let row = TensorType::act(DType::U32, vec![rows]);
        Ok(vec![row.clone().into(), row.into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 1),
    reads: Reads::All,
    cuda: Some("expert_slots"),
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Computed,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (slots, ids) = (eval.value(0)?, eval.value(1)?);
    let experts = eval.call.int("experts");
    let each = ids.shape[1];
    let slot = |(choice, id): (usize, &f64)| {
        // What no expert has counts as the last one, as kernels have it.
        let expert = (*id as u64).min(experts - 1);
        let adapter = adapter_of(slots.data[choice / each.max(1)], usize::MAX)?;
        Ok::<_, String>(adapter.map_or(0.0, |a| (a as u64 * experts + expert + 1) as f64))
    };
    let data = ids.data.iter().enumerate().map(slot).collect::<Result<_, _>>()?;
    let tokens = (0..ids.data.len()).map(|choice| (choice / each.max(1)) as f64).collect();
    Ok(vec![Tensor { shape: eval.sizes(0)?, data }, Tensor { shape: eval.sizes(1)?, data: tokens }])
}
