//! Attention whose scores never leave the thread that made them: over the cache's blocks where
//! they lie, or over keys and values that were read out.

use super::super::simd::{self, ActMut, Isa, Weights};
use super::attention::with_sink;
use super::codes::CodedRow;
use super::{Args, Float, Kernel, Site, act, act_mut, float, math, parallel};
use crate::cpu::state::StepState;

type Prepared = Result<Option<Box<dyn Kernel>>, String>;

/// Tokens of a sequence from which on gathering its keys for a matrix product pays, whose sums over a context end
/// where the last token's does: where a row's numbers must not depend on others, there is none.
const MATRIX: usize = 4;

/// Tokens whose scores are held at once.
const TOKENS: usize = 16;

/// Rows of the context that all queries of a group pass over before the next ones: the keys of one
/// head stay in the first-level cache.
const ROWS: usize = 64;

/// Rows of the next stretch that are asked for while one is read.
const AHEAD: usize = 16;

struct Attention {
    paged: bool,
    q: Float,
    k: Float,
    v: Float,
    out: Float,
    heads: usize,
    kv_heads: usize,
    d: usize,
    dv: usize,
    scale: f32,
    cap: Option<f32>,
    window: usize,
    /// [`MATRIX`], or none.
    matrix: usize,
    /// How rows of keys and of values are stored, unless as elements.
    coded: [Option<CodedRow>; 2],
}

/// `attention(q, k, v, sinks?)`.
pub(super) fn attention(site: &Site<'_>) -> Prepared {
    let (Some(k), Some(v)) = (site.activation(1), site.activation(2)) else { return Ok(None) };
    prepare(site, false, (k, v), site.dim(1, 1)?, site.dim(2, 0)?, [None; 2])
}

/// `paged_attention(q, k_state, v_state, sinks?)`.
pub(super) fn paged_attention(site: &Site<'_>) -> Prepared {
    let (k, v) = (site.state(1)?, site.state(2)?);
    let coded = [k, v].map(CodedRow::of);
    // What is made of codes is f32.
    let dtype = |i: usize, dtype| if coded[i].is_some() { Some(Float::F32) } else { float(dtype) };
    let (Some(kd), Some(vd)) = (dtype(0, k.dtype), dtype(1, v.dtype)) else { return Ok(None) };
    prepare(site, true, (kd, vd), k.heads() as usize, v.dim() as usize, coded)
}

fn prepare(
    site: &Site<'_>,
    paged: bool,
    (k, v): (Float, Float),
    kv_heads: usize,
    dv: usize,
    coded: [Option<CodedRow>; 2],
) -> Prepared {
    let (heads, d) = (site.dim(0, 1)?, site.dim(0, 0)?);
    let (Some(q), Some(out), true) = (site.activation(0), site.result(0), site.channel(3)) else {
        return Ok(None);
    };
    if heads * d * dv == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Ok(None);
    }
    let scale = site.num("scale") as f32;
    let cap = site.maybe_num("cap").map(|c| c as f32);
    let window = site.maybe_int("window").map_or(usize::MAX, |w| w as usize);
    Ok(Some(Box::new(Attention {
        paged,
        q,
        k,
        v,
        out,
        heads,
        kv_heads,
        d,
        dv,
        scale,
        cap,
        window,
        matrix: if site.reproducible { usize::MAX } else { MATRIX },
        coded,
    })))
}

/// The rows of all heads: in a plane of the cache, or in context order.
pub(super) struct Rows<'a> {
    pub(super) dtype: Float,
    pub(super) bytes: &'a [u8],
    pub(super) kv_heads: usize,
    pub(super) d: usize,
    /// Where each context row lies; `None` if they lie in order.
    pub(super) places: Option<&'a [u32]>,
    /// How rows are stored, unless as elements of `dtype`, which they are made into.
    pub(super) coded: Option<CodedRow>,
}

