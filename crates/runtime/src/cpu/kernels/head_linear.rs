//! One linear layer a head.

use infernum_codegen::Arg;

use super::super::simd::{Float, Rounding, Weights};
use super::experts::with_expert;
use super::linear::{Matrix, product};
use super::{Args, Kernel, Operand, Site, act, act_mut, float, parallel};

struct HeadLinear {
    x: Float,
    w: Float,
    heads: usize,
    n: usize,
    k: usize,
}

pub(super) fn head_linear(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    let known = matches!(
        &site.launch.operands[1],
        Some(v) if matches!(v.arg, Arg::Weight(_) | Arg::Buffer(_))
    );
    let types = (site.activation(0), float(site.tensor(1)?.dtype));
    let (heads, n, k) = (site.dim(1, 2)?, site.dim(1, 1)?, site.dim(1, 0)?);
    Ok(match types {
        (Some(x), Some(w)) if known && heads * n * k > 0 => {
            Some(Box::new(HeadLinear { x, w, heads, n, k }))
        }
        _ => None,
    })
}

impl Kernel for HeadLinear {
    /// A product a head, over its rows of all tokens, which are gathered and put back.
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (x, out) = (args.view(0)?.bytes, args.take(0)?);
        let (x_row, y_row) = (self.k * self.x.size(), self.n * self.x.size());
        let tokens = x.len() / (self.heads * x_row);
        // Rounded up, so that both parts are aligned.
        let gathered = (tokens * x_row).next_multiple_of(8);
        for head in 0..self.heads {
            parallel::scratch_bytes(gathered + tokens * y_row, |memory| {
                let (xs, ys) = memory.split_at_mut(gathered);
                let xs = &mut xs[..tokens * x_row];
                let from = x[head * x_row..].chunks(self.heads * x_row);
                for (to, from) in xs.chunks_exact_mut(x_row).zip(from) {
                    to.copy_from_slice(&from[..x_row]);
                }
                self.with_head(args.operands[1], head, |w| {
                    let (x, y) = (act(self.x, xs), act_mut(self.x, ys));
                    product(args.isa, x, tokens, Matrix::Plain(w), None, y, Rounding::None)
                })??;
                let to = out[head * y_row..].chunks_mut(self.heads * y_row);
                for (to, from) in to.zip(ys.chunks_exact(y_row)) {
                    to[..y_row].copy_from_slice(from);
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

impl HeadLinear {
    /// Lends a head's weights, [n, k].
    fn with_head<R>(
        &self,
        w: Option<Operand<'_>>,
        head: usize,
        f: impl FnOnce(&Weights<'_>) -> R,
    ) -> Result<R, String> {
        match w {
            Some(Operand::Weight(w, _)) => with_expert(w, self.w, head, self.n, self.k, f),
            Some(Operand::Tensor(view)) => {
                let bytes = self.n * self.k * self.w.size();
                let part = &view.bytes[head * bytes..(head + 1) * bytes];
                Weights::new(self.w, self.k, &[part]).map(|w| f(&w)).map_err(|e| e.to_string())
            }
            _ => Err("the weights of heads are missing".to_owned()),
        }
    }
}
