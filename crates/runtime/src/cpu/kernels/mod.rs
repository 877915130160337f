//! CPU kernels: one table by op name; any other op runs its reference.
//!
//! Values are stored in their element type, computed in f32 and rounded once.

#![allow(clippy::unnecessary_wraps, reason = "the table's functions have one type")]

mod adapt;
mod argmax;
mod attention;
mod causal_conv;
mod chains;
mod codes;
mod dequantise;
mod experts;
mod head_linear;
mod latent;
mod linear;
mod math;
mod moves;
mod norm;
mod paged;
mod parallel;
mod pointwise;
mod reduce;
mod reference;
mod rope;
mod rope_kv;
mod scan;
mod slot;
mod topk;

use infernum_codegen::{Arg, Launch};
use infernum_ir::{Attr, DType, Dim, Dims, Op, StateType, StepInput, TensorType, Type};

pub(crate) use rope::RopeTables;

use super::memory::MAX_ARGS;
use super::simd::{Act, ActMut, Float, Isa};
use super::state::StepState;
use crate::exec::weights::Loaded;

/// A launch, made ready once.
pub(crate) trait Kernel: Send + Sync {
    /// Computes the results; everything that can fail is named in the message.
    fn run(&self, args: &mut Args<'_>) -> Result<(), String>;

    /// Whether a constant operand is used as widened values ([`Args::channel`]), not in its bytes.
    fn reads_values(&self, _operand: usize) -> bool {
        true
    }

    /// Whether it is the slow fallback.
    fn is_reference(&self) -> bool {
        false
    }
}

/// Makes a kernel; `None` when the kernel does not do this case.
type Prepare = fn(&Site<'_>) -> Result<Option<Box<dyn Kernel>>, String>;

/// Every op with a kernel of its own.
static CPU_KERNELS: &[(&str, Prepare)] = &[
    (Launch::COPY, moves::copy),
    ("adapt", adapt::adapt),
    ("add_rmsnorm", norm::add_rmsnorm),
    ("argmax", argmax::argmax),
    ("attention", paged::attention),
    ("cast", moves::cast),
    ("causal_conv", causal_conv::causal_conv),
    ("concat", moves::concat),
    ("dequantise", dequantise::dequantise),
    ("embedding", moves::embedding),
    ("expert_linear", experts::expert_linear),
    ("expert_linear_a8", experts::expert_linear_a8),
    ("gather_norm_linear", chains::gather_norm_linear),
    ("gather_rows", moves::gather_rows),
    ("geglu", pointwise::geglu),
    ("geglu_packed", pointwise::geglu_packed),
    ("head_linear", head_linear::head_linear),
    ("kv_read", moves::kv_read),
    ("kv_write", moves::kv_write),
    ("latent_attention", latent::latent_attention),
    ("layernorm", norm::layernorm),
    ("linear", linear::linear),
    ("linear_a8", linear::linear_a8),
    ("linear_geglu", chains::linear_geglu),
    ("linear_swiglu", chains::linear_swiglu),
    ("norm_linear", chains::norm_linear),
    ("norm_linear_geglu", chains::norm_linear_geglu),
    ("norm_linear_swiglu", chains::norm_linear_swiglu),
    ("linear_add", linear::linear_add),
    ("mask", attention::mask),
    ("mask_far", attention::mask_far),
    ("matmul", linear::matmul),
    ("mix", attention::mix),
    ("paged_attention", paged::paged_attention),
    ("qk_rope_kv_write", rope_kv::qk_rope_kv_write),
    ("qkv_rope_kv_write", rope_kv::qkv_rope_kv_write),
    ("reduce", reduce::reduce),
    ("rmsnorm", norm::rmsnorm),
    ("rope", rope::rope),
    ("rope_kv_write", rope_kv::rope_kv_write),
    ("scan", scan::scan),
    ("scores", attention::scores),
    ("slice", moves::slice),
    ("softmax", attention::softmax),
    ("swiglu", pointwise::swiglu),
    ("swiglu_packed", pointwise::swiglu_packed),
    ("topk", topk::topk),
];

/// Whether the CPU has a kernel for an op. A fused op that has none must be expanded before a plan
/// is made; a primitive that has none runs its reference.
pub fn has_kernel(name: &str) -> bool {
    CPU_KERNELS.iter().any(|(kernel, _)| *kernel == name)
}

/// A launch being prepared.
pub(super) struct Site<'a> {
    pub(super) launch: &'a Launch,
    /// The primitive that it is; `None` for a copy and for fused ops.
    op: Option<Op>,
    /// Its attributes without their names.
    attrs: Vec<Attr>,
    /// Whether a row's numbers must not depend on how many rows there are.
    pub(super) reproducible: bool,
}

/// Prepares a launch of a plan, which is `reproducible` or not: its own kernel, the elementwise one, or the
/// reference.
pub(super) fn prepare(launch: &Launch, reproducible: bool) -> Result<Box<dyn Kernel>, String> {
    let types: Vec<Option<&Type>> =
        launch.operands.iter().map(|v| v.as_ref().map(|v| &v.ty)).collect();
    let attrs: Vec<Attr> = launch.attrs.iter().map(|(_, attr)| attr.clone()).collect();
    let own = CPU_KERNELS.iter().find(|(name, _)| *name == launch.op);
    let op = match Op::find(&launch.op) {
        Ok(op) => {
            if op.infer(&types, &attrs)?.iter().ne(launch.results.iter().map(|r| &r.ty)) {
                return Err("its result types are not those of its operands".to_owned());
            }
            Some(op)
        }
        Err(_) if own.is_some() => None,
        Err(unknown) => return Err(unknown),
    };
    let site = Site { launch, op, attrs, reproducible };
    let kernel = match own {
        Some((_, prepare)) => prepare(&site)?,
        None => pointwise::pointwise(&site)?,
    };
    match kernel {
        Some(kernel) => Ok(kernel),
        None => reference::reference(&site),
    }
}

impl<'a> Site<'a> {
    fn op(&self) -> Result<Op, String> {
        self.op.ok_or_else(|| format!("the CPU's kernel for `{}` cannot do this", self.launch.op))
    }

