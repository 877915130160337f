//! Elementwise ops: one expression, run on blocks of f32.

use infernum_ir::expr::{BinaryOp, Expr, Func, Instr, ScalarFn};
use infernum_ir::{Dim, Dims, Op, TensorType};

use super::super::simd::{self, Isa};
use super::{Args, Float, Kernel, Operand, Site, Source, act_mut, float, math, parallel};

/// Elements that each instruction works on: its registers stay in the first-level cache.
pub(super) const BLOCK: usize = 256;

/// Most dimensions of an operand that broadcasts irregularly.
const MAX_RANK: usize = 8;

struct Elementwise {
    code: Vec<Instr>,
    depth: usize,
    /// How each operand is read; `None` where it is left out.
    reads: Vec<Option<Read>>,
    dtype: Float,
}

struct Read {
    dtype: Float,
    broadcast: Broadcast,
}

/// How an operand spreads over the first one's elements.
enum Broadcast {
    /// Element for element.
    Same,
    /// Again and again along the outer dimensions: these are its own.
    Period(Vec<Dim>),
    /// Each element over this many.
    Repeat(Vec<Dim>),
    /// Otherwise: the first operand's shape, and its own of as many dimensions.
    General(Vec<Dim>, Vec<Dim>),
}

pub(super) fn pointwise(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    match site.op()?.pointwise_fn(&site.attrs) {
        Some(f) => elementwise(site, &f?),
        None => Ok(None),
    }
}

/// SwiGLU of two operands, which is `silu` and `mul` in one.
pub(super) fn swiglu(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    fused(site, "silu")
}

/// GeGLU of two operands, which is `gelu_tanh` and `mul` in one.
pub(super) fn geglu(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    fused(site, "gelu_tanh")
}

fn fused(site: &Site<'_>, activation: &str) -> Result<Option<Box<dyn Kernel>>, String> {
    let expr = Op::find(activation)?.pointwise(&[]).ok_or("not an activation")??;
    let product = format!("({expr}) * up").parse::<Expr>().map_err(|e| e.to_string())?;
    let f = ScalarFn::compile(&product, &["x", "up"]).map_err(|e| e.to_string())?;
    elementwise(site, &f)
}

/// Activations' elements, the gate's and the other half's, side by side in one row.
struct Packed<F> {
    gate: F,
    x: Float,
    y: Float,
    n: usize,
}

pub(super) fn swiglu_packed(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    packed(site, |x| x / (1.0 + math::exp(-x)))
}

pub(super) fn geglu_packed(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    packed(site, math::gelu_tanh)
}

fn packed<F>(site: &Site<'_>, gate: F) -> Result<Option<Box<dyn Kernel>>, String>
where
    F: Fn(f32) -> f32 + Send + Sync + 'static,
{
    let (Some(x), Some(y)) = (site.activation(0), site.result(0)) else { return Ok(None) };
    Ok(Some(Box::new(Packed { gate, x, y, n: site.dim(0, 0)? / 2 })))
}

impl<F: Fn(f32) -> f32 + Send + Sync> Kernel for Packed<F> {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (x, out, isa, n) = (args.view(0)?.bytes, args.take(0)?, args.isa, self.n);
        let row_bytes = 2 * n * self.x.size();
        parallel::rows(out, n * self.y.size(), 16 * n, |i, out| {
            parallel::scratch(0, 2 * n, |values| {
                let row = &x[i * row_bytes..][..row_bytes];
                simd::widen_bytes(isa, self.x, row, values);
                let (gate, up) = values.split_at_mut(n);
                gate.iter_mut().zip(up).for_each(|(g, u)| *g = (self.gate)(*g) * *u);
                simd::narrow(isa, gate, act_mut(self.y, out));
            });
        });
        Ok(())
    }
}

fn elementwise(site: &Site<'_>, f: &ScalarFn) -> Result<Option<Box<dyn Kernel>>, String> {
    let (Some(dtype), Some(_)) = (site.result(0), site.activation(0)) else { return Ok(None) };
    let a = site.tensor(0)?;
    let mut reads = Vec::new();
    for i in 0..site.launch.operands.len() {
        let read = site.optional(i)?.map(|ty| {
            let dtype = float(ty.dtype).filter(|_| site.channel(i))?;
            Some(Read { dtype, broadcast: broadcast(ty, a)? })
        });
        match read {
            None => reads.push(None),
            Some(Some(read)) => reads.push(Some(read)),
            Some(None) => return Ok(None),
        }
    }
    // An operand that is left out is NaN, as in the reference.
    Ok(Some(Box::new(Elementwise {
        code: f.code().to_vec(),
        depth: f.stack_depth(),
        reads,
        dtype,
    })))
}

