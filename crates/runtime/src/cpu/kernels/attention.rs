//! Attention in its parts, over ragged `[H, pairs]` values.

use infernum_ir::DType;
use infernum_ir::interp::SeqShape;

use super::super::simd::{self, ActMut, Isa, Weights};
use super::{Args, Float, Kernel, Site, Source, act, act_mut, norm, parallel};

type Prepared = Result<Option<Box<dyn Kernel>>, String>;

struct Scores {
    q: Float,
    k: Float,
    heads: usize,
    kv_heads: usize,
    d: usize,
    /// [`MATRIX`]; none where a row's numbers must not depend on others.
    matrix: usize,
}

pub(super) fn scores(site: &Site<'_>) -> Prepared {
    let (Some(q), Some(k)) = (site.activation(0), site.activation(1)) else { return Ok(None) };
    let (heads, kv_heads, d) = (site.dim(0, 1)?, site.dim(1, 1)?, site.dim(0, 0)?);
    if heads * d == 0 {
        return Ok(None);
    }
    let matrix = if site.reproducible { usize::MAX } else { MATRIX };
    Ok(Some(Box::new(Scores { q, k, heads, kv_heads, d, matrix })))
}

/// Tokens of a sequence from which on gathering its keys for a matrix product pays.
const MATRIX: usize = 4;

impl Kernel for Scores {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (q, k) = (args.view(0)?.bytes, args.view(1)?.bytes);
        let (out, step, isa) = (args.take(0)?, args.step, args.isa);
        let pairs = step.dims.pairs as usize;
        parallel::rows(out, pairs * size_of::<f32>(), pairs * self.d, |head, row| {
            let row: &mut [f32] = bytemuck::cast_slice_mut(row);
            let mut token = 0;
            for seq in &step.step.seqs {
                // A sequence's scores lie together, in token order.
                let place = step.places[token];
                let out = &mut row[place.pair_start..][..seq.new * seq.context];
                let q = self.rows(q, self.q, self.heads, token, head);
                let kv_head = head / (self.heads / self.kv_heads);
                let k = self.rows(k, self.k, self.kv_heads, place.context_start, kv_head);
                if seq.new < self.matrix {
                    self.by_token(isa, &q, &k, seq.context, out);
                } else {
                    self.by_sequence(isa, &q, &k, *seq, out);
                }
                token += seq.new;
            }
        });
        Ok(())
    }
}

/// The rows of one head, `stride` elements apart.
struct HeadRows<'a> {
    dtype: Float,
    bytes: &'a [u8],
    stride: usize,
}

impl HeadRows<'_> {
    fn copy_to(&self, out: &mut [u8], row_bytes: usize) {
        let from = self.bytes.chunks(self.stride * self.dtype.size());
        for (to, from) in out.chunks_exact_mut(row_bytes).zip(from) {
            to.copy_from_slice(&from[..row_bytes]);
        }
    }
}

impl Scores {
    /// One head of `[.., heads, d]`, from a row on.
    fn rows<'a>(
        &self,
        bytes: &'a [u8],
        dtype: Float,
        heads: usize,
        row: usize,
        head: usize,
    ) -> HeadRows<'a> {
        let stride = heads * self.d;
        HeadRows { dtype, bytes: &bytes[(row * stride + head * self.d) * dtype.size()..], stride }
    }

    fn by_token(&self, isa: Isa, q: &HeadRows, k: &HeadRows, context: usize, out: &mut [f32]) {
        let (keys, d) = (act(k.dtype, k.bytes), self.d);
        let queries = q.bytes.chunks(q.stride * q.dtype.size());
        parallel::scratch(0, d, |query| {
            for (out, from) in out.chunks_exact_mut(context).zip(queries) {
                simd::widen_bytes(isa, q.dtype, &from[..d * q.dtype.size()], query);
                simd::dot_rows(isa, query, keys, k.stride, out);
            }
        });
    }

    /// As a product of all the queries with the keys, both gathered.
    fn by_sequence(&self, isa: Isa, q: &HeadRows, k: &HeadRows, seq: SeqShape, out: &mut [f32]) {
        let (q_row, k_row) = (self.d * q.dtype.size(), self.d * k.dtype.size());
        // Rounded up, so that both parts are aligned.
        let q_bytes = (seq.new * q_row).next_multiple_of(8);
        parallel::scratch_bytes(q_bytes + seq.context * k_row, |memory| {
            let (queries, keys) = memory.split_at_mut(q_bytes);
            let queries = &mut queries[..seq.new * q_row];
            q.copy_to(queries, q_row);
            k.copy_to(keys, k_row);
            let keys: &[&[u8]] = &[keys];
            // Rows of `d` elements, which `k_row` is a multiple of: always whole.
            if let Ok(keys) = Weights::new(k.dtype, self.d, keys) {
                simd::linear(isa, act(q.dtype, queries), seq.new, &keys, None, ActMut::F32(out));
            }
        });
    }
}

struct Mix {
    v: Float,
    heads: usize,
    kv_heads: usize,
    d: usize,
}