    /// Operand `i`, which the declaration says is a tensor.
    fn tensor(&self, i: usize) -> Result<&'a TensorType, String> {
        self.optional(i)?.ok_or_else(|| format!("operand {i} is missing"))
    }

    /// Operand `i`, if present.
    fn optional(&self, i: usize) -> Result<Option<&'a TensorType>, String> {
        let value = self.launch.operands.get(i).and_then(Option::as_ref);
        value.map(|v| v.ty.tensor()).transpose()
    }

    /// Operand `i`, a plane of the cache.
    fn state(&self, i: usize) -> Result<&'a StateType, String> {
        let value = self.launch.operands.get(i).and_then(Option::as_ref);
        value.ok_or_else(|| format!("operand {i} is missing"))?.ty.state()
    }

    fn attr(&self, name: &str) -> &'a Attr {
        self.launch.attr(name).unwrap_or(&Attr::None)
    }

    /// An integer attribute, or 0 when it is absent.
    fn int(&self, name: &str) -> u64 {
        self.maybe_int(name).unwrap_or(0)
    }

    fn maybe_int(&self, name: &str) -> Option<u64> {
        if let Attr::Int(n) = self.attr(name) { u64::try_from(*n).ok() } else { None }
    }

    /// A float attribute, or 0 when it is absent.
    fn num(&self, name: &str) -> f64 {
        self.maybe_num(name).unwrap_or(0.0)
    }

    fn maybe_num(&self, name: &str) -> Option<f64> {
        if let Attr::Float(x) = self.attr(name) { Some(*x) } else { None }
    }

    fn choice(&self, name: &str) -> &'a str {
        if let Attr::Enum(s) = self.attr(name) { s } else { "" }
    }

    /// The element type of a float operand that is activations, if kernels can read it.
    fn activation(&self, i: usize) -> Option<Float> {
        let value = self.launch.operands.get(i)?.as_ref()?;
        match (value.arg, &value.ty) {
            (Arg::Buffer(_), Type::Tensor(ty)) => float(ty.dtype),
            _ => None,
        }
    }

    /// The element type of operand `i`, a float constant or activations; or of one left out.
    fn channel(&self, i: usize) -> bool {
        match self.launch.operands.get(i) {
            Some(Some(value)) => {
                matches!(&value.ty, Type::Tensor(ty) if float(ty.dtype).is_some())
                    && matches!(value.arg, Arg::Buffer(_) | Arg::Weight(_))
            }
            _ => true,
        }
    }

    fn result(&self, i: usize) -> Option<Float> {
        float(self.launch.results.get(i)?.ty.tensor().ok()?.dtype)
    }

    /// A constant dimension of operand `i`, counted from the innermost.
    fn dim(&self, i: usize, from_last: usize) -> Result<usize, String> {
        let ty = self.tensor(i)?;
        let dim = ty.shape.iter().rev().nth(from_last).and_then(|d| d.as_const());
        dim.map(|d| d as usize).ok_or_else(|| format!("{ty} has no constant dimension there"))
    }
}

