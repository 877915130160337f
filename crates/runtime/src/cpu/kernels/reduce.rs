//! Reduction of one axis.

use infernum_ir::TensorType;

use super::super::simd;
use super::{Args, Float, Kernel, Site, act_mut, around, parallel};

#[derive(Clone, Copy)]
enum By {
    Sum,
    Mean,
    Max,
}

struct Reduce {
    dtype: Float,
    by: By,
    axis: usize,
    x: TensorType,
}

pub(super) fn reduce(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    let Some(dtype) = site.activation(0) else { return Ok(None) };
    let by = match site.choice("by") {
        "sum" => By::Sum,
        "mean" => By::Mean,
        "max" => By::Max,
        other => return Err(format!("attribute `by`: no kernel for {other}")),
    };
    let axis = site.int("axis") as usize;
    Ok(Some(Box::new(Reduce { dtype, by, axis, x: site.tensor(0)?.clone() })))
}

impl Kernel for Reduce {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (x, out, isa) = (args.view(0)?.bytes, args.take(0)?, args.isa);
        let (_, n, inner) = around(&self.x, self.axis, args.dims());
        let size = self.dtype.size();
        parallel::rows(out, inner * size, n * inner, |outer, out| {
            let from = &x[outer * n * inner * size..][..n * inner * size];
            parallel::scratch(0, n * inner, |values| {
                simd::widen_bytes(isa, self.dtype, from, values);
                let first = self.fold(values, n, inner);
                simd::narrow(isa, first, act_mut(self.dtype, out));
            });
        });
        Ok(())
    }
}

impl Reduce {
    /// Reduces `[n, inner]` to its first row.
    fn fold<'a>(&self, values: &'a mut [f32], n: usize, inner: usize) -> &'a [f32] {
        for i in 0..inner {
            let column = values[i..].iter().step_by(inner).copied();
            values[i] = match self.by {
                By::Max => column.fold(f32::NEG_INFINITY, f32::max),
                By::Sum => column.map(f64::from).sum::<f64>() as f32,
                By::Mean => (column.map(f64::from).sum::<f64>() / n as f64) as f32,
            };
        }
        &values[..inner]
    }
}
