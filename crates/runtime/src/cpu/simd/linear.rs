//! `y = x · Wᵀ + bias`: shared among threads by blocks of weight rows.

use std::cell::Cell;
use std::thread::LocalKey;

use super::element::{Act, ActMut, Element, Float, Weights, with_element};
use super::isa::{Isa, Kernel};
use super::ops;
use super::threads::for_each_block;
use super::tile::{Block, Pairs, Wide};
use super::vector::Simd;

/// Weight bytes that a thread takes at a time: with the tokens' part, within the second-level
/// cache (1 MiB on current cores).
const BLOCK_BYTES: usize = 256 << 10;

/// Tokens that pass over a block of weights at a time, which bounds the f32 sums in flight.
const BLOCK_TOKENS: usize = 256;

/// Below this many multiplications, waking a thread costs more than it saves.
const SERIAL: usize = 1 << 15;

/// `y[T, N] = x[T, K] · w[N, K]ᵀ + bias[N]`, summed in f32 and rounded once, to nearest even.
///
/// f32 activations are used in full. bf16 activations with bf16 weights are multiplied exactly
/// (subnormal numbers may count as zero). The sum's order depends on the instruction set and on
/// K only, never on T, N or the number of threads.
///
/// Runs on the current rayon pool (see [`for_each_block`]); scratch memory belongs to its
/// threads and grows only.
///
/// # Panics
/// If the lengths of `x`, `y` and `bias` are not `t * K`, `t * N` and `[N, 1]`.
pub fn linear(
    isa: Isa,
    x: Act<'_>,
    t: usize,
    w: &Weights<'_>,
    bias: Option<&Weights<'_>>,
    y: ActMut<'_>,
) {
    compute(isa, x, t, w, bias, y, false);
}

/// As [`linear`], added to what `y` holds before the one rounding.
///
/// # Panics
/// As [`linear`].
pub fn linear_add(
    isa: Isa,
    x: Act<'_>,
    t: usize,
    w: &Weights<'_>,
    bias: Option<&Weights<'_>>,
    y: ActMut<'_>,
) {
    compute(isa, x, t, w, bias, y, true);
}

fn compute(
    isa: Isa,
    x: Act<'_>,
    t: usize,
    w: &Weights<'_>,
    bias: Option<&Weights<'_>>,
    y: ActMut<'_>,
    add: bool,
) {
    let (n, k) = (w.rows(), w.columns());
    assert_eq!(x.len(), t * k, "x is not [{t}, {k}]");
    let epilogue = Epilogue::new(t, n, bias, y, add);
    if t == 0 || n == 0 {
        return;
    }
    let pairs = isa.has_bf16_dot() && (x.dtype(), w.dtype()) == (Float::Bf16, Float::Bf16);
    let widened = !pairs && x.dtype() != Float::F32;
    let mut scratch = Scratch::take(&WIDE, if widened { x.len() } else { 0 });
    let x = if widened {
        ops::widen(isa, x, scratch.as_mut());
        Act::F32(scratch.as_mut())
    } else {
        x
    };
    let rows = (BLOCK_BYTES / w.row_bytes()).clamp(8, 256).next_multiple_of(4);
    let job = Job { x: x.as_bytes(), pairs, tokens: t, w, epilogue, rows };
    let blocks = n.div_ceil(rows);
    let work = |block| isa.run(BlockOf { job: &job, block });
    if n * k * t < SERIAL {
        (0..blocks).for_each(work);
    } else {
        for_each_block(blocks, work);
    }
}

/// One call of [`linear`], as its threads see it.
struct Job<'a> {
    /// `[tokens, K]`, bf16 if `pairs` and f32 if not.
    x: &'a [u8],
    pairs: bool,
    tokens: usize,
    w: &'a Weights<'a>,
    epilogue: Epilogue<'a>,
    /// Rows of a block.
    rows: usize,
}

/// What becomes of sums: `y = sums + bias`, rounded to its type.
pub(super) struct Epilogue<'a> {
    /// `N`.
    n: usize,
    bias: Option<&'a Weights<'a>>,
    /// `[tokens, N]`
    y: Shared,
    y_dtype: Float,
    /// Whether the sums are added to what `y` holds.
    add: bool,
}

/// Memory that several threads write, each its own part.
struct Shared(*mut u8);

// SAFETY: blocks are of columns of their own, and each is run once.
unsafe impl Sync for Shared {}

struct BlockOf<'a> {
    job: &'a Job<'a>,
    block: usize,
}

impl Kernel for BlockOf<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let job = self.job;
        let start = self.block * job.rows;
        let rows = job.rows.min(job.w.rows() - start);
        let mut scratch = Scratch::take(&SUMS, rows * (job.tokens.min(BLOCK_TOKENS) + 1));
        let (bias, sums) = scratch.as_mut().split_at_mut(rows);
        // SAFETY: the contract gives `S`.
        unsafe {
            job.epilogue.read_bias::<S>(start, bias);
            for t in (0..job.tokens).step_by(BLOCK_TOKENS) {
                let sums = &mut sums[..rows * BLOCK_TOKENS.min(job.tokens - t)];
                job.multiply::<S>(start, t, rows, sums);
                for (c, sums) in sums.chunks_exact(rows).enumerate() {
                    job.epilogue.store::<S>(t + c, start, bias, sums);
                }
            }
        }
    }
}