impl Rows<'_> {
    /// Calls `f(at, rows, memory)` for stretches of at most [`ROWS`] rows that lie one behind the
    /// other, `at` counted from the first of `range`; `memory` begins with the head of the first.
    pub(super) fn stretches(
        &self,
        range: std::ops::Range<usize>,
        head: usize,
        mut f: impl FnMut(usize, usize, &[u8]),
    ) {
        if let Some(coded) = self.coded {
            return self.decoded(coded, range, head, f);
        }
        let place = |i: usize| self.places.map_or(i, |p| p[i] as usize);
        let mut start = range.start;
        while start < range.end {
            let first = place(start);
            let most = ROWS.min(range.end - start);
            let follows = |n: &usize| place(start + n) == first + n;
            let rows = (1..most).take_while(follows).count() + 1;
            let memory = |place: usize| {
                &self.bytes[(place * self.kv_heads + head) * self.d * self.dtype.size()..]
            };
            let next = start + rows;
            if next < range.end {
                // Blocks lie anywhere: what comes next is not where the hardware looks for it.
                let bytes = self.d * self.dtype.size();
                let soon = AHEAD.min(range.end - next);
                simd::prefetch(memory(place(next)), soon, bytes, bytes * self.kv_heads);
            }
            f(start - range.start, rows, memory(first));
            start = next;
        }
    }

    /// As [`Rows::stretches`], of rows that are codes: values of a head are made [`ROWS`] at a time, one behind the other.
    fn decoded(
        &self,
        coded: CodedRow,
        range: std::ops::Range<usize>,
        head: usize,
        mut f: impl FnMut(usize, usize, &[u8]),
    ) {
        let place = |i: usize| self.places.map_or(i, |p| p[i] as usize);
        parallel::scratch(1, ROWS * self.d, |values| {
            for first in range.clone().step_by(ROWS) {
                let rows = ROWS.min(range.end - first);
                for (i, to) in values.chunks_exact_mut(self.d).take(rows).enumerate() {
                    let at = place(first + i) * coded.bytes();
                    coded.read(&self.bytes[at..at + coded.bytes()], head, to);
                }
                f(first - range.start, rows, bytemuck::cast_slice(&values[..rows * self.d]));
            }
        });
    }

    /// Elements from a row of a head to the next, as [`Rows::stretches`] has them.
    fn stride(&self) -> usize {
        if self.coded.is_some() { self.d } else { self.kv_heads * self.d }
    }

    /// Calls `f(i, row)` for each row of a head.
    fn each(&self, range: std::ops::Range<usize>, head: usize, mut f: impl FnMut(usize, &[u8])) {
        let (row, stride) = (self.d * self.dtype.size(), self.stride() * self.dtype.size());
        self.stretches(range, head, |at, rows, memory| {
            (0..rows).for_each(|i| f(at + i, &memory[i * stride..][..row]));
        });
    }
}

/// What a launch's threads read.
struct Inputs<'a> {
    q: &'a [u8],
    k: Rows<'a>,
    v: Rows<'a>,
    sinks: Option<&'a [f32]>,
    step: &'a StepState,
    isa: Isa,
}

