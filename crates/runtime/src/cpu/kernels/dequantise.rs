//! Values of encoded weights: right, and slow. Kernels that use codes are faster.

use infernum_codegen::Arg;

use super::super::simd::{self, Isa};
use super::linear::packed;
use super::{Args, Float, Kernel, Operand, Site, act_mut, float, parallel};
use crate::exec::weights::Loaded;

/// What a value costs, in multiply-adds: an expression is walked for each.
const WORK: usize = 64;

/// The same of the packed form.
const UNPACKED: usize = 4;

struct Dequantise {
    y: Float,
    n: usize,
    k: usize,
}

pub(super) fn dequantise(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    let stored = matches!(&site.launch.operands[0], Some(v) if matches!(v.arg, Arg::Weight(_)));
    let result = site.launch.results.first().and_then(|y| float(y.ty.tensor().ok()?.dtype));
    let (true, Some(y)) = (stored, result) else { return Ok(None) };
    Ok(Some(Box::new(Dequantise { y, n: site.dim(0, 1)?, k: site.dim(0, 0)? })))
}

impl Kernel for Dequantise {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let Some(Operand::Weight(w, _)) = args.operands[0] else {
            return Err("the weight is missing".to_owned());
        };
        let (out, isa) = (args.take(0)?, args.isa);
        if packed(w, 0).is_some() {
            return self.unpack(w, out, isa);
        }
        let matrices = w.decoders()?;
        if matrices.len() * self.n * self.k * self.y.size() != out.len() {
            return Err(format!("{} matrices do not make {} bytes", matrices.len(), out.len()));
        }
        parallel::rows(out, self.k * self.y.size(), WORK * self.k, |row, out| {
            parallel::scratch(0, self.k, |values| {
                matrices[row / self.n].row((row % self.n) as u64, 0, values);
                simd::narrow(isa, values, act_mut(self.y, out));
            });
        });
        Ok(())
    }

    fn reads_values(&self, _: usize) -> bool {
        false
    }
}

impl Dequantise {
    /// Of the packed form.
    fn unpack(&self, w: &Loaded, out: &mut [u8], isa: Isa) -> Result<(), String> {
        let matrices: Vec<_> = (0..).map_while(|i| packed(w, i)).collect();
        if matrices.len() * self.n * self.k * self.y.size() != out.len() {
            return Err(format!("{} matrices do not make {} bytes", matrices.len(), out.len()));
        }
        parallel::rows(out, self.k * self.y.size(), UNPACKED * self.k, |row, out| {
            parallel::scratch(0, self.k, |values| {
                matrices[row / self.n].row(row % self.n, values);
                simd::narrow(isa, values, act_mut(self.y, out));
            });
        });
        Ok(())
    }
}
