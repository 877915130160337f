//! `rope`.

use super::common::{like_first, streaming};
use super::{Effect, Eval, OpDef, OperandDef, Pointwise, Reads, Tolerance};
use crate::attr::{AttrDef, AttrKind, Default};
use crate::interp::Tensor;

pub(super) static OP: OpDef = OpDef {
    name: "rope",
    doc: "Rotary position embedding (Su et al. 2021) of x [N, H, D]: pair `i` of the first `2R` \
          values turns by `positions[n] * freqs[i]`, and is scaled; freqs [R]. The angle, its sine, \
          its cosine and their products with `scale` are f32 whatever the type of `x`, as in every \
          published implementation.",
    operands: &[
        OperandDef::required("x"),
        OperandDef::required("positions"),
        OperandDef::required("freqs"),
    ],
    attrs: &[
        AttrDef {
            name: "style",
            kind: AttrKind::Enum(&["neox", "interleaved"]),
            default: Default::Enum("neox"),
            doc: "pairs are (i, i + R) in neox, (2i, 2i + 1) in interleaved",
        },
        AttrDef {
            name: "scale",
            kind: AttrKind::Float,
            default: Default::Float(1.0),
            doc: "factor on sine and cosine (YaRN's attention factor)",
        },
    ],
    infer: |call| {
        let (x, positions, freqs) = (call.float(0, 3)?, call.index(1, 1)?, call.float(2, 1)?);
        if x.rank() != 3 || positions.shape[0] != x.shape[0] {
            return Err(call.mismatch(1, &format!("[{}] as in {x}", x.shape[0]), positions));
        }
        let (d, r) = (x.last_const(), freqs.last_const());
        match (d, r) {
            (Some(d), Some(r)) if r.checked_mul(2).is_some_and(|w| w <= d) && freqs.rank() == 1 => {
                like_first(call)
            }
            _ => Err(call.mismatch(2, &format!("[R] with 2R within the last axis of {x}"), freqs)),
        }
    },
    effect: Effect::Pure,
    reference,
    pointwise: Pointwise::No,
    work: |call, results, dims| streaming(call, results, dims, 6),
    reads: Reads::All,
    cuda: Some("rope"),
    tolerance: Tolerance::POINTWISE,
    memory: super::Memory::Rowwise,
    fused: None,
};

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let (x, positions, freqs) = (eval.value(0)?, eval.value(1)?, eval.value(2)?);
    let scale = eval.call.num("scale");
    let interleaved = eval.call.choice("style") == "interleaved";
    let (h, d) = (x.shape[1], x.shape[2]);
    let r = freqs.data.len();
    let mut data = x.data.clone();
    for (n, position) in positions.data.iter().enumerate() {
        for (i, freq) in freqs.data.iter().enumerate() {
            let angle = *position as f32 * *freq as f32;
            let cos = f64::from(f64::from(angle).cos() as f32 * scale as f32);
            let sin = f64::from(f64::from(angle).sin() as f32 * scale as f32);
            let (first, second) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + r) };
            for head in 0..h {
                let row = (n * h + head) * d;
                let (a, b) = (data[row + first], data[row + second]);
                data[row + first] = a * cos - b * sin;
                data[row + second] = b * cos + a * sin;
            }
        }
    }
    Ok(vec![Tensor { shape: x.shape.clone(), data }])
}
