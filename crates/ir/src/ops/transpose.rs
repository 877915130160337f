//! `transpose`.

use super::common::{const_axis, dense, streaming};
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "transpose",
    doc: "Swaps the last two axes of x [.., M, N], which are constant: [.., N, M]. Of a weight it is done once, when \
          it is loaded.",
    operands: &[OperandDef::required("x")],
    attrs: &[],
    infer: |call| {
        let x = call.dense(0, 2)?;
        let rank = x.rank();
        const_axis(x, rank - 1)?;
        const_axis(x, rank - 2)?;
        let mut shape = x.shape.clone();
        shape.swap(rank - 1, rank - 2);
        dense(x.dtype, shape)
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 0),
    reads: Reads::All,
    cuda: Some("transpose"),
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Transposed,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let x = eval.value(0)?;
    let (m, n) = (x.shape[x.shape.len() - 2], x.shape[x.shape.len() - 1]);
    let mut data = Vec::with_capacity(x.data.len());
    for matrix in x.data.chunks((m * n).max(1)) {
        for j in 0..n {
            data.extend((0..m).map(|i| matrix[i * n + j]));
        }
    }
    Ok(vec![Tensor { shape: eval.sizes(0)?, data }])
}
