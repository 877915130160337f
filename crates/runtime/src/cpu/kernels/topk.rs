//! The router's choice.

use std::cmp::Ordering;

use super::super::simd;
use super::{Args, Float, Kernel, Site, act_mut, parallel};

struct TopK {
    dtype: Float,
    experts: usize,
    k: usize,
    groups: usize,
    keep: usize,
}

pub(super) fn topk(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    let (Some(dtype), true) = (site.activation(0), site.channel(1)) else { return Ok(None) };
    let int = |name| site.int(name) as usize;
    let (k, groups, keep) = (int("k"), int("groups"), int("keep"));
    Ok(Some(Box::new(TopK { dtype, experts: site.dim(0, 0)?, k, groups, keep })))
}

impl Kernel for TopK {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (x, bias) = (args.view(0)?.bytes, args.channel(1)?);
        let (weights, ids, isa) = (args.take(0)?, args.take(1)?, args.isa);
        let size = self.dtype.size();
        let rows = x.chunks_exact(self.experts * size);
        let outs = weights.chunks_exact_mut(self.k * size);
        let ids = bytemuck::cast_slice_mut::<u8, u32>(ids).chunks_exact_mut(self.k);
        for ((row, out), ids) in rows.zip(outs).zip(ids) {
            parallel::scratch(0, self.experts + self.k, |values| {
                let (scores, chosen) = values.split_at_mut(self.experts);
                simd::widen_bytes(isa, self.dtype, row, scores);
                self.choose(scores, bias.as_deref(), ids);
                for (to, id) in chosen.iter_mut().zip(ids.iter()) {
                    *to = scores[*id as usize];
                }
                simd::narrow(isa, chosen, act_mut(self.dtype, out));
            });
        }
        Ok(())
    }
}

impl TopK {
    fn choose(&self, scores: &[f32], bias: Option<&[f32]>, ids: &mut [u32]) {
        // In f64, as the reference: sums that differ there must not tie here.
        let size = (self.experts + 2 * self.groups) * size_of::<f64>();
        parallel::scratch_bytes(size, |memory| {
            let values: &mut [f64] = bytemuck::cast_slice_mut(memory);
            let (choice, rest) = values.split_at_mut(self.experts);
            let (ranks, kept) = rest.split_at_mut(self.groups);
            for (e, (c, score)) in choice.iter_mut().zip(scores).enumerate() {
                *c = f64::from(*score) + bias.map_or(0.0, |b| f64::from(b[e]));
            }
            if self.groups > 1 {
                let group = self.experts / self.groups;
                for (rank, members) in ranks.iter_mut().zip(choice.chunks_exact(group)) {
                    *rank = largest(members).take(2).map(|i| members[i]).sum();
                }
                kept.fill(0.0);
                largest(ranks).take(self.keep).for_each(|g| kept[g] = 1.0);
                for (members, kept) in choice.chunks_exact_mut(group).zip(kept.iter()) {
                    if *kept == 0.0 {
                        members.fill(f64::NEG_INFINITY);
                    }
                }
            }
            ids.iter_mut().zip(largest(choice)).for_each(|(id, e)| *id = e as u32);
        });
    }
}

/// Indices by value, largest first, ties to the lower index.
fn largest(values: &[f64]) -> impl Iterator<Item = usize> + '_ {
    let mut last: Option<usize> = None;
    std::iter::from_fn(move || {
        let comes_after_last = |i: &usize| {
            last.is_none_or(|l| match values[*i].total_cmp(&values[l]) {
                Ordering::Less => true,
                Ordering::Equal => *i > l,
                Ordering::Greater => false,
            })
        };
        let better = |a: usize, b: usize| {
            if values[b].total_cmp(&values[a]) == Ordering::Greater { b } else { a }
        };
        last = (0..values.len()).filter(comes_after_last).reduce(better);
        last
    })
}
