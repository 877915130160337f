//! What the elementwise ops share: broadcasting, and evaluation of their one expression.

use super::{Eval, OpCall, Pointwise};
use crate::expr::ScalarFn;
use crate::interp::Tensor;
use crate::{Dim, TensorType, Type};

/// The first operand's type; the others must broadcast onto it, and match its element type
/// unless they are constant.
pub(super) fn infer(call: &OpCall<'_>) -> Result<Vec<Type>, String> {
    let a = call.float(0, 1)?;
    for i in 1..call.operands.len() {
        let Some(b) = call.optional(i)? else { continue };
        if !b.dtype.is_float() || (b.dtype != a.dtype && !b.constant) {
            return Err(call.mismatch(i, &format!("element type {}", a.dtype), b));
        }
        if !broadcasts(b, a) {
            return Err(call.mismatch(i, &format!("a shape that broadcasts onto {a}"), b));
        }
    }
    check_expression(call)?;
    Ok(vec![a.clone().into()])
}

/// An expression that was written for this call may name only operands that are there.
fn check_expression(call: &OpCall<'_>) -> Result<(), String> {
    let (Pointwise::Attr(_), Some(expr)) = (call.op.pointwise, call.op.pointwise(call.attrs))
    else {
        return Ok(());
    };
    let given = call.op.operands.iter().zip(call.operands).filter(|(_, t)| t.is_some());
    let names: Vec<&str> = given.map(|(def, _)| def.name).collect();
    ScalarFn::compile(&expr?, &names).map(|_| ()).map_err(|e| e.to_string())
}

fn broadcasts(b: &TensorType, a: &TensorType) -> bool {
    if a.is_ragged() || b.is_ragged() {
        return a.shape == b.shape;
    }
    b.rank() <= a.rank()
        && b.shape
            .iter()
            .rev()
            .zip(a.shape.iter().rev())
            .all(|(x, y)| x == y || *x == Dim::Const(1))
}

/// Index into a broadcast operand of `shape` for element `i` of `onto`.
fn broadcast_index(mut i: usize, onto: &[usize], shape: &[usize]) -> usize {
    let (mut at, mut stride) = (0, 1);
    for (k, &size) in onto.iter().rev().enumerate() {
        let coordinate = i % size;
        i /= size;
        if k < shape.len() {
            let mine = shape[shape.len() - 1 - k];
            at += if mine == 1 { 0 } else { coordinate * stride };
            stride *= mine;
        }
    }
    at
}

/// Applies the op's expression to every element.
pub(super) fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let f = eval.call.op.pointwise_fn(eval.call.attrs).ok_or("not an elementwise op")??;
    let shape = eval.sizes(0)?;
    let mut args = vec![f64::NAN; eval.values.len()];
    let n = shape.iter().product();
    let mut data = Vec::with_capacity(n);
    for i in 0..n {
        for (arg, value) in args.iter_mut().zip(eval.values) {
            if let Some(t) = value {
                *arg = t.data[broadcast_index(i, &shape, &t.shape)];
            }
        }
        data.push(f.eval(&args));
    }
    Ok(vec![Tensor { shape, data }])
}
