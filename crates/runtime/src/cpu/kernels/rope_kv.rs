//! All between the projections and attention: head-wise norms, rotary embedding, the cache's rows.

use super::super::simd;
use super::codes::CodedRow;
use super::norm::rms;
use super::rope::{Turn, table};
use super::{Args, Float, Kernel, Plane, Site, act, act_mut, parallel};

type Prepared = Result<Option<Box<dyn Kernel>>, String>;

/// Where an operand of the op is, for the three forms of it.
struct RopeKv {
    dtype: Float,
    turn: Turn,
    eps: f32,
    offset: f32,
    /// Operands: queries, if any; keys and values, if not with the queries.
    q: Option<usize>,
    kv: Option<(usize, usize)>,
    /// The operand that is the positions; frequencies and the two planes follow.
    positions: usize,
    /// Operands that are the norms' weights, if any.
    norms: Option<(usize, usize)>,
    heads: usize,
    kv_heads: usize,
    d: usize,
    dv: usize,
    /// How rows of the two planes are stored, unless as elements.
    coded: [Option<CodedRow>; 2],
}

/// `rope_kv_write(k, v, positions, freqs, k_cache, v_cache)`.
pub(super) fn rope_kv_write(site: &Site<'_>) -> Prepared {
    prepare(site, None, Some((0, 1)), 2, None)
}

/// `qk_rope_kv_write(q, k, v, positions, freqs, k_cache, v_cache, q_norm?, k_norm?)`.
pub(super) fn qk_rope_kv_write(site: &Site<'_>) -> Prepared {
    prepare(site, Some(0), Some((1, 2)), 3, Some((7, 8)))
}

/// `qkv_rope_kv_write(qkv, positions, freqs, k_cache, v_cache, q_norm?, k_norm?)`.
pub(super) fn qkv_rope_kv_write(site: &Site<'_>) -> Prepared {
    prepare(site, Some(0), None, 1, Some((5, 6)))
}

fn prepare(
    site: &Site<'_>,
    q: Option<usize>,
    kv: Option<(usize, usize)>,
    positions: usize,
    norms: Option<(usize, usize)>,
) -> Prepared {
    let (k_cache, v_cache) = (site.state(positions + 2)?, site.state(positions + 3)?);
    let (kv_heads, d, dv) =
        (k_cache.heads() as usize, k_cache.dim() as usize, v_cache.dim() as usize);
    let Some(dtype) = site.activation(0) else { return Ok(None) };
    let (k, v) = kv.unwrap_or((0, 0));
    let stored = [k_cache.dtype, v_cache.dtype].into_iter().all(|t| super::float(t) == Some(dtype));
    let known = [q.unwrap_or(0), k, v].into_iter().all(|i| site.activation(i) == Some(dtype));
    let channels = norms.is_none_or(|(q, k)| site.channel(q) && site.channel(k));
    if !(stored && known && channels && site.channel(positions + 1)) || d * dv * kv_heads == 0 {
        return Ok(None);
    }
    let heads = match (q, kv) {
        (None, _) => 0,
        (Some(q), Some(_)) => site.dim(q, 1)?,
        (Some(q), None) => site.dim(q, 0)?.saturating_sub(kv_heads * (d + dv)) / d,
    };
    let (eps, offset) = (site.num("eps") as f32, site.num("offset") as f32);
    let turn = Turn::of(site, positions + 1)?;
    // Either norm without its weight is none.
    let given = |i: usize| site.launch.operands.get(i).is_some_and(Option::is_some);
    let norms = norms.filter(|(q, k)| given(*q) && given(*k));
    Ok(Some(Box::new(RopeKv {
        dtype,
        turn,
        eps,
        offset,
        q,
        kv,
        positions,
        norms,
        heads,
        kv_heads,
        d,
        dv,
        coded: [CodedRow::of(k_cache), CodedRow::of(v_cache)],
    })))
}

impl Kernel for RopeKv {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (isa, step, size) = (args.isa, args.step, self.dtype.size());
        let q_bytes = self.heads * self.d * size;
        let k_bytes = self.kv_heads * self.d * size;
        let v_bytes = self.kv_heads * self.dv * size;
        // Each part's memory, where a token's begins in it, and how far apart tokens are.
        let (q, k, v) = if let Some((k, v)) = self.kv {
            let q = self.q.map_or(Ok(&[][..]), |q| args.view(q).map(|v| v.bytes))?;
            let (k, v) = (args.view(k)?.bytes, args.view(v)?.bytes);
            ((q, 0, q_bytes), (k, 0, k_bytes), (v, 0, v_bytes))
        } else {
            let (all, row) = (args.view(0)?.bytes, q_bytes + k_bytes + v_bytes);
            ((all, 0, row), (all, q_bytes, row), (all, q_bytes + k_bytes, row))
        };
        let (q_norm, k_norm) = match self.norms {
            Some((q, k)) => (args.channel(q)?, args.channel(k)?),
            None => (None, None),
        };
        let (keys, values) = (args.plane(self.positions + 2)?, args.plane(self.positions + 3)?);
        let out = if self.q.is_some() { Some(args.take(0)?) } else { None };
        let turns = table(args, self.positions, self.positions + 1, self.turn.scale)?;
        let part = |(_, from, row): (&[u8], usize, usize), t: usize| t * row + from;
        let r = self.turn.r;
        let head = |from: &[u8], to: &mut [u8], norm: Option<&[f32]>, t: usize| {
            parallel::scratch(0, self.d, |x| {
                simd::widen(isa, act(self.dtype, from), x);
                if norm.is_some() {
                    rms(isa, x, norm, self.eps, self.offset);
                }
                self.turn.turn(x, &turns[t * r..(t + 1) * r]);
                simd::narrow(isa, x, act_mut(self.dtype, to));
            });
        };
        let row = self.d * size;
        if let Some(out) = out {
            parallel::rows(out, q_bytes, 4 * self.heads * self.d, |t, out| {
                let from = &q.0[part(q, t)..][..q_bytes];
                for (from, to) in from.chunks_exact(row).zip(out.chunks_exact_mut(row)) {
                    head(from, to, q_norm.as_deref(), t);
                }
            });
        }
        let (Plane { bytes: keys, .. }, Plane { bytes: values, .. }) = (keys, values);
        for (t, slot) in step.slots().enumerate() {
            let from = &k.0[part(k, t)..][..k_bytes];
            let turned = |to: &mut [u8]| {
                for (from, to) in from.chunks_exact(row).zip(to.chunks_exact_mut(row)) {
                    head(from, to, k_norm.as_deref(), t);
                }
            };
            match self.coded[0] {
                None => turned(&mut keys[slot * k_bytes..][..k_bytes]),
                // Rounded to elements first, as what is written apart from its rotation is.
                Some(coded) => parallel::scratch_bytes(k_bytes, |elements| {
                    turned(elements);
                    let to = &mut keys[slot * coded.bytes()..][..coded.bytes()];
                    coded.write(isa, self.dtype, elements, to);
                }),
            }
            let from = &v.0[part(v, t)..][..v_bytes];
            match self.coded[1] {
                None => values[slot * v_bytes..][..v_bytes].copy_from_slice(from),
                Some(coded) => {
                    let to = &mut values[slot * coded.bytes()..][..coded.bytes()];
                    coded.write(isa, self.dtype, from, to);
                }
            }
        }
        Ok(())
    }
}
