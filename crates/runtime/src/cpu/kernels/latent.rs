//! Attention to cached latents, which are keys, with a part beside them, and values at once.

use super::super::simd::{self, Isa};
use super::paged::Rows;
use super::{Args, Float, Kernel, Site, act, act_mut, float, parallel};
use crate::cpu::state::StepState;

struct LatentAttention {
    q: Float,
    /// Of the planes.
    kv: Float,
    out: Float,
    heads: usize,
    /// Heads that pass over the context together.
    group: usize,
    /// Elements of a latent, and of the part of a key beside it.
    rank: usize,
    beside: usize,
    scale: f32,
    window: usize,
}

/// The most heads that pass over the context together: their scores and sums stay in the second-level cache.
const GROUP: usize = 8;

/// `latent_attention(q_latent, q_rope, latents, keys)`.
pub(super) fn latent_attention(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    let (latents, keys) = (site.state(2)?, site.state(3)?);
    if latents.encoding.is_some() || keys.encoding.is_some() {
        return Ok(None);
    }
    let planes = (float(latents.dtype), latents.dtype == keys.dtype);
    let (Some(q), true, Some(out), (Some(kv), true)) =
        (site.activation(0), site.activation(0) == site.activation(1), site.result(0), planes)
    else {
        return Ok(None);
    };
    let heads = site.dim(0, 1)?;
    let (rank, beside) = (site.dim(0, 0)?, site.dim(1, 0)?);
    if heads * rank * beside == 0 {
        return Ok(None);
    }
    let group = (1..=GROUP.min(heads)).rev().find(|g| heads.is_multiple_of(*g)).unwrap_or(1);
    let scale = site.num("scale") as f32;
    let window = site.maybe_int("window").map_or(usize::MAX, |w| w as usize);
    Ok(Some(Box::new(LatentAttention { q, kv, out, heads, group, rank, beside, scale, window })))
}

/// What a launch's threads read.
struct Inputs<'a> {
    q: [&'a [u8]; 2],
    latents: Rows<'a>,
    keys: Rows<'a>,
    step: &'a StepState,
    isa: Isa,
}

impl Kernel for LatentAttention {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (step, isa) = (args.step, args.isa);
        let latents = args.plane(2)?.bytes;
        // One plane may be both.
        let planes: [&[u8]; 2] =
            if args.planes[3].is_some() { [latents, args.plane(3)?.bytes] } else { [latents; 2] };
        let rows = |i: usize, d| Rows {
            dtype: self.kv,
            bytes: planes[i],
            kv_heads: 1,
            d,
            places: Some(step.rows()),
            coded: None,
        };
        let inputs = Inputs {
            q: [args.view(0)?.bytes, args.view(1)?.bytes],
            latents: rows(0, self.rank),
            keys: rows(1, self.beside),
            step,
            isa,
        };
        let out = args.take(0)?;
        let pairs = step.dims.pairs as usize / step.places.len().max(1);
        let work = pairs * (2 * self.rank + self.beside) * self.group;
        let groups = self.heads / self.group;
        parallel::rows(out, self.group * self.rank * self.out.size(), work, |i, out| {
            self.token(&inputs, i / groups, i % groups, out);
        });
        Ok(())
    }
}

impl LatentAttention {
    /// One token, one group of heads.
    fn token(&self, inputs: &Inputs<'_>, token: usize, group: usize, out: &mut [u8]) {
        let (heads, rank, beside, isa) = (self.group, self.rank, self.beside, inputs.isa);
        let place = &inputs.step.places[token];
        let (start, end) = ((place.row + 1).saturating_sub(self.window), place.row + 1);
        let n = end - start;
        let rows = place.context_start + start..place.context_start + end;
        let first = token * self.heads + group * heads;
        parallel::scratch(0, heads * (2 * rank + beside + 2 * n), |memory| {
            let (queries, memory) = memory.split_at_mut(heads * rank);
            let (turned, memory) = memory.split_at_mut(heads * beside);
            let (scores, memory) = memory.split_at_mut(heads * n);
            let (more, sums) = memory.split_at_mut(heads * n);
            for (to, from, d) in
                [(&mut *queries, inputs.q[0], rank), (&mut *turned, inputs.q[1], beside)]
            {
                let bytes = &from[first * d * self.q.size()..][..heads * d * self.q.size()];
                simd::widen_bytes(isa, self.q, bytes, to);
                simd::scale(isa, to, self.scale);
            }
            dots(&inputs.latents, rows.clone(), queries, scores, isa);
            dots(&inputs.keys, rows.clone(), turned, more, isa);
            for (scores, more) in scores.chunks_exact_mut(n).zip(more.chunks_exact(n)) {
                scores.iter_mut().zip(more).for_each(|(s, m)| *s += m);
                simd::softmax(isa, scores);
            }
            sums.fill(0.0);
            inputs.latents.stretches(rows, 0, |at, rows, memory| {
                let values = act(self.kv, memory);
                for (sums, scores) in sums.chunks_exact_mut(rank).zip(scores.chunks_exact(n)) {
                    simd::axpy_rows(isa, sums, &scores[at..at + rows], values, rank);
                }
            });
            simd::narrow(isa, sums, act_mut(self.out, out));
        });
    }
}

/// The dot products of queries with the rows of a plane: `scores` is a row a query.
fn dots(
    plane: &Rows<'_>,
    rows: std::ops::Range<usize>,
    queries: &[f32],
    scores: &mut [f32],
    isa: Isa,
) {
    let n = rows.len();
    plane.stretches(rows, 0, |at, rows, memory| {
        let keys = act(plane.dtype, memory);
        let each = queries.chunks_exact(plane.d).zip(scores.chunks_exact_mut(n));
        for (query, scores) in each {
            simd::dot_rows(isa, query, keys, plane.d, &mut scores[at..at + rows]);
        }
    });
}