impl Kernel for Attention {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (step, isa, sinks) = (args.step, args.isa, args.channel(3)?);
        let memory: [&[u8]; 2] = if self.paged {
            let k = args.plane(1)?.bytes;
            // One plane may be both.
            if args.planes[2].is_some() { [k, args.plane(2)?.bytes] } else { [k, k] }
        } else {
            [args.view(1)?.bytes, args.view(2)?.bytes]
        };
        let places = self.paged.then(|| step.rows());
        let rows = |dtype, i: usize, d| Rows {
            dtype,
            bytes: memory[i],
            kv_heads: self.kv_heads,
            d,
            places,
            coded: self.coded[i],
        };
        let inputs = Inputs {
            q: args.view(0)?.bytes,
            k: rows(self.k, 0, self.d),
            v: rows(self.v, 1, self.dv),
            sinks: sinks.as_deref(),
            step,
            isa,
        };
        let out = args.take(0)?;
        let group_bytes = self.group() * self.dv * self.out.size();
        let pairs = step.dims.pairs as usize / step.places.len().max(1);
        let work = pairs * (self.d + self.dv) * self.group();
        if step.step.seqs.iter().all(|s| s.new < self.matrix) {
            parallel::rows(out, group_bytes, work, |i, out| {
                self.token(&inputs, i / self.kv_heads, i % self.kv_heads, out);
            });
            return Ok(());
        }
        let token_bytes = self.kv_heads * group_bytes;
        parallel::rows(out, TOKENS * token_bytes, TOKENS * self.kv_heads * work, |i, mut out| {
            let mut token = i * TOKENS;
            while !out.is_empty() {
                // Tokens of one sequence.
                let start = step.places[token].context_start;
                let same = step.places[token..].iter().take_while(|p| p.context_start == start);
                let tokens = same.count().min(out.len() / token_bytes);
                let (now, rest) = out.split_at_mut(tokens * token_bytes);
                for head in 0..self.kv_heads {
                    if tokens >= self.matrix {
                        self.block(&inputs, token..token + tokens, head, now);
                    } else {
                        for (t, out) in now.chunks_exact_mut(token_bytes).enumerate() {
                            let out = &mut out[head * group_bytes..][..group_bytes];
                            self.token(&inputs, token + t, head, out);
                        }
                    }
                }
                (out, token) = (rest, token + tokens);
            }
        });
        Ok(())
    }
}

impl Attention {
    /// Query heads that share a head of keys.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// What a token sees: rows of its sequence's context.
    fn seen(&self, row: usize) -> std::ops::Range<usize> {
        (row + 1).saturating_sub(self.window)..row + 1
    }

