//! The greedy choice.

use infernum_ir::NO_TOKEN;

use super::super::simd;
use super::{Args, Float, Kernel, Site, parallel};
use crate::sampling;

struct Argmax {
    dtype: Float,
    n: usize,
}

pub(super) fn argmax(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    let Some(dtype) = site.activation(0) else { return Ok(None) };
    Ok(Some(Box::new(Argmax { dtype, n: site.dim(0, 0)? })))
}

impl Kernel for Argmax {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (x, out, isa) = (args.view(0)?.bytes, args.take(0)?, args.isa);
        let row = self.n * self.dtype.size();
        parallel::rows(out, size_of::<u32>(), self.n, |i, out| {
            parallel::scratch(0, self.n, |values| {
                simd::widen_bytes(isa, self.dtype, &x[i * row..][..row], values);
                let token = sampling::argmax(values).unwrap_or(NO_TOKEN);
                out.copy_from_slice(&token.to_ne_bytes());
            });
        });
        Ok(())
    }
}
