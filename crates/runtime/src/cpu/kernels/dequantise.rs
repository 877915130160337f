//! Values of encoded weights: right, and slow. Kernels that use codes are faster.

use infernum_codegen::Arg;

use super::super::simd::{self, Isa};
use super::linear::packed;
use super::{Args, Float, Kernel, Operand, Site, act_mut, float, parallel};

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
        let readers: Vec<_> = (0..).map_while(|i| packed(w, i)).map(|w| w.reader(isa)).collect();
        if !readers.is_empty() {
            let row = |i: usize, n, values: &mut [f32]| readers[i].row(n, values);
            return self.write(readers.len(), UNPACKED, out, isa, row);
        }
        let decoders = w.decoders()?;
        let row = |i: usize, n, values: &mut [f32]| decoders[i].row(n as u64, 0, values);
        self.write(decoders.len(), WORK, out, isa, row)
    }

    fn reads_values(&self, _: usize) -> bool {
        false
    }
}

impl Dequantise {
    /// Writes so many matrices; `row` writes a row of one, at so many multiply-adds a value.
    fn write(
        &self,
        matrices: usize,
        work: usize,
        out: &mut [u8],
        isa: Isa,
        row: impl Fn(usize, usize, &mut [f32]) + Sync,
    ) -> Result<(), String> {
        if matrices * self.n * self.k * self.y.size() != out.len() {
            return Err(format!("{matrices} matrices do not make {} bytes", out.len()));
        }
        parallel::rows(out, self.k * self.y.size(), work * self.k, |i, out| {
            parallel::scratch(0, self.k, |values| {
                row(i / self.n, i % self.n, values);
                simd::narrow(isa, values, act_mut(self.y, out));
            });
        });
        Ok(())
    }
}
