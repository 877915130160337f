//! `scan`.

use super::common::streaming;
use super::{Effect, Eval, OpCall, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;
use crate::recurrence::Program;
use crate::{Attr, Dim, Recurrence, StateType, Sym, TensorType, Type};

pub(super) static OP: OpDef = OpDef {
    name: "scan",
    doc: "Runs a recurrence over the tokens of each sequence, one after another: each makes the state, a slot, anew and yields a \
          row [T, ..]. Operands after the state are what the recurrence names, in order: floats [T, ..], or [..] where they \
          do not depend on the token. All is computed in f32. Gives the state's next version and the rows.",
    operands: &[
        OperandDef::required("state"),
        OperandDef::required("a"),
        OperandDef::optional("b"),
        OperandDef::optional("c"),
        OperandDef::optional("d"),
        OperandDef::optional("e"),
        OperandDef::optional("f"),
        OperandDef::optional("g"),
        OperandDef::optional("h"),
        OperandDef::optional("i"),
    ],
    attrs: &[
        AttrDef {
            name: "body",
            kind: AttrKind::Recurrence,
            default: Default::Required,
            doc: "what a token does to the state: see [Recurrences](#recurrences)",
        },
        AttrDef {
            name: "dtype",
            kind: AttrKind::DType,
            default: Default::Absent,
            doc: "the element type of the rows; that of `a` where it is absent",
        },
    ],
    infer: |call| {
        let (state, program) = prepare(call)?;
        let dtype = call.dtype("dtype").unwrap_or(call.float(1, 1)?.dtype);
        if !dtype.is_float() {
            return Err(format!("dtype = {dtype}: expected floats"));
        }
        let result = body(call)?.result();
        let row = result.axes.iter().map(|a| Dim::Const(program.sizes[*a] as u64));
        let shape: Vec<Dim> = [Dim::sym(Sym::T)].into_iter().chain(row).collect();
        Ok(vec![state, TensorType::act(dtype, shape).into()])
    },
    effect: Effect::Writes,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| {
        let mut work = streaming(call, results, dims, 0);
        // It is read and written once for each sequence.
        let state = call.slot(0).map_or(0, StateType::bytes);
        work.bytes =
            work.bytes.saturating_add(state.saturating_mul(2).saturating_mul(dims.seqs.max(1)));
        work.flops = flops(call).saturating_mul(dims.t);
        work
    },
    reads: Reads::All,
    cuda: Some("scan"),
    tolerance: Tolerance::REDUCTION,
    memory: super::Memory::Computed,
    fused: None,
};

fn body<'a>(call: &OpCall<'a>) -> Result<&'a Recurrence, String> {
    match &call.attrs[0] {
        Attr::Recurrence(body) => Ok(body),
        other => Err(format!("attribute `body`: expected a recurrence, found {other}")),
    }
}

/// The state's type, and the loops.
fn prepare(call: &OpCall<'_>) -> Result<(Type, Program), String> {
    let state = call.slot(0)?;
    if !state.dtype.is_float() {
        return Err(format!("operand `state`: expected floats, found {state}"));
    }
    let mut inputs = Vec::new();
    for i in 1..call.operands.len() {
        inputs.extend(call.optional(i)?);
    }
    let given = call.operands.iter().skip(1).take_while(|o| o.is_some()).count();
    if given != inputs.len() {
        return Err("an operand is left out before one that is there".to_owned());
    }
    let program = body(call)?.program(&state.shape, &inputs)?;
    Ok((state.clone().into(), program))
}

fn flops(call: &OpCall<'_>) -> u64 {
    let Ok((_, program)) = prepare(call) else { return 0 };
    let each = program.loops.iter().map(|work| {
        let elements = work.axes.iter().fold(1usize, |n, a| n.saturating_mul(program.sizes[*a]));
        elements.saturating_mul(work.value.code().len() + usize::from(work.sum)) as u64
    });
    each.fold(0, u64::saturating_add)
}

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (_, program) = prepare(&eval.call)?;
    let mut next = eval.value(0)?.clone();
    let inputs: Vec<&Tensor> = eval.values[1..].iter().flatten().copied().collect();
    let mut rows = Tensor { shape: eval.sizes(1)?, data: Vec::new() };
    let mut token = 0;
    for (seq, state) in eval.step.seqs.iter().zip(next.data.chunks_exact_mut(program.state())) {
        for t in token..token + seq.new {
            let own = inputs.iter().zip(&program.inputs).map(|(input, shape)| {
                let from = if shape.per_token { t * shape.elements } else { 0 };
                &input.data[from..from + shape.elements]
            });
            rows.data.extend(program.token(state, &own.collect::<Vec<_>>()));
        }
        token += seq.new;
    }
    Ok(vec![next, rows])
}
