//! `causal_conv`.

use super::super::simd;
use super::{Args, Float, Kernel, Site, act_mut, parallel};

struct CausalConv {
    dtype: Float,
    channels: usize,
    taps: usize,
}

pub(super) fn causal_conv(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    let (Some(dtype), true, true) = (site.activation(1), site.channel(2), site.channel(3)) else {
        return Err("expected floats".to_owned());
    };
    Ok(Some(Box::new(CausalConv { dtype, channels: site.dim(2, 1)?, taps: site.dim(2, 0)? })))
}

impl Kernel for CausalConv {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (isa, step, size) = (args.isa, args.step, self.dtype.size());
        let (x, w, bias) = (args.view(1)?.bytes, args.channel(2)?, args.channel(3)?);
        let w = w.ok_or("no taps")?;
        let (out, mut plane) = (args.take(1)?, args.plane(0)?);
        let (row, before) = (self.channels * size, self.taps - 1);
        let mut token = 0;
        for (seq, [from, to]) in step.step.seqs.iter().zip(step.slot_blocks()) {
            let (start, end) = (token * row, (token + seq.new) * row);
            token += seq.new;
            // The rows before the first one and all of the step's.
            let mut words = vec![0u64; (before * row + end - start).div_ceil(8)];
            let all = &mut bytemuck::cast_slice_mut(&mut words)[..before * row + end - start];
            plane.read_slot(from, step.block_size(), &mut all[..before * row]);
            all[before * row..].copy_from_slice(&x[start..end]);
            let all = &*all;
            parallel::rows(&mut out[start..end], row, self.channels * self.taps, |t, out| {
                parallel::scratch(0, self.channels, |sum| {
                    parallel::scratch(1, self.channels, |x| {
                        match &bias {
                            Some(bias) => sum.copy_from_slice(bias),
                            None => sum.fill(0.0),
                        }
                        for j in 0..self.taps {
                            simd::widen_bytes(isa, self.dtype, &all[(t + j) * row..][..row], x);
                            let taps = w.iter().skip(j).step_by(self.taps);
                            sum.iter_mut()
                                .zip(x.iter().zip(taps))
                                .for_each(|(s, (x, w))| *s += x * w);
                        }
                    });
                    simd::narrow(isa, sum, act_mut(self.dtype, out));
                });
            });
            plane.write_slot(to, step.block_size(), &all[seq.new * row..]);
        }
        Ok(())
    }
}