    /// Its queries' bytes of one group.
    fn queries<'a>(&self, inputs: &Inputs<'a>, token: usize, head: usize) -> &'a [u8] {
        let bytes = self.group() * self.d * self.q.size();
        &inputs.q[(token * self.kv_heads + head) * bytes..][..bytes]
    }

    /// Scores to probabilities: soft cap, then softmax.
    fn normalise(&self, inputs: &Inputs<'_>, scores: &mut [f32], head: usize) {
        if let Some(cap) = self.cap {
            for x in scores.iter_mut() {
                *x = cap * math::tanh(*x / cap);
            }
        }
        match inputs.sinks {
            None => simd::softmax(inputs.isa, scores),
            Some(sinks) => with_sink(inputs.isa, scores, sinks[head]),
        }
    }

    /// One token, one group of heads: the keys and the values are passed over once.
    fn token(&self, inputs: &Inputs<'_>, token: usize, head: usize, out: &mut [u8]) {
        let (group, d, dv, isa) = (self.group(), self.d, self.dv, inputs.isa);
        let place = &inputs.step.places[token];
        let seen = self.seen(place.row);
        let n = seen.len();
        let rows = place.context_start + seen.start..place.context_start + seen.end;
        parallel::scratch(0, group * (d + n + dv), |memory| {
            let (queries, memory) = memory.split_at_mut(group * d);
            let (scores, sums) = memory.split_at_mut(group * n);
            simd::widen_bytes(isa, self.q, self.queries(inputs, token, head), queries);
            simd::scale(isa, queries, self.scale);
            inputs.k.stretches(rows.clone(), head, |at, rows, memory| {
                let keys = act(self.k, memory);
                for (query, scores) in queries.chunks_exact(d).zip(scores.chunks_exact_mut(n)) {
                    let scores = &mut scores[at..at + rows];
                    simd::dot_rows(isa, query, keys, inputs.k.stride(), scores);
                }
            });
            for (g, scores) in scores.chunks_exact_mut(n).enumerate() {
                self.normalise(inputs, scores, head * group + g);
            }
            sums.fill(0.0);
            inputs.v.stretches(rows, head, |at, rows, memory| {
                let values = act(self.v, memory);
                for (sums, scores) in sums.chunks_exact_mut(dv).zip(scores.chunks_exact(n)) {
                    let scores = &scores[at..at + rows];
                    simd::axpy_rows(isa, sums, scores, values, inputs.v.stride());
                }
            });
            simd::narrow(isa, sums, act_mut(self.out, out));
        });
    }

    /// Some tokens of one sequence, one group of heads, as two matrix products over what any of
    /// them sees. `out` is all heads of these tokens.
    fn block(
        &self,
        inputs: &Inputs<'_>,
        tokens: std::ops::Range<usize>,
        head: usize,
        out: &mut [u8],
    ) {
        let (group, d, dv, isa) = (self.group(), self.d, self.dv, inputs.isa);
        let places = &inputs.step.places[tokens.clone()];
        let (Some(first), Some(last)) = (places.first(), places.last()) else { return };
        let (from, to) = (self.seen(first.row).start, last.row + 1);
        let (n, m) = (to - from, places.len() * group);
        let rows = first.context_start + from..first.context_start + to;
        let (k_row, v_size) = (d * self.k.size(), self.v.size());
        let q_group = group * d * self.q.size();
        let sizes = [m * d * self.q.size(), n * k_row, n * dv * v_size, m * dv * self.out.size()];
        // Rounded up, so that all parts are aligned.
        let sizes = sizes.map(|bytes| bytes.next_multiple_of(8));
        parallel::scratch_bytes(sizes.iter().sum(), |memory| {
            let (queries, memory) = memory.split_at_mut(sizes[0]);
            let (keys, memory) = memory.split_at_mut(sizes[1]);
            let (values, mixed) = memory.split_at_mut(sizes[2]);
            let queries = &mut queries[..places.len() * q_group];
            for (to, token) in queries.chunks_exact_mut(q_group).zip(tokens.clone()) {
                to.copy_from_slice(self.queries(inputs, token, head));
            }
            inputs.k.each(rows.clone(), head, |i, row| {
                keys[i * k_row..][..k_row].copy_from_slice(row);
            });
            // Transposed: a value's element over the context is a row of weights.
            let stride = inputs.v.stride() * v_size;
            inputs.v.stretches(rows, head, |at, rows, memory| {
                let to = values[at * v_size..].chunks_mut(n * v_size).take(dv);
                match v_size {
                    2 => transpose::<2>(memory, stride, rows, to),
                    _ => transpose::<4>(memory, stride, rows, to),
                }
            });
            parallel::scratch(0, m * n, |scores| {
                // Whole rows by construction.
                let keys: &[&[u8]] = &[&keys[..n * k_row]];
                if let Ok(keys) = Weights::new(self.k, d, keys) {
                    let queries = act(self.q, queries);
                    simd::linear(isa, queries, m, &keys, None, ActMut::F32(scores));
                }
                for (i, scores) in scores.chunks_exact_mut(n).enumerate() {
                    let seen = self.seen(places[i / group].row);
                    let (start, end) = (seen.start - from, seen.end - from);
                    scores[..start].fill(0.0);
                    scores[end..].fill(0.0);
                    let scores = &mut scores[start..end];
                    simd::scale(isa, scores, self.scale);
                    self.normalise(inputs, scores, head * group + i % group);
                }
                let mixed = &mut mixed[..m * dv * self.out.size()];
                let values: &[&[u8]] = &[&values[..n * dv * v_size]];
                if let Ok(values) = Weights::new(self.v, n, values) {
                    let probs = simd::Act::F32(scores);
                    simd::linear(isa, probs, m, &values, None, act_mut(self.out, mixed));
                }
                let bytes = group * dv * self.out.size();
                let outs = out.chunks_exact_mut(self.kv_heads * bytes);
                for (out, mixed) in outs.zip(mixed.chunks_exact(bytes)) {
                    out[head * bytes..][..bytes].copy_from_slice(mixed);
                }
            });
        });
    }
}

/// Columns of `rows` rows of elements of `N` bytes, `stride` bytes apart, to the beginnings of `to`.
fn transpose<'a, const N: usize>(
    from: &[u8],
    stride: usize,
    rows: usize,
    to: impl Iterator<Item = &'a mut [u8]>,
) {
    for (j, to) in to.enumerate() {
        for (i, to) in to.as_chunks_mut::<N>().0.iter_mut().take(rows).enumerate() {
            to.copy_from_slice(&from[i * stride + j * N..][..N]);
        }
    }
}
