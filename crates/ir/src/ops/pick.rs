//! `pick`.

use super::common::{rows_cols, streaming};
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::{Tensor, round};
use crate::picking::{MOST_TOLD, PickRow};
use crate::{DType, Dim, NO_TOKEN, TensorType};

pub(super) static OP: OpDef = OpDef {
    name: "pick",
    doc: "A token for each row of logits `x` [R, V], as its row of the step's `picks` u32 [R, 16] says: bias, \
          penalties and bans change logits, temperature, top-k, top-p and min-p leave some to compete, and \
          noise of seed, position and token decides. `rows` u32 [R] are the rows' places among the step's \
          `ids` u32 [T]: the token there may count among those with penalties. Gives the changed logits \
          [R, V]; the tokens u32 [R], 4294967295 for a row that has a NaN, or no number above -inf; and for \
          rows that want them (0 for others) log-probabilities f32 [R, 1 + top] of the token \
          told of and of the likeliest, and u32 [R, 1 + top] how many are likelier than that token, and the \
          likeliest tokens, the likeliest first, of equals the lower.",
    operands: &[
        OperandDef::required("x"),
        OperandDef::required("ids"),
        OperandDef::rows("rows", "ids"),
        OperandDef::required("picks"),
    ],
    attrs: &[AttrDef {
        name: "top",
        kind: AttrKind::Int,
        default: Default::Int(MOST_TOLD as i64),
        doc: "how many of the likeliest tokens are told of at most",
    }],
    infer: |call| {
        let x = call.dense(0, 2)?;
        if x.rank() != 2 || x.last_const().is_none_or(|n| n == 0) {
            return Err(call.mismatch(0, "[R, V] with a constant V of at least 1", x));
        }
        call.index(1, 1)?;
        let (rows, picks, top) = (call.index(2, 1)?, call.index(3, 2)?, call.int("top"));
        if rows.shape[0] != x.shape[0] {
            return Err(call.mismatch(2, &format!("[{}]", x.shape[0]), rows));
        }
        let record = [x.shape[0], Dim::Const(PickRow::WORDS as u64)];
        if picks.shape != record || picks.dtype != DType::U32 {
            let expected = TensorType::act(DType::U32, record);
            return Err(call.mismatch(3, &expected.to_string(), picks));
        }
        if top > MOST {
            return Err(format!("top = {top}: expected at most {MOST}"));
        }
        let told = |dtype| TensorType::act(dtype, [x.shape[0], Dim::Const(1 + top)]).into();
        let x_edited = TensorType::act(x.dtype, x.shape.clone()).into();
        let picked = TensorType::act(DType::U32, [x.shape[0]]).into();
        Ok(vec![x_edited, picked, told(DType::F32), told(DType::U32)])
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    // Logits are read once, and few of them are written.
    work: |call, results, dims| {
        let mut work = streaming(call, &results[1..], dims, 0);
        work.flops = call.tensor(0).map_or(0, |t| t.elements(dims));
        work
    },
    reads: Reads::All,
    cuda: Some("pick"),
    // Of log-probabilities; whatever the type of the logits, these are f32.
    tolerance: Tolerance { f32: 1e-6, ulps16: 256e-6, code: 0.0 },
    memory: super::Memory::Rowwise,
    fused: None,
};

/// What kernels keep a list of for each part of a row.
const MOST: u64 = 64;

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (x, ids, rows, picks) = (eval.value(0)?, eval.value(1)?, eval.value(2)?, eval.value(3)?);
    let (count, n) = rows_cols(&x.shape);
    let top = eval.call.int("top") as usize;
    let rounded = |value: f32| {
        let mut one = Tensor { shape: vec![1], data: vec![f64::from(value)] };
        round(&mut one, &eval.results[0]);
        one.data[0] as f32
    };
    let mut results: Vec<Tensor> = Vec::with_capacity(4);
    for i in 0..4 {
        results.push(Tensor { shape: eval.sizes(i)?, data: Vec::new() });
    }
    for row in 0..count {
        let mut logits: Vec<f32> = x.data[row * n..][..n].iter().map(|v| *v as f32).collect();
        let words = &picks.data[row * PickRow::WORDS..][..PickRow::WORDS];
        let words: Vec<u32> = words.iter().map(|w| *w as u32).collect();
        let pick = PickRow::from_words(&words);
        let own = *ids.data.get(rows.data[row] as usize).ok_or("a row beyond the tokens")?;
        let (token, told) = eval.step.picks.pick(&pick, own as u32, &mut logits, &rounded);
        results[0].data.extend(logits.iter().map(|v| f64::from(*v)));
        results[1].data.push(f64::from(token.unwrap_or(NO_TOKEN)));
        let (mut values, mut tokens) = (vec![0.0; 1 + top], vec![0.0; 1 + top]);
        if let Some(told) = told {
            values[0] = f64::from(told.logprob);
            tokens[0] = f64::from(told.rank - 1);
            let likeliest = told.top.iter().zip(values[1..].iter_mut().zip(&mut tokens[1..]));
            for ((token, logprob), (value, id)) in likeliest {
                (*value, *id) = (f64::from(*logprob), f64::from(*token));
            }
        }
        results[2].data.extend(values);
        results[3].data.extend(tokens);
    }
    Ok(results)
}
