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
            let mean = simd::sum_squares(isa, simd::Act::F32(row)) / d as f32;
            let inverse = 1.0 / (mean + self.eps).sqrt();
            match w.as_deref() {
                Some(w) => {
                    for (v, w) in row.iter_mut().zip(w) {
                        *v *= inverse * (w + self.offset);
                    }
                }
                None => simd::scale(isa, row, inverse),
            }
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
