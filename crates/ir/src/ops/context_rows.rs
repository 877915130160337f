//! `context_rows`.

use super::common::free;
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::graph::{Graph, Module, NodeKind};
use crate::interp::Tensor;
use crate::{Dim, Sym, TensorType};

pub(super) static OP: OpDef = OpDef {
    name: NAME,
    doc: "Rows of a step's tokens x [T, ..] as those of its sequences' contexts: [S, ..]. A module that has it computes \
          sequences whole: every one from its first token to its last in one step, without a cache.",
    operands: &[OperandDef::required("x")],
    attrs: &[],
    infer: |call| {
        let x = call.dense(0, 2)?;
        if x.shape[0] != Dim::sym(Sym::T) {
            return Err(call.mismatch(0, "[T, ..]", x));
        }
        let mut shape = x.shape.clone();
        shape[0] = Dim::sym(Sym::S);
        Ok(vec![TensorType::act(x.dtype, shape).into()])
    },
    effect: Effect::View,
    reference,
    pointwise: Pointwise::No,
    work: free,
    reads: Reads::All,
    cuda: None,
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Computed,
    fused: None,
};

const NAME: &str = "context_rows";

/// Whether a module computes sequences whole: each from its first token to its last in one step.
pub fn takes_whole(module: &Module) -> bool {
    let mut nodes = module.graphs.iter().flat_map(Graph::nodes);
    nodes.any(|(_, node)| matches!(&node.kind, NodeKind::Op { op, .. } if op.name == NAME))
}

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    if let Some(seq) = eval.step.seqs.iter().find(|s| s.new != s.context) {
        return Err(format!(
            "expected whole sequences, found {} token(s) of a context of {} row(s)",
            seq.new, seq.context
        ));
    }
    Ok(vec![Tensor { shape: eval.sizes(0)?, data: eval.value(0)?.data.clone() }])
}
