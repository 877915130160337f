//! `quantise_rows`.

use super::common::{rows_cols, streaming};
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::TensorType;
use crate::encoding::quantised_rows::{GROUP, quantise_group, quantised_rows, value};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "quantise_rows",
    doc: "x [T, K] as products of 8-bit floats take it: `f8e4m3`, of which each 128 columns of a row share a scale, so that \
          their largest magnitude is 448. With a NaN or an infinity a group is NaN.",
    operands: &[OperandDef::required("x")],
    attrs: &[],
    infer: |call| {
        let x = call.dense(0, 2)?;
        if x.rank() != 2 || x.last_const().is_none_or(|k| k % GROUP as u64 != 0) {
            let expected = format!("rows of a whole number of {GROUP} columns");
            return Err(call.mismatch(0, &expected, x));
        }
        let encoding = Some(quantised_rows().clone());
        Ok(vec![TensorType { encoding, ..TensorType::act(x.dtype, x.shape.clone()) }.into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 4),
    reads: Reads::All,
    cuda: Some("quantise_rows"),
    // Two neighbours of three bits of mantissa are at most an eighth apart.
    tolerance: Tolerance { code: 0.125, ..Tolerance::EXACT },
    // Of a weight it would be one that is stored so.
    memory: super::Memory::Decoded,
    fused: None,
};

// Its values are those that codes and scales stand for.
fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let mut x = eval.value(0)?.clone();
    let (_, k) = rows_cols(&x.shape);
    for group in x.data.chunks_mut(k.max(1)).flat_map(|row| row.chunks_mut(GROUP)) {
        let values: Vec<f32> = group.iter().map(|x| *x as f32).collect();
        let (codes, scale) = quantise_group(&values);
        for (x, code) in group.iter_mut().zip(codes) {
            *x = f64::from(value(code, scale));
        }
    }
    Ok(vec![x])
}
