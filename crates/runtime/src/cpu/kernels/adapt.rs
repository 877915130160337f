//! The low-rank part of an adapted product.

use super::super::simd::{self, Float};
use super::{Args, Kernel, Operand, Site, Source, act_mut, float, parallel};

struct Adapt {
    x: Float,
    y: Float,
    /// Of both banks.
    bank: Float,
    rank: usize,
    k: usize,
    n: usize,
    /// Rows of b, and the first that is used.
    rows: usize,
    start: usize,
}

pub(super) fn adapt(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    let (a, b) = (float(site.tensor(2)?.dtype), float(site.tensor(3)?.dtype));
    let (Some(x), Some(y), Some(bank), true) = (site.activation(1), site.activation(0), a, a == b)
    else {
        return Ok(None);
    };
    let (rank, k, n, rows) = (site.dim(2, 1)?, site.dim(2, 0)?, site.dim(0, 0)?, site.dim(3, 1)?);
    let start = site.int("start") as usize;
    Ok(Some(Box::new(Adapt { x, y, bank, rank, k, n, rows, start })))
}

impl Kernel for Adapt {
    /// A token's x by its adapter's a, in f32; that by b, onto the token's y, which is rounded once. Of a bank the rows of an
    /// adapter are a piece of their own, since they come together.
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (isa, x, slots, from) = (args.isa, args.view(1)?.bytes, args.ids(4)?, args.source(0)?);
        let (Some(Operand::Weight(a, _)), Some(Operand::Weight(b, _))) =
            (args.operands[2], args.operands[3])
        else {
            return Err("the banks are missing".to_owned());
        };
        let Adapt { rank, k, n, .. } = *self;
        let adapters = a.shape.first().copied().unwrap_or(0);
        for token in 0..slots.len() {
            slots.row(token, adapters + 1)?;
        }
        let out = args.take(0)?;
        if let Source::There(y) = from {
            out.copy_from_slice(y);
        }
        let (x_row, y_row) = (k * self.x.size(), n * self.y.size());
        let work = rank * (k + n);
        parallel::rows(out, y_row, work, |token, y| {
            let Some(adapter) =
                usize::try_from(slots.get(token)).ok().and_then(|s| s.checked_sub(1))
            else {
                return;
            };
            let size = self.bank.size();
            let a = &a.from(adapter * rank * k * size)[..rank * k * size];
            let b = &b.from((adapter * self.rows + self.start) * rank * size)[..n * rank * size];
            parallel::scratch(0, k + n, |memory| {
                let (wide_x, wide_y) = memory.split_at_mut(k);
                simd::widen_bytes(isa, self.x, &x[token * x_row..][..x_row], wide_x);
                simd::widen_bytes(isa, self.y, y, wide_y);
                parallel::scratch(1, rank * (k.max(n) + 1), |memory| {
                    let (low, wide) = memory.split_at_mut(rank);
                    let of_a = &mut wide[..rank * k];
                    simd::widen_bytes(isa, self.bank, a, of_a);
                    for (low, a) in low.iter_mut().zip(of_a.chunks_exact(k)) {
                        *low = simd::dot(isa, wide_x, simd::Act::F32(a));
                    }
                    let of_b = &mut wide[..rank * n];
                    simd::widen_bytes(isa, self.bank, b, of_b);
                    for (y, b) in wide_y.iter_mut().zip(of_b.chunks_exact(rank)) {
                        *y += b.iter().zip(&*low).map(|(b, l)| b * l).sum::<f32>();
                    }
                });
                simd::narrow(isa, wide_y, act_mut(self.y, y));
            });
        });
        Ok(())
    }

    fn reads_values(&self, _: usize) -> bool {
        false
    }
}