fn broadcast(b: &TensorType, a: &TensorType) -> Option<Broadcast> {
    let one = Dim::Const(1);
    if a.shape == b.shape {
        return Some(Broadcast::Same);
    }
    if a.is_ragged() || a.rank() > MAX_RANK {
        return None;
    }
    let own: Vec<Dim> = b.shape.iter().copied().skip_while(|d| *d == one).collect();
    if a.shape.ends_with(&own) {
        return Some(Broadcast::Period(own));
    }
    let ones = b.shape.iter().rev().take_while(|d| **d == one).count();
    let (lead, rest) = a.shape.split_at(a.rank() - ones);
    if b.rank() == a.rank() && b.shape.starts_with(lead) {
        return Some(Broadcast::Repeat(rest.to_vec()));
    }
    let mut padded = vec![one; a.rank() - b.rank()];
    padded.extend(&b.shape);
    Some(Broadcast::General(a.shape.clone(), padded))
}

/// An operand's elements.
#[derive(Clone, Copy)]
enum Elements<'a> {
    Wide(&'a [f32]),
    Stored(Float, &'a [u8]),
    /// In the result's own block, of its type.
    Here(Float),
}

impl Elements<'_> {
    fn range(self, isa: Isa, start: usize, out: &mut [f32]) {
        match self {
            Elements::Wide(x) => out.copy_from_slice(&x[start..start + out.len()]),
            Elements::Stored(dtype, bytes) => {
                let n = out.len() * dtype.size();
                simd::widen_bytes(isa, dtype, &bytes[start * dtype.size()..][..n], out);
            }
            Elements::Here(_) => {}
        }
    }

    fn get(self, isa: Isa, i: usize) -> f32 {
        let mut one = [0.0];
        self.range(isa, i, &mut one);
        one[0]
    }
}

impl Read {
    /// The elements for the block of the result that begins at `start`.
    fn fill(&self, from: Elements<'_>, isa: Isa, dims: &Dims, start: usize, out: &mut [f32]) {
        let product = |shape: &[Dim]| super::product(shape, dims).max(1);
        match &self.broadcast {
            Broadcast::Same => from.range(isa, start, out),
            Broadcast::Period(own) => {
                let period = product(own);
                let mut done = 0;
                while done < out.len() {
                    let at = (start + done) % period;
                    let n = (period - at).min(out.len() - done);
                    from.range(isa, at, &mut out[done..done + n]);
                    done += n;
                }
            }
            Broadcast::Repeat(over) => {
                let times = product(over);
                let mut done = 0;
                while done < out.len() {
                    let n = (times - (start + done) % times).min(out.len() - done);
                    out[done..done + n].fill(from.get(isa, (start + done) / times));
                    done += n;
                }
            }
            Broadcast::General(onto, own) => {
                for (i, v) in out.iter_mut().enumerate() {
                    let (mut rest, mut at, mut stride) = (start + i, 0, 1);
                    for (a, b) in onto.iter().zip(own).rev() {
                        let (a, b) = (a.eval(dims).max(1) as usize, b.eval(dims) as usize);
                        at += if b == 1 { 0 } else { rest % a * stride };
                        rest /= a;
                        stride *= b;
                    }
                    *v = from.get(isa, at);
                }
            }
        }
    }
}

impl Kernel for Elementwise {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let mut inputs = [None; super::MAX_ARGS];
        for (i, read) in self.reads.iter().enumerate() {
            let Some(read) = read else { continue };
            inputs[i] = Some(match args.operands[i] {
                Some(Operand::Weight(w, _)) => {
                    Elements::Wide(w.values.as_deref().ok_or("a constant was not widened")?)
                }
                _ => match args.source(i)? {
                    Source::Here => Elements::Here(read.dtype),
                    Source::There(bytes) => Elements::Stored(read.dtype, bytes),
                },
            });
        }
        let (out, dims, isa) = (args.take(0)?, args.dims(), args.isa);
        let registers = (self.reads.len() + self.depth) * BLOCK;
        parallel::rows(out, BLOCK * self.dtype.size(), BLOCK * self.code.len(), |b, out| {
            let n = out.len() / self.dtype.size();
            parallel::scratch(0, registers, |memory| {
                let (loaded, stack) = memory.split_at_mut(self.reads.len() * BLOCK);
                let loads = loaded.chunks_exact_mut(BLOCK).zip(&self.reads).zip(&inputs);
                for ((values, read), from) in loads {
                    match (read, from) {
                        (_, Some(Elements::Here(dtype))) => {
                            simd::widen_bytes(isa, *dtype, out, &mut values[..n]);
                        }
                        (Some(read), Some(from)) => {
                            read.fill(*from, isa, dims, b * BLOCK, &mut values[..n]);
                        }
                        _ => values.fill(f32::NAN),
                    }
                }
                eval(&self.code, loaded, stack, n);
                simd::narrow(isa, &stack[..n], act_mut(self.dtype, out));
            });
        });
        Ok(())
    }
}

