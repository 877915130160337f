//! `argmax`.

use super::common::{rows_cols, streaming};
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::interp::Tensor;
use crate::{DType, TensorType};

pub(super) static OP: OpDef = OpDef {
    name: "argmax",
    doc: "Index of the largest value of each row of `x` [.., N], the first of equals: u32 [..]. A row \
          that has a NaN, or no number above -inf, gives 4294967295, which is no index.",
    operands: &[OperandDef::required("x")],
    attrs: &[],
    infer: |call| {
        let x = call.dense(0, 2)?;
        if x.last_const().is_none_or(|n| n == 0) {
            return Err(call.mismatch(0, "[.., N] with a constant N of at least 1", x));
        }
        Ok(vec![TensorType::act(DType::U32, &x.shape[..x.rank() - 1]).into()])
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
    cuda: Some("argmax"),
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Computed,
    fused: None,
};

/// What stands in the place of an index where there is none: a token that is none.
pub const NO_TOKEN: u32 = u32::MAX;

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let x = eval.value(0)?;
    let (_, n) = rows_cols(&x.shape);
    let largest = |row: &[f64]| {
        let better = |best: (f64, u32), (i, v): (u32, &f64)| {
            if *v > best.0 { (*v, i) } else { best }
        };
        let is_sound = !row.iter().any(|v| v.is_nan());
        let row = (0u32..).zip(row).filter(|_| is_sound);
        f64::from(row.fold((f64::NEG_INFINITY, NO_TOKEN), better).1)
    };
    Ok(vec![Tensor { shape: eval.sizes(0)?, data: x.data.chunks(n).map(largest).collect() }])
}
