//! One linear layer an expert.

use infernum_codegen::Arg;

use super::super::simd::{Float, Rounding, Weights};
use super::linear::{Matrix, packed, product};
use super::{Args, Kernel, Operand, Site, act, act_mut, float, parallel};
use crate::exec::weights::Loaded;

struct ExpertLinear {
    x: Float,
    w: Float,
    bias: Option<Float>,
    /// Tokens' rows are shared by their experts.
    shared: bool,
    /// Experts a token.
    each: usize,
    n: usize,
    k: usize,
    rounding: Rounding,
}

pub(super) fn expert_linear(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    prepare(site, Rounding::None)
}

/// `expert_linear_a8(x, w, ids, bias?)`.
pub(super) fn expert_linear_a8(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    prepare(site, Rounding::Eight)
}

fn prepare(site: &Site<'_>, rounding: Rounding) -> Result<Option<Box<dyn Kernel>>, String> {
    let w = site.tensor(1)?;
    let is_weight =
        |i: usize| matches!(&site.launch.operands[i], Some(v) if matches!(v.arg, Arg::Weight(_)));
    let bias = site.optional(3)?.map(|b| float(b.dtype).filter(|_| is_weight(3)));
    let constant = is_weight(1) && bias != Some(None);
    let (Some(x), Some(dtype), true) = (site.activation(0), float(w.dtype), constant) else {
        return Ok(None);
    };
    let (n, k) = (site.dim(1, 1)?, site.dim(1, 0)?);
    if n == 0 || k == 0 {
        return Ok(None);
    }
    let shared = site.tensor(0)?.rank() == 2;
    Ok(Some(Box::new(ExpertLinear {
        x,
        w: dtype,
        bias: bias.flatten(),
        shared,
        each: site.dim(2, 0)?,
        n,
        k,
        rounding,
    })))
}

impl Kernel for ExpertLinear {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (x, ids, out) = (args.view(0)?.bytes, args.ids(2)?, args.take(0)?);
        let Some(Operand::Weight(w, _)) = args.operands[1] else {
            return Err("the experts are missing".to_owned());
        };
        let bias = match args.operands[3] {
            Some(Operand::Weight(bias, _)) => Some(bias),
            _ => None,
        };
        let (x_row, y_row) = (self.k * self.x.size(), self.n * self.x.size());
        let experts = w.shape[0];
        for slot in 0..ids.len() {
            let expert = ids.row(slot, experts)?;
            // Each expert once, at its first slot, for all of its slots: its weights are read
            // once.
            if (0..slot).any(|s| ids.get(s) == expert as i64) {
                continue;
            }
            let hits = || (slot..ids.len()).filter(|s| ids.get(*s) == expert as i64);
            let count = hits().count();
            let row = |slot: usize| if self.shared { slot / self.each } else { slot };
            // Rounded up, so that both parts are aligned.
            let gathered = (count * x_row).next_multiple_of(8);
            parallel::scratch_bytes(gathered + count * y_row, |memory| {
                let (xs, ys) = memory.split_at_mut(gathered);
                let xs = &mut xs[..count * x_row];
                for (to, s) in xs.chunks_exact_mut(x_row).zip(hits()) {
                    to.copy_from_slice(&x[row(s) * x_row..][..x_row]);
                }
                let (rows, y) = (act(self.x, xs), act_mut(self.x, ys));
                let multiply = |w: Matrix<'_>| {
                    let Some((bias, dtype)) = bias.zip(self.bias) else {
                        return product(args.isa, rows, count, w, None, y, self.rounding);
                    };
                    with_expert(bias, dtype, expert, self.n, 1, |b| {
                        product(args.isa, rows, count, w, Some(b), y, self.rounding)
                    })?
                };
                match packed(w, expert) {
                    Some(w) => multiply(Matrix::Packed(w))?,
                    None => with_expert(w, self.w, expert, self.n, self.k, |w| {
                        multiply(Matrix::Plain(w))
                    })??,
                }
                for (from, s) in ys.chunks_exact(y_row).zip(hits()) {
                    out[s * y_row..][..y_row].copy_from_slice(from);
                }
                Ok::<(), String>(())
            })?;
        }
        Ok(())
    }

    fn reads_values(&self, _: usize) -> bool {
        false
    }
}

/// Lends one expert's `[n, k]`.
pub(super) fn with_expert<R>(
    w: &Loaded,
    dtype: Float,
    expert: usize,
    n: usize,
    k: usize,
    f: impl FnOnce(&Weights<'_>) -> R,
) -> Result<R, String> {
    const MOST: usize = 8;
    let bytes = n * k * dtype.size();
    let (from, to) = (expert * bytes, (expert + 1) * bytes);
    let mut parts: [&[u8]; MOST] = [&[]; MOST];
    let (mut count, mut at) = (0, 0);
    for segment in &w.segments {
        let (start, end) = (at, at + segment.len());
        at = end;
        let (lo, hi) = (from.max(start), to.min(end));
        if lo < hi {
            let part = parts.get_mut(count).ok_or("an expert is in too many pieces")?;
            *part = &segment[lo - start..hi - start];
            count += 1;
        }
    }
    Weights::new(dtype, k, &parts[..count]).map(|w| f(&w)).map_err(|e| e.to_string())
}