/// # Safety
/// For all: the CPU has `S`'s instructions.
impl Job<'_> {
    /// Sums `[tokens, rows]` of the tokens from `t` and the weight rows from `start`.
    #[inline(always)]
    unsafe fn multiply<S: Simd>(&self, start: usize, t: usize, rows: usize, sums: &mut [f32]) {
        let k = self.w.columns();
        let x_size = if self.pairs { 2 } else { 4 };
        let tokens = sums.len() / rows;
        let x = &self.x[t * k * x_size..][..tokens * k * x_size];
        for (first, bytes) in self.w.pieces(start, start + rows) {
            let block = Block {
                w: bytes.as_ptr(),
                rows: bytes.len() / self.w.row_bytes(),
                x: x.as_ptr(),
                tokens,
                k,
                out: sums[first - start..].as_mut_ptr(),
                out_stride: rows,
            };
            // SAFETY: `bytes` is whole rows of K weights, `x` is `tokens` rows, and the rows of
            // `sums` hold this piece at its offset. `pairs` is set only where `S` has the dot.
            unsafe {
                if S::DOT_BF16 && self.pairs {
                    block.run::<Pairs<S>>();
                } else {
                    with_element!(self.w.dtype(), W => block.run::<Wide<S, W>>());
                }
            }
        }
    }
}

/// # Safety
/// For those that are unsafe: the CPU has `S`'s instructions.
impl<'a> Epilogue<'a> {
    /// # Panics
    /// If `y` is not `[t, n]`, or the bias is not `[n]`.
    pub(super) fn new(
        t: usize,
        n: usize,
        bias: Option<&'a Weights<'a>>,
        mut y: ActMut<'_>,
        add: bool,
    ) -> Self {
        assert_eq!(y.len(), t * n, "y is not [{t}, {n}]");
        if let Some(bias) = bias {
            assert_eq!((bias.rows(), bias.columns()), (n, 1), "the bias is not [{n}]");
        }
        Epilogue { n, bias, y_dtype: y.dtype(), y: Shared(y.as_bytes_mut().as_mut_ptr()), add }
    }

    /// Writes the sums and the bias of a token's columns from `start` on to `y`, or adds them.
    ///
    /// # Safety
    /// The token and the columns are `y`'s, and no other thread's.
    #[inline(always)]
    pub(super) unsafe fn store<S: Simd>(&self, t: usize, start: usize, bias: &[f32], sums: &[f32]) {
        // SAFETY: as the caller's.
        unsafe { with_element!(self.y_dtype, E => self.store_as::<S, E>(t, start, bias, sums)) }
    }

    #[inline(always)]
    unsafe fn store_as<S: Simd, E: Element>(
        &self,
        t: usize,
        start: usize,
        bias: &[f32],
        sums: &[f32],
    ) {
        let rows = bias.len().min(sums.len());
        // SAFETY: row t of y has these columns by contract; loads are within `sums` and `bias`, both of `rows`
        // elements.
        unsafe {
            let y = self.y.0.add((t * self.n + start) * E::SIZE);
            let (sums, bias) = (sums.as_ptr(), bias.as_ptr());
            let mut i = 0;
            while i + S::LANES <= rows {
                let mut sum =
                    S::add(S::load_f32(sums.add(i).cast()), S::load_f32(bias.add(i).cast()));
                if self.add {
                    sum = S::add(sum, E::load::<S>(y.add(i * E::SIZE)));
                }
                E::store::<S>(y.add(i * E::SIZE), sum);
                i += S::LANES;
            }
            if i < rows {
                let n = rows - i;
                let mut sum = S::add(
                    f32::load_tail::<S>(sums.add(i).cast(), n),
                    f32::load_tail::<S>(bias.add(i).cast(), n),
                );
                if self.add {
                    sum = S::add(sum, E::load_tail::<S>(y.add(i * E::SIZE), n));
                }
                E::store_tail::<S>(y.add(i * E::SIZE), sum, n);
            }
        }
    }

    /// The bias of the columns from `start`; zeros if there is none.
    #[inline(always)]
    pub(super) unsafe fn read_bias<S: Simd>(&self, start: usize, out: &mut [f32]) {
        let Some(bias) = self.bias else { return out.fill(0.0) };
        for (first, bytes) in bias.pieces(start, start + out.len()) {
            let out = &mut out[first - start..][..bytes.len() / bias.row_bytes()];
            // SAFETY: as the caller's.
            unsafe { ops::WidenBytes { dtype: bias.dtype(), bytes, out }.run::<S>() }
        }
    }
}

thread_local! {
    /// f32 copies of 16-bit activations, on the calling thread.
    static WIDE: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    /// A block's sums and bias, on each worker.
    static SUMS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// A thread's scratch memory, taken out while in use: a thread that waits for its pool may run
/// another call of [`linear`], which then takes fresh memory.
struct Scratch {
    home: &'static LocalKey<Cell<Vec<f32>>>,
    memory: Vec<f32>,
    len: usize,
}

impl Scratch {
    fn take(home: &'static LocalKey<Cell<Vec<f32>>>, len: usize) -> Self {
        let mut memory = home.take();
        if memory.len() < len {
            memory.resize(len, 0.0);
        }
        Scratch { home, memory, len }
    }

    fn as_mut(&mut self) -> &mut [f32] {
        &mut self.memory[..self.len]
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.home.set(std::mem::take(&mut self.memory));
    }
}
