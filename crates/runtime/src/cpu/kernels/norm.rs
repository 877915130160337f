//! Norms over the last dimension.

use super::super::simd;
use super::{Args, Float, Kernel, Site, Source, act, act_mut, parallel};

type Prepared = Result<Option<Box<dyn Kernel>>, String>;

struct RmsNorm {
    dtype: Float,
    d: usize,
    eps: f32,
    offset: f32,
}

pub(super) fn rmsnorm(site: &Site<'_>) -> Prepared {
    let (Some(dtype), true) = (site.activation(0), site.channel(1)) else { return Ok(None) };
    let (Some(d), false) = (site.tensor(0)?.last_const(), site.tensor(0)?.is_ragged()) else {
        return Ok(None);
    };
    let (eps, offset) = (site.num("eps") as f32, site.num("offset") as f32);
    Ok(Some(Box::new(RmsNorm { dtype, d: d as usize, eps, offset })))
}

impl Kernel for RmsNorm {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (d, isa) = (self.d, args.isa);
        let w = args.channel(1)?;
        let (x, out) = (args.source(0)?, args.take(0)?);
        each_row(self.dtype, d, isa, x, out, |row| {
            rms(isa, row, w.as_deref(), self.eps, self.offset);
        });
        Ok(())
    }
}

/// RMSNorm of one row, in place.
pub(super) fn rms(isa: simd::Isa, row: &mut [f32], w: Option<&[f32]>, eps: f32, offset: f32) {
    let mean = simd::sum_squares(isa, simd::Act::F32(row)) / row.len() as f32;
    let inverse = 1.0 / (mean + eps).sqrt();
    match w {
        Some(w) => {
            for (v, w) in row.iter_mut().zip(w) {
                *v *= inverse * (w + offset);
            }
        }
        None => simd::scale(isa, row, inverse),
    }
}

/// A residual's sum and its norm, which is that of the sum before rounding.
struct AddRmsNorm {
    a: Float,
    b: Float,
    d: usize,
    eps: f32,
    offset: f32,
}

pub(super) fn add_rmsnorm(site: &Site<'_>) -> Prepared {
    let (Some(a), Some(b), true) = (site.activation(0), site.activation(1), site.channel(2)) else {
        return Ok(None);
    };
    let same = site.tensor(0)?.shape == site.tensor(1)?.shape;
    let (true, Some(d)) = (same, site.tensor(0)?.last_const()) else { return Ok(None) };
    let (eps, offset) = (site.num("eps") as f32, site.num("offset") as f32);
    Ok(Some(Box::new(AddRmsNorm { a, b, d: d as usize, eps, offset })))
}

impl Kernel for AddRmsNorm {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (d, isa, w) = (self.d, args.isa, args.channel(2)?);
        let (a, b) = (args.source(0)?, args.source(1)?);
        let (sum, normed) = (args.take(0)?, args.take(1)?);
        let (a_row, b_row) = (d * self.a.size(), d * self.b.size());
        parallel::rows_of_two((sum, a_row), (normed, a_row), d, |i, sum, normed| {
            parallel::scratch(0, 2 * d, |memory| {
                let (x, y) = memory.split_at_mut(d);
                let wide = |dtype, from: Source<'_>, row_bytes, out: &mut [f32]| {
                    let bytes = match from {
                        Source::Here => &*sum,
                        Source::There(bytes) => &bytes[i * row_bytes..][..row_bytes],
                    };
                    simd::widen(isa, act(dtype, bytes), out);
                };
                wide(self.a, a, a_row, x);
                wide(self.b, b, b_row, y);
                x.iter_mut().zip(&*y).for_each(|(x, y)| *x += y);
                simd::narrow(isa, x, act_mut(self.a, sum));
                rms(isa, x, w.as_deref(), self.eps, self.offset);
                simd::narrow(isa, x, act_mut(self.a, normed));
            });
        });
        Ok(())
    }
}

struct LayerNorm {
    dtype: Float,
    d: usize,
    eps: f32,
}

pub(super) fn layernorm(site: &Site<'_>) -> Prepared {
    let channels = site.channel(1) && site.channel(2);
    let (Some(dtype), true) = (site.activation(0), channels) else { return Ok(None) };
    let (Some(d), false) = (site.tensor(0)?.last_const(), site.tensor(0)?.is_ragged()) else {
        return Ok(None);
    };
    Ok(Some(Box::new(LayerNorm { dtype, d: d as usize, eps: site.num("eps") as f32 })))
}

impl Kernel for LayerNorm {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (d, isa) = (self.d, args.isa);
        let (w, bias) = (args.channel(1)?, args.channel(2)?);
        let (x, out) = (args.source(0)?, args.take(0)?);
        each_row(self.dtype, d, isa, x, out, |row| {
            let mean = row.iter().map(|v| f64::from(*v)).sum::<f64>() / d as f64;
            for v in row.iter_mut() {
                *v = (f64::from(*v) - mean) as f32;
            }
            let variance = simd::sum_squares(isa, simd::Act::F32(row)) / d as f32;
            let inverse = 1.0 / (variance + self.eps).sqrt();
            for (i, v) in row.iter_mut().enumerate() {
                let scaled = *v * inverse * w.as_deref().map_or(1.0, |w| w[i]);
                *v = scaled + bias.as_deref().map_or(0.0, |b| b[i]);
            }
        });
        Ok(())
    }
}

/// Applies `f` to every row of `d` in f32.
pub(super) fn each_row(
    dtype: Float,
    d: usize,
    isa: simd::Isa,
    x: Source<'_>,
    out: &mut [u8],
    f: impl Fn(&mut [f32]) + Sync,
) {
    let row_bytes = d * dtype.size();
    parallel::rows(out, row_bytes, d, |i, row| {
        parallel::scratch(0, d, |values| {
            simd::widen(isa, act(dtype, x.row(i * row_bytes, row)), values);
            f(values);
            simd::narrow(isa, values, act_mut(dtype, row));
        });
    });
}
