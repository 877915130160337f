//! A norm, a linear layer and a gate in one launch: what lies between stays in scratch memory, in
//! f32 once it is summed.

use infernum_codegen::Arg;

use super::super::simd::{self, ActMut, Rounding};
use super::linear::{product, with_matrix, with_rows};
use super::norm::{each_row, rms};
use super::{Args, Float, Ids, Kernel, Site, Source, act, act_mut, float, math, parallel};

type Prepared = Result<Option<Box<dyn Kernel>>, String>;

/// What is done to the two halves of a product's row.
type Gate = fn(gate: &mut [f32], up: &[f32]);

struct Chain {
    /// Operand that picks rows of x.
    rows: Option<usize>,
    /// Operand that is the norm's weight, and whether there is a norm.
    norm: Option<(usize, f32, f32)>,
    /// Operand that is w; a bias follows.
    w: usize,
    gate: Option<Gate>,
    x: Float,
    weight: Float,
    bias: Option<Float>,
    y: Float,
    n: usize,
    k: usize,
}

/// `norm_linear(x, norm?, w, bias?)`.
pub(super) fn norm_linear(site: &Site<'_>) -> Prepared {
    prepare(site, None, Some(1), 2, None)
}

/// `gather_norm_linear(x, rows, norm?, w, bias?)`.
pub(super) fn gather_norm_linear(site: &Site<'_>) -> Prepared {
    prepare(site, Some(1), Some(2), 3, None)
}

/// `linear_swiglu(x, w, bias?)`.
pub(super) fn linear_swiglu(site: &Site<'_>) -> Prepared {
    prepare(site, None, None, 1, Some(swiglu))
}

/// `linear_geglu(x, w, bias?)`.
pub(super) fn linear_geglu(site: &Site<'_>) -> Prepared {
    prepare(site, None, None, 1, Some(geglu))
}

/// `norm_linear_swiglu(x, norm?, w, bias?)`.
pub(super) fn norm_linear_swiglu(site: &Site<'_>) -> Prepared {
    prepare(site, None, Some(1), 2, Some(swiglu))
}

/// `norm_linear_geglu(x, norm?, w, bias?)`.
pub(super) fn norm_linear_geglu(site: &Site<'_>) -> Prepared {
    prepare(site, None, Some(1), 2, Some(geglu))
}

fn swiglu(gate: &mut [f32], up: &[f32]) {
    gate.iter_mut().zip(up).for_each(|(g, u)| *g = *g / (1.0 + math::exp(-*g)) * u);
}

fn geglu(gate: &mut [f32], up: &[f32]) {
    gate.iter_mut().zip(up).for_each(|(g, u)| *g = math::gelu_tanh(*g) * u);
}

fn prepare(
    site: &Site<'_>,
    rows: Option<usize>,
    norm: Option<usize>,
    w: usize,
    gate: Option<Gate>,
) -> Prepared {
    let (n, k) = (site.dim(w, 1)?, site.dim(w, 0)?);
    let bias = site.optional(w + 1)?.map(|b| float(b.dtype));
    let in_arena = |i: usize| {
        let value = site.launch.operands.get(i).and_then(Option::as_ref);
        value.is_none_or(|v| matches!(v.arg, Arg::Buffer(_) | Arg::Weight(_)))
    };
    let known = in_arena(w) && in_arena(w + 1) && norm.is_none_or(|i| site.channel(i));
    let types = (site.activation(0), float(site.tensor(w)?.dtype), site.result(0));
    let (Some(x), Some(weight), Some(y)) = types else { return Ok(None) };
    if !known || bias == Some(None) || n == 0 || k == 0 {
        return Ok(None);
    }
    let norm = norm.map(|i| (i, site.num("eps") as f32, site.num("offset") as f32));
    Ok(Some(Box::new(Chain { rows, norm, w, gate, x, weight, bias: bias.flatten(), y, n, k })))
}

impl Kernel for Chain {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (x, out) = (args.view(0)?.bytes, args.take(0)?);
        let Some(rows) = self.rows else { return self.normed(args, x, out) };
        let (row, ids) = (self.k * self.x.size(), args.ids(rows)?);
        with_picked(x, row, ids, |x| self.normed(args, x, out))?
    }

    fn reads_values(&self, operand: usize) -> bool {
        self.norm.is_some_and(|(i, ..)| i == operand)
    }
}

/// Lends the rows `ids` of x.
fn with_picked<R>(
    x: &[u8],
    row: usize,
    ids: Ids<'_>,
    f: impl FnOnce(&[u8]) -> R,
) -> Result<R, String> {
    parallel::scratch_bytes(ids.len() * row, |picked| {
        for (i, to) in picked.chunks_exact_mut(row).enumerate() {
            to.copy_from_slice(&x[ids.row(i, x.len() / row)? * row..][..row]);
        }
        Ok(f(picked))
    })
}

impl Chain {
    fn normed(&self, args: &Args<'_>, x: &[u8], out: &mut [u8]) -> Result<(), String> {
        let Some((operand, eps, offset)) = self.norm else { return self.product(args, x, out) };
        let w = args.channel(operand)?;
        // In x's type, which is what products are fast in.
        parallel::inner_scratch_bytes(x.len(), |normed| {
            each_row(self.x, self.k, args.isa, Source::There(x), normed, |row| {
                rms(args.isa, row, w.as_deref(), eps, offset);
            });
            self.product(args, normed, out)
        })
    }

    fn product(&self, args: &Args<'_>, x: &[u8], out: &mut [u8]) -> Result<(), String> {
        let (isa, t) = (args.isa, x.len() / (self.k * self.x.size()));
        let run = |y: ActMut<'_>| {
            let x = act(self.x, x);
            with_matrix(args.operands[self.w], self.weight, self.k, |w| match self.bias {
                None => product(isa, x, t, w, None, y, Rounding::None),
                Some(dtype) => with_rows(args.operands[self.w + 1], dtype, 1, |bias| {
                    product(isa, x, t, w, Some(bias), y, Rounding::None)
                })?,
            })?
        };
        let Some(gate) = self.gate else { return run(act_mut(self.y, out)) };
        let (n, half) = (self.n, self.n / 2);
        parallel::scratch(1, t * n, |sums| {
            run(ActMut::F32(sums))?;
            let sums = &*sums;
            parallel::rows(out, half * self.y.size(), 16 * half, |i, out| {
                parallel::scratch(0, half, |gated| {
                    let (g, u) = sums[i * n..(i + 1) * n].split_at(half);
                    gated.copy_from_slice(g);
                    gate(gated, u);
                    simd::narrow(isa, gated, act_mut(self.y, out));
                });
            });
            Ok(())
        })
    }
}
