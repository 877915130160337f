//! Matrix products.

use infernum_codegen::Arg;
use infernum_ir::TensorType;

use super::super::simd::{self, Act, ActMut, Codes, Float, Isa, Rounding, Weights};
use super::{Args, Kernel, Operand, Site, Source, act, act_mut, float, parallel};
use crate::exec::Bytes;
use crate::exec::weights::Loaded;

/// A weight matrix.
#[derive(Clone, Copy)]
pub(super) enum Matrix<'a> {
    Plain(&'a Weights<'a>),
    Packed(Codes<'a>),
}

impl Matrix<'_> {
    /// `[N, K]`
    fn shape(&self) -> (usize, usize) {
        match self {
            Matrix::Plain(w) => (w.rows(), w.columns()),
            Matrix::Packed(w) => (w.rows(), w.columns()),
        }
    }
}

/// `y = x · wᵀ + bias`, and in `linear_add` a residual in the same sum.
pub(super) struct Linear {
    /// The operand that is x; w and the bias follow it.
    first: usize,
    x: Float,
    w: Float,
    bias: Option<Float>,
    y: Float,
    k: usize,
    rounding: Rounding,
}

pub(super) fn linear(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    prepare(site, 0, Rounding::None)
}

/// `linear_a8(x, w, bias?)`.
pub(super) fn linear_a8(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    prepare(site, 0, Rounding::Eight)
}

pub(super) fn linear_add(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    let residual = &site.launch.operands[0];
    let same = residual.as_ref().map(|r| &r.ty) == site.launch.results.first().map(|r| &r.ty);
    // Wherever it lies, it is added in the result's type.
    if same && site.activation(0).is_some() { prepare(site, 1, Rounding::None) } else { Ok(None) }
}

fn prepare(
    site: &Site<'_>,
    first: usize,
    rounding: Rounding,
) -> Result<Option<Box<dyn Kernel>>, String> {
    let k = site.dim(first, 0)?;
    let bias = site.optional(first + 2)?;
    let in_arena = |i: usize| {
        let value = site.launch.operands[i].as_ref();
        value.is_none_or(|v| matches!(v.arg, Arg::Buffer(_) | Arg::Weight(_)))
    };
    let known =
        bias.is_none_or(|b| float(b.dtype).is_some()) && in_arena(first + 1) && in_arena(first + 2);
    let types = (site.activation(first), float(site.tensor(first + 1)?.dtype), site.result(0));
    Ok(match types {
        (Some(x), Some(w), Some(y)) if known && k > 0 => {
            let bias = bias.and_then(|b| float(b.dtype));
            Some(Box::new(Linear { first, x, w, bias, y, k, rounding }))
        }
        _ => None,
    })
}

impl Kernel for Linear {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let first = self.first;
        let x = act(self.x, args.view(first)?.bytes);
        let add = first > 0;
        let residual = if add { args.source(0)? } else { Source::Here };
        let y = args.take(0)?;
        if let Source::There(residual) = residual {
            y.copy_from_slice(residual);
        }
        let y = act_mut(self.y, y);
        with_matrix(args.operands[first + 1], self.w, self.k, |w| {
            let (isa, t) = (args.isa, x.len() / self.k);
            let run = |bias: Option<&Weights<'_>>| {
                product_onto(isa, x, t, w, bias, y, add, self.rounding)
            };
            match self.bias {
                None => run(None),
                Some(dtype) => {
                    with_rows(args.operands[first + 2], dtype, 1, |bias| run(Some(bias)))?
                }
            }
        })?
    }

    fn reads_values(&self, _: usize) -> bool {
        false
    }
}

/// [`simd::linear`], or its like for codes, with its preconditions checked.
pub(super) fn product(
    isa: Isa,
    x: Act<'_>,
    t: usize,
    w: Matrix<'_>,
    bias: Option<&Weights<'_>>,
    y: ActMut<'_>,
    rounding: Rounding,
) -> Result<(), String> {
    product_onto(isa, x, t, w, bias, y, false, rounding)
}

/// As [`product`]; with `add`, added to what `y` holds.
#[allow(clippy::too_many_arguments, reason = "those of a product")]
fn product_onto(
    isa: Isa,
    x: Act<'_>,
    t: usize,
    w: Matrix<'_>,
    bias: Option<&Weights<'_>>,
    y: ActMut<'_>,
    add: bool,
    rounding: Rounding,
) -> Result<(), String> {
    let (n, k) = w.shape();
    if x.len() != t * k || y.len() != t * n || bias.is_some_and(|b| b.rows() != n) {
        return Err(format!("x [{t}, {k}] and w [{n}, {k}] do not fit their memory"));
    }
    let rounded;
    let x = match (w, rounding) {
        // Plain weights have no kernel of their own for it, as it saves them nothing.
        (Matrix::Plain(_), Rounding::Eight) => {
            rounded = simd::rounded(isa, x, k);
            Act::F32(&rounded)
        }
        _ => x,
    };
    match w {
        Matrix::Plain(w) if add => simd::linear_add(isa, x, t, w, bias, y),
        Matrix::Plain(w) => simd::linear(isa, x, t, w, bias, y),
        Matrix::Packed(w) => simd::linear_codes(isa, x, t, &w, bias, y, add, rounding),
    }
    Ok(())
}