/// The scalar floats that kernels compute with.
pub(crate) fn float(dtype: DType) -> Option<Float> {
    match dtype {
        DType::F32 => Some(Float::F32),
        DType::Bf16 => Some(Float::Bf16),
        DType::F16 => Some(Float::F16),
        _ => None,
    }
}

/// A launch being run.
pub(crate) struct Args<'a> {
    pub(crate) step: &'a StepState,
    pub(crate) operands: [Option<Operand<'a>>; MAX_ARGS],
    pub(crate) results: [Option<ViewMut<'a>>; MAX_ARGS],
    /// The cache planes it works on, by operand.
    pub(crate) planes: [Option<Plane<'a>>; MAX_ARGS],
    pub(crate) rope: &'a mut RopeTables,
    pub(crate) isa: Isa,
}

/// An operand.
#[derive(Clone, Copy)]
pub(crate) enum Operand<'a> {
    Tensor(View<'a>),
    /// It lies where a result goes: result 0.
    InPlace,
    /// A constant, with its index in the plan.
    Weight(&'a Loaded, u32),
    /// One of [`Args::planes`].
    State,
}

/// A tensor to read; its bytes are aligned to its elements.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub(crate) dtype: DType,
    pub(crate) bytes: &'a [u8],
    /// Which input of the step it is.
    pub(crate) input: Option<StepInput>,
}

/// A tensor to write.
pub(crate) struct ViewMut<'a> {
    pub(crate) dtype: DType,
    pub(crate) bytes: &'a mut [u8],
}

/// A plane of the KV cache.
pub(crate) struct Plane<'a> {
    pub(crate) bytes: &'a mut [u8],
    /// Bytes of a row of its array: of a row of its own, if it has rows.
    pub(crate) row_bytes: usize,
    /// Of a slot: the first of its blocks among those of its group.
    pub(crate) first: usize,
}

impl<'a> Args<'a> {
    fn dims(&self) -> &'a Dims {
        &self.step.dims
    }

    /// Takes result `i`'s memory.
    fn take(&mut self, i: usize) -> Result<&'a mut [u8], String> {
        let view = self.results[i].take();
        view.map(|v| v.bytes).ok_or_else(|| format!("result {i} has no place"))
    }

    /// Operand `i`, a tensor that is not in place.
    fn view(&self, i: usize) -> Result<View<'a>, String> {
        match self.operands[i] {
            Some(Operand::Tensor(view)) => Ok(view),
            _ => Err(format!("operand {i} is not in the arena")),
        }
    }

    /// Operand `i`, where it is read row by row just before the same row is written.
    fn source(&self, i: usize) -> Result<Source<'a>, String> {
        match self.operands[i] {
            Some(Operand::InPlace) => Ok(Source::Here),
            _ => Ok(Source::There(self.view(i)?.bytes)),
        }
    }

    /// The plane that operand `i` is the newest version of.
    fn plane(&mut self, i: usize) -> Result<Plane<'a>, String> {
        self.planes[i].take().ok_or_else(|| format!("operand {i} is no cache plane"))
    }

    /// A small float operand as f32; `None` if it is left out.
    fn channel(&self, i: usize) -> Result<Option<std::borrow::Cow<'a, [f32]>>, String> {
        Ok(match self.operands[i] {
            None => None,
            Some(Operand::Weight(w, _)) => {
                Some(w.values.as_deref().ok_or("a constant was not widened")?.into())
            }
            Some(Operand::Tensor(view)) => {
                let dtype = float(view.dtype).ok_or("expected a float operand")?;
                let mut out = vec![0.0; view.bytes.len() / dtype.size()];
                super::simd::widen_bytes(self.isa, dtype, view.bytes, &mut out);
                Some(out.into())
            }
            Some(_) => return Err(format!("operand {i} cannot be read")),
        })
    }

    /// Operand `i`, integers.
    fn ids(&self, i: usize) -> Result<Ids<'a>, String> {
        let View { dtype, bytes, .. } = self.view(i)?;
        match dtype {
            DType::U32 => Ok(Ids::U32(bytemuck::cast_slice(bytes))),
            DType::I32 => Ok(Ids::I32(bytemuck::cast_slice(bytes))),
            _ => Err(format!("operand {i}: expected integers, found {dtype}")),
        }
    }
}