/// Runs `code` on the first `n` of each [`BLOCK`] in `loaded`, an argument each; the result is left at the bottom of the stack.
pub(super) fn eval(code: &[Instr], loaded: &[f32], stack: &mut [f32], n: usize) {
    let mut top = 0;
    for instr in code {
        match instr {
            Instr::Num(x) => {
                stack[top * BLOCK..][..n].fill(*x as f32);
                top += 1;
            }
            Instr::Arg(i) => {
                stack[top * BLOCK..][..n].copy_from_slice(&loaded[i * BLOCK..][..n]);
                top += 1;
            }
            Instr::Neg => each(below(stack, top, n), |x| -x),
            Instr::Not => each(below(stack, top, n), |x| f32::from(u8::from(x == 0.0))),
            Instr::Binary(op) => {
                top -= 1;
                let (a, b) = stack.split_at_mut(top * BLOCK);
                binary(*op, below(a, top, n), &b[..n]);
            }
            Instr::Call(f @ (Func::Min | Func::Max)) => {
                top -= 1;
                let (a, b) = stack.split_at_mut(top * BLOCK);
                let choose = if *f == Func::Min { f32::min } else { f32::max };
                both(below(a, top, n), &b[..n], choose);
            }
            Instr::Call(f) => unary(*f, below(stack, top, n)),
            Instr::Select => {
                top -= 2;
                let (c, rest) = stack.split_at_mut(top * BLOCK);
                let (a, b) = rest.split_at(BLOCK);
                for ((c, a), b) in below(c, top, n).iter_mut().zip(a).zip(b) {
                    *c = if *c == 0.0 { *b } else { *a };
                }
            }
            Instr::Lookup(list) => each(below(stack, top, n), |x| {
                list[(x.max(0.0) as usize).min(list.len() - 1)] as f32
            }),
        }
    }
}

/// The block on top of a stack of `top`.
fn below(stack: &mut [f32], top: usize, n: usize) -> &mut [f32] {
    &mut stack[(top - 1) * BLOCK..][..n]
}

fn each(x: &mut [f32], f: impl Fn(f32) -> f32) {
    for x in x {
        *x = f(*x);
    }
}

fn both(a: &mut [f32], b: &[f32], f: impl Fn(f32, f32) -> f32) {
    a.iter_mut().zip(b).for_each(|(a, b)| *a = f(*a, *b));
}

fn unary(f: Func, x: &mut [f32]) {
    match f {
        Func::Exp => each(x, math::exp),
        Func::Tanh => each(x, math::tanh),
        Func::Erf => each(x, libm::erff),
        Func::Log => each(x, f32::ln),
        Func::Sqrt => each(x, f32::sqrt),
        Func::Sin => each(x, f32::sin),
        Func::Cos => each(x, f32::cos),
        Func::Abs => each(x, f32::abs),
        Func::Floor => each(x, f32::floor),
        Func::Ceil => each(x, f32::ceil),
        Func::Round => each(x, f32::round_ties_even),
        // Binary, or refused when the expression was compiled.
        Func::Min
        | Func::Max
        | Func::Len
        | Func::Contains
        | Func::First
        | Func::Last
        | Func::Places => x.fill(f32::NAN),
    }
}

fn binary(op: BinaryOp, a: &mut [f32], b: &[f32]) {
    let flag = |b: bool| f32::from(u8::from(b));
    match op {
        BinaryOp::Add => both(a, b, |a, b| a + b),
        BinaryOp::Sub => both(a, b, |a, b| a - b),
        BinaryOp::Mul => both(a, b, |a, b| a * b),
        BinaryOp::Div => both(a, b, |a, b| a / b),
        BinaryOp::Rem => both(a, b, |a, b| a % b),
        BinaryOp::Pow => both(a, b, f32::powf),
        BinaryOp::Lt => both(a, b, |a, b| flag(a < b)),
        BinaryOp::Le => both(a, b, |a, b| flag(a <= b)),
        BinaryOp::Gt => both(a, b, |a, b| flag(a > b)),
        BinaryOp::Ge => both(a, b, |a, b| flag(a >= b)),
        BinaryOp::Eq => both(a, b, |a, b| flag(a == b)),
        BinaryOp::Ne => both(a, b, |a, b| flag(a != b)),
        BinaryOp::And => both(a, b, |a, b| flag(a != 0.0 && b != 0.0)),
        BinaryOp::Or => both(a, b, |a, b| flag(a != 0.0 || b != 0.0)),
        BinaryOp::BitOr | BinaryOp::BitXor | BinaryOp::BitAnd | BinaryOp::Shl | BinaryOp::Shr => {
            both(a, b, |a, b| op.bits(a as i64, b as i64).map_or(f32::NAN, |bits| bits as f32));
        }
        BinaryOp::Coalesce => {}
    }
}