/// A matrix of a weight in its packed form; `None` of any other.
pub(super) fn packed(w: &Loaded, index: usize) -> Option<Codes<'_>> {
    let (encoding, bytes) = w.packed(index)?;
    let [.., rows, columns] = w.shape[..] else { return None };
    Codes::new(encoding, rows, columns, bytes)
}

/// Lends an operand as a matrix of `columns`.
pub(super) fn with_matrix<R>(
    operand: Option<Operand<'_>>,
    dtype: Float,
    columns: usize,
    f: impl FnOnce(Matrix<'_>) -> R,
) -> Result<R, String> {
    if let Some(Operand::Weight(w, _)) = operand
        && let Some(codes) = packed(w, 0)
    {
        return Ok(f(Matrix::Packed(codes)));
    }
    with_rows(operand, dtype, columns, |w| f(Matrix::Plain(w)))
}

/// Lends an operand as rows of `columns`.
pub(super) fn with_rows<R>(
    operand: Option<Operand<'_>>,
    dtype: Float,
    columns: usize,
    f: impl FnOnce(&Weights<'_>) -> R,
) -> Result<R, String> {
    match operand {
        Some(Operand::Weight(w, _)) => with_segments(&w.segments, dtype, columns, f),
        Some(Operand::Tensor(view)) => {
            let weights = Weights::new(dtype, columns, &[view.bytes]).map(|w| f(&w));
            weights.map_err(|e| e.to_string())
        }
        _ => Err("a weight is missing".to_owned()),
    }
}

/// Lends segments as rows of `columns`, without allocating when they are few.
pub(super) fn with_segments<R>(
    segments: &[Bytes],
    dtype: Float,
    columns: usize,
    f: impl FnOnce(&Weights<'_>) -> R,
) -> Result<R, String> {
    const FEW: usize = 8;
    let mut few: [&[u8]; FEW] = [&[]; FEW];
    let many: Vec<&[u8]>;
    let parts: &[&[u8]] = if segments.len() <= FEW {
        few.iter_mut().zip(segments).for_each(|(part, s)| *part = s);
        &few[..segments.len()]
    } else {
        many = segments.iter().map(|s| &**s).collect();
        &many
    };
    Weights::new(dtype, columns, parts).map(|w| f(&w)).map_err(|e| e.to_string())
}

/// A batched product of activations `[.., M, K]` and `[.., K, N]`; the second may be constant.
struct Matmul {
    a: Float,
    b: Float,
    b_type: TensorType,
    k: usize,
    n: usize,
}

pub(super) fn matmul(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    let (Some(a), true) = (site.activation(0), site.channel(1)) else { return Ok(None) };
    let b_type = site.tensor(1)?.clone();
    let (Some(b), Ok(k), Ok(n)) = (float(b_type.dtype), site.dim(0, 0), site.dim(1, 0)) else {
        return Ok(None);
    };
    Ok(Some(Box::new(Matmul { a, b, b_type, k, n })))
}

impl Kernel for Matmul {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (k, n, isa) = (self.k, self.n, args.isa);
        let b = match args.operands[1] {
            Some(Operand::Weight(w, _)) => {
                Act::F32(w.values.as_deref().ok_or("a constant was not widened")?)
            }
            _ => act(self.b, args.view(1)?.bytes),
        };
        let (a, out) = (args.view(0)?.bytes, args.take(0)?);
        let lead = self.b_type.rank() - 2;
        let batches = super::product(&self.b_type.shape[..lead], args.dims()).max(1);
        let row_bytes = n * self.a.size();
        let m = (out.len() / row_bytes.max(1) / batches).max(1);
        parallel::rows(out, row_bytes, k * n, |row, out| {
            let left = &a[row * k * self.a.size()..][..k * self.a.size()];
            let right = b.slice(row / m * k * n..(row / m + 1) * k * n);
            parallel::scratch(0, k + n, |memory| {
                let (left_row, sum) = memory.split_at_mut(k);
                simd::widen_bytes(isa, self.a, left, left_row);
                sum.fill(0.0);
                simd::axpy_rows(isa, sum, left_row, right, n);
                simd::narrow(isa, sum, act_mut(self.a, out));
            });
        });
        Ok(())
    }
}