/// Where a row of an operand is read.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    /// In the result's own row.
    Here,
    /// In other memory of the same layout.
    There(&'a [u8]),
}

impl<'a> Source<'a> {
    /// Bytes `from..from + row.len()`, given the result's memory there.
    fn row<'r>(self, from: usize, row: &'r [u8]) -> &'r [u8]
    where
        'a: 'r,
    {
        match self {
            Source::Here => row,
            Source::There(bytes) => &bytes[from..from + row.len()],
        }
    }
}

/// Integers to read.
#[derive(Clone, Copy)]
pub(super) enum Ids<'a> {
    U32(&'a [u32]),
    I32(&'a [i32]),
}

impl Ids<'_> {
    fn len(self) -> usize {
        match self {
            Ids::U32(x) => x.len(),
            Ids::I32(x) => x.len(),
        }
    }

    fn get(self, i: usize) -> i64 {
        match self {
            Ids::U32(x) => i64::from(x[i]),
            Ids::I32(x) => i64::from(x[i]),
        }
    }

    /// Element `i`, a row of a table of `rows`.
    fn row(self, i: usize, rows: usize) -> Result<usize, String> {
        let id = self.get(i);
        usize::try_from(id)
            .ok()
            .filter(|row| *row < rows)
            .ok_or_else(|| format!("row {id} is outside a table of {rows}"))
    }
}

/// Activations of an element type, from aligned bytes.
fn act(dtype: Float, bytes: &[u8]) -> Act<'_> {
    match dtype {
        Float::F32 => Act::F32(bytemuck::cast_slice(bytes)),
        Float::Bf16 => Act::Bf16(bytemuck::cast_slice(bytes)),
        Float::F16 => Act::F16(bytemuck::cast_slice(bytes)),
    }
}

/// As [`act`], to write.
fn act_mut(dtype: Float, bytes: &mut [u8]) -> ActMut<'_> {
    match dtype {
        Float::F32 => ActMut::F32(bytemuck::cast_slice_mut(bytes)),
        Float::Bf16 => ActMut::Bf16(bytemuck::cast_slice_mut(bytes)),
        Float::F16 => ActMut::F16(bytemuck::cast_slice_mut(bytes)),
    }
}

/// The product of some dimensions.
fn product(shape: &[Dim], dims: &Dims) -> usize {
    shape.iter().map(|d| d.eval(dims) as usize).product()
}

/// Sizes around an axis: (outside, along, inside). The inside of a ragged value is its pairs.
fn around(ty: &TensorType, axis: usize, dims: &Dims) -> (usize, usize, usize) {
    let inner = if ty.is_ragged() && axis + 2 < ty.rank() {
        product(&ty.shape[axis + 1..ty.rank() - 2], dims) * dims.pairs as usize
    } else {
        product(&ty.shape[axis + 1..], dims)
    };
    (product(&ty.shape[..axis], dims), ty.shape[axis].eval(dims) as usize, inner)
}