pub(super) fn mix(site: &Site<'_>) -> Prepared {
    let (Some(Float::F32), Some(v)) = (site.activation(0), site.activation(1)) else {
        return Ok(None);
    };
    let heads = site.tensor(0)?.shape[0].as_const().unwrap_or(0) as usize;
    let (kv_heads, d) = (site.dim(1, 1)?, site.dim(1, 0)?);
    Ok(Some(Box::new(Mix { v, heads, kv_heads, d })))
}

impl Kernel for Mix {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let p: &[f32] = bytemuck::cast_slice(args.view(0)?.bytes);
        let v = act(self.v, args.view(1)?.bytes);
        let (out, step, isa, d) = (args.take(0)?, args.step, args.isa, self.d);
        let pairs = step.dims.pairs as usize;
        let (group, stride) = (self.heads / self.kv_heads, self.kv_heads * d);
        let work = pairs / step.places.len().max(1) * d;
        parallel::rows(out, d * self.v.size(), work, |row, out| {
            let (t, head) = (row / self.heads, row % self.heads);
            let place = &step.places[t];
            let weights = &p[head * pairs..][place.pairs()];
            let from = place.context_start * stride + head / group * d;
            parallel::scratch(0, d, |sum| {
                sum.fill(0.0);
                simd::axpy_rows(isa, sum, weights, v.slice(from..v.len()), stride);
                simd::narrow(isa, sum, act_mut(self.v, out));
            });
        });
        Ok(())
    }
}

/// How many rows before and after its own a token sees.
struct Mask {
    dtype: Float,
    before: usize,
    after: usize,
}

pub(super) fn mask(site: &Site<'_>) -> Prepared {
    let before = site.maybe_int("window").map_or(usize::MAX, |w| (w as usize).saturating_sub(1));
    Ok(site
        .activation(0)
        .map(|dtype| Box::new(Mask { dtype, before, after: 0 }) as Box<dyn Kernel>))
}

pub(super) fn mask_far(site: &Site<'_>) -> Prepared {
    let reach = site.int("reach") as usize;
    let mask = |dtype| Box::new(Mask { dtype, before: reach, after: reach }) as Box<dyn Kernel>;
    Ok(site.activation(0).map(mask))
}

impl Kernel for Mask {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (x, out, step) = (args.source(0)?, args.take(0)?, args.step);
        let pairs = step.dims.pairs as usize;
        let row_bytes = pairs * self.dtype.size();
        parallel::rows(out, row_bytes, pairs, |head, row| {
            if let Source::There(x) = x {
                row.copy_from_slice(&x[head * row_bytes..][..row_bytes]);
            }
            for place in &step.places {
                let size = self.dtype.size();
                let seen = &mut row[place.pair_start * size..][..place.context_len * size];
                let first = place.row.saturating_sub(self.before);
                let end = place.row.saturating_add(1).saturating_add(self.after);
                self.hide(&mut seen[..first * size]);
                self.hide(&mut seen[end.min(place.context_len) * size..]);
            }
        });
        Ok(())
    }
}

impl Mask {
    fn hide(&self, bytes: &mut [u8]) {
        match act_mut(self.dtype, bytes) {
            ActMut::F32(x) => x.fill(f32::NEG_INFINITY),
            ActMut::Bf16(x) => x.fill(half::bf16::NEG_INFINITY),
            ActMut::F16(x) => x.fill(half::f16::NEG_INFINITY),
        }
    }
}

struct Softmax {
    dtype: Float,
    /// The row's length, unless it is ragged.
    d: Option<usize>,
}

pub(super) fn softmax(site: &Site<'_>) -> Prepared {
    let (Some(dtype), true) = (site.activation(0), site.channel(1)) else { return Ok(None) };
    let x = site.tensor(0)?;
    let d = x.last_const().map(|d| d as usize);
    let known = d.is_some() || (x.is_ragged() && x.rank() == 3 && x.dtype == DType::F32);
    Ok(known.then(|| Box::new(Softmax { dtype, d }) as Box<dyn Kernel>))
}

impl Kernel for Softmax {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let sinks = args.channel(1)?;
        let (x, out, step, isa) = (args.source(0)?, args.take(0)?, args.step, args.isa);
        if let Some(d) = self.d {
            norm::each_row(self.dtype, d, isa, x, out, |row| simd::softmax(isa, row));
            return Ok(());
        }
        let pairs = step.dims.pairs as usize;
        let row_bytes = pairs * size_of::<f32>();
        parallel::rows(out, row_bytes, 4 * pairs, |head, row| {
            if let Source::There(x) = x {
                row.copy_from_slice(&x[head * row_bytes..][..row_bytes]);
            }
            let row: &mut [f32] = bytemuck::cast_slice_mut(row);
            for place in &step.places {
                match sinks.as_deref() {
                    None => simd::softmax(isa, &mut row[place.pairs()]),
                    Some(sinks) => with_sink(isa, &mut row[place.pairs()], sinks[head]),
                }
            }
        });
        Ok(())
    }
}

/// Softmax with one more logit, whose probability is dropped.
pub(super) fn with_sink(isa: Isa, x: &mut [f32], sink: f32) {
    let max = simd::max(isa, x).max(sink);
    let sum = simd::exp_sum(isa, x, max) + (sink - max).exp();
    simd::scale(isa, x, 1.0 / sum);
}
