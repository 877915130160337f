//! `round_groups`.

use super::common::{rows_cols, streaming};
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;
use crate::{DType, TensorType};

pub(super) static OP: OpDef = OpDef {
    name: "round_groups",
    doc: "x [.., K] rounded to 8 bits, in f32: in each `group` of columns to whole multiples of a 127th of the largest \
          magnitude, ties to even. What products of whole numbers make of activations. A NaN makes its whole group NaN.",
    operands: &[OperandDef::required("x")],
    attrs: &[AttrDef {
        name: "group",
        kind: AttrKind::Int,
        default: Default::Required,
        doc: "columns that share a scale; the last ones may be fewer",
    }],
    infer: |call| {
        let x = call.dense(0, 1)?;
        if call.int("group") == 0 {
            return Err("attribute `group`: expected at least 1, found 0".to_owned());
        }
        Ok(vec![TensorType::act(DType::F32, x.shape.clone()).into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 4),
    reads: Reads::All,
    cuda: None,
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Computed,
    fused: None,
};

// In f32, operation by operation as kernels do it: which of two neighbours a value becomes must not hang on the last
// bit of a scale.
fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let mut x = eval.value(0)?.clone();
    let group = usize::try_from(eval.call.int("group")).unwrap_or(usize::MAX);
    let (_, k) = rows_cols(&x.shape);
    for group in x.data.chunks_mut(k.max(1)).flat_map(|row| row.chunks_mut(group)) {
        let most = group.iter().fold(0.0, |most: f32, x| most.max(x.abs() as f32));
        // One NaN makes the whole group NaN, and what is too small for a scale with an inverse is zero.
        let scale = if group.iter().any(|x| x.is_nan()) { f32::NAN } else { most / 127.0 };
        let inverse = Some(1.0 / scale).filter(|inverse| inverse.is_finite()).unwrap_or(0.0);
        for x in group {
            *x = f64::from((*x as f32 * inverse).round_ties_even() * scale);
        }
    }
    Ok(vec![x])
}
