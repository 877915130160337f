//! `table`.

use super::common::free;
use super::{Effect, Eval, OpCall, OpDef, Pointwise, Reads, Tolerance};
use crate::attr::{Attr, AttrDef, AttrKind, Default};
use crate::expr::ScalarFn;
use crate::interp::Tensor;
use crate::{DType, TensorType};

pub(super) static OP: OpDef = OpDef {
    name: "table",
    doc: "A constant f32 [len] whose element `i` is an expression over `i`, evaluated in f64.",
    operands: &[],
    attrs: &[
        AttrDef {
            name: "expr",
            kind: AttrKind::Expr,
            default: Default::Required,
            doc: "scalar expression over `i`",
        },
        AttrDef { name: "len", kind: AttrKind::Int, default: Default::Required, doc: "elements" },
    ],
    infer: |call| {
        compile(call)?;
        let len = call.int("len");
        // A table is computed element by element: keep a bound on what a file may ask for.
        if len > 1 << 20 {
            return Err(format!("a table of {len} elements is too long (at most 2^20)"));
        }
        Ok(vec![TensorType::weight(DType::F32, &[len]).into()])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: free,
    reads: Reads::All,
    cuda: None,
    tolerance: Tolerance::EXACT,
    memory: super::Memory::Computed,
    fused: None,
};

fn compile(call: &OpCall<'_>) -> Result<ScalarFn, String> {
    match &call.attrs[0] {
        Attr::Expr(e) => ScalarFn::compile(e, &["i"]).map_err(|e| e.to_string()),
        other => Err(format!("attribute `expr`: expected an expression, found {other}")),
    }
}

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let f = compile(&eval.call)?;
    let len = eval.call.int("len") as usize;
    // The result is f32 by definition, so it is rounded even where the interpreter is exact.
    let data = (0..len).map(|i| f64::from(f.eval(&[i as f64]) as f32)).collect();
    Ok(vec![Tensor { shape: vec![len], data }])
}
