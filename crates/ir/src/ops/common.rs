//! What many ops' type rules and references share.

use super::{Eval, OpCall, Work};
use crate::attr::Attr;
use crate::interp::Tensor;
use crate::{DType, Dim, Dims, StateType, TensorType, Type};

impl<'a> OpCall<'a> {
    /// Operand `i`, which the declaration says is present.
    pub fn tensor(&self, i: usize) -> Result<&'a TensorType, String> {
        self.optional(i)?.ok_or_else(|| format!("operand `{}` is missing", self.name(i)))
    }

    /// Operand `i`, if present.
    pub fn optional(&self, i: usize) -> Result<Option<&'a TensorType>, String> {
        self.operands[i]
            .map(|t| t.tensor().map_err(|e| format!("operand `{}`: {e}", self.name(i))))
            .transpose()
    }

    /// Operand `i`, a KV-cache state that has rows.
    pub fn state(&self, i: usize) -> Result<&'a StateType, String> {
        self.plane(i, false)
    }

    /// Operand `i`, a state of a fixed size.
    pub fn slot(&self, i: usize) -> Result<&'a StateType, String> {
        self.plane(i, true)
    }

    fn plane(&self, i: usize, is_slot: bool) -> Result<&'a StateType, String> {
        let name = self.name(i);
        let state = self.operands[i]
            .ok_or_else(|| format!("operand `{name}` is missing"))?
            .state()
            .map_err(|e| format!("operand `{name}`: {e}"))?;
        if state.is_slot() != is_slot {
            let expected = if is_slot { "a slot" } else { "a state that has rows" };
            return Err(format!("operand `{name}`: expected {expected}, found {state}"));
        }
        Ok(state)
    }

    /// Operand `i`, a floating-point tensor of at least `rank` dimensions.
    pub fn float(&self, i: usize, rank: usize) -> Result<&'a TensorType, String> {
        let t = self.tensor(i)?;
        if !t.dtype.is_float() {
            return Err(self.mismatch(i, "a floating-point element type", t));
        }
        if t.rank() < rank {
            return Err(self.mismatch(i, &format!("at least {rank} dimension(s)"), t));
        }
        Ok(t)
    }

    /// [`OpCall::float`], and not ragged.
    pub fn dense(&self, i: usize, rank: usize) -> Result<&'a TensorType, String> {
        let t = self.float(i, rank)?;
        if t.is_ragged() {
            return Err(self.mismatch(i, "a tensor that is not ragged", t));
        }
        Ok(t)
    }

    /// Operand `i`, an integer tensor of exactly `rank` dimensions.
    pub fn index(&self, i: usize, rank: usize) -> Result<&'a TensorType, String> {
        let t = self.tensor(i)?;
        if !matches!(t.dtype, DType::I32 | DType::U32) || t.rank() != rank {
            return Err(self.mismatch(i, &format!("integers with {rank} dimension(s)"), t));
        }
        Ok(t)
    }

    /// Checks an optional per-channel weight `[n]`.
    pub fn channel_weight(&self, i: usize, n: Dim) -> Result<(), String> {
        match self.optional(i)? {
            Some(t) if t.shape != [n] || !t.dtype.is_float() => {
                Err(self.mismatch(i, &format!("[{n}]"), t))
            }
            _ => Ok(()),
        }
    }

    /// `operand `x`: expected .., found ..`.
    pub fn mismatch(&self, i: usize, expected: &str, found: &TensorType) -> String {
        format!("operand `{}`: expected {expected}, found {found}", self.name(i))
    }

    fn name(&self, i: usize) -> &'static str {
        self.op.operands[i].name
    }

    fn attr(&self, name: &str) -> &'a Attr {
        // `Op::infer` has checked the attribute list against the declaration.
        self.op.attr(name).map_or(&Attr::None, |i| &self.attrs[i])
    }

    /// An integer attribute, or 0 when it is absent.
    pub fn int(&self, name: &str) -> u64 {
        self.maybe_int(name).unwrap_or(0)
    }

    /// An optional integer attribute.
    pub fn maybe_int(&self, name: &str) -> Option<u64> {
        match self.attr(name) {
            Attr::Int(n) => Some(*n as u64),
            _ => None,
        }
    }

    /// A float attribute, or 0 when it is absent.
    pub fn num(&self, name: &str) -> f64 {
        match self.attr(name) {
            Attr::Float(x) => *x,
            _ => 0.0,
        }
    }

    /// True for a flag that is set.
    pub fn flag(&self, name: &str) -> bool {
        matches!(self.attr(name), Attr::Bool(true))
    }

    /// An enum attribute.
    pub fn choice(&self, name: &str) -> &'a str {
        match self.attr(name) {
            Attr::Enum(s) => s,
            _ => "",
        }
    }

    /// A dtype attribute, if present.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        match self.attr(name) {
            Attr::DType(d) => Some(*d),
            _ => None,
        }
    }

    /// A shape attribute.
    pub fn dims(&self, name: &str) -> &'a [Dim] {
        match self.attr(name) {
            Attr::Dims(d) => d,
            _ => &[],
        }
    }
}

impl<'a> Eval<'a> {
    /// Value of operand `i`, which type inference has found present.
    pub fn value(&self, i: usize) -> Result<&'a Tensor, String> {
        self.values[i].ok_or_else(|| format!("operand {i} has no value"))
    }

    /// The shape of result `i` in this step.
    pub fn sizes(&self, i: usize) -> Result<Vec<usize>, String> {
        Ok(self.results[i].tensor()?.sizes(&self.step.dims()))
    }
}

/// The adapter of a token's slot, of `adapters`: slot 0 is none, slot 1 the first.
pub(super) fn adapter_of(slot: f64, adapters: usize) -> Result<Option<usize>, String> {
    match (slot as usize).checked_sub(1) {
        Some(adapter) if adapter >= adapters => {
            Err(format!("adapter {} of {adapters}", adapter + 1))
        }
        adapter => Ok(adapter),
    }
}

/// The sum of products. Eight sums side by side, since each waits for the one before it: references of the largest products that
/// checks of kernels try took seconds each.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    const SIDE: usize = 8;
    let mut sums = [0.0; SIDE];
    let (a, b) = (a.chunks_exact(SIDE), b.chunks_exact(SIDE));
    let rest: f64 = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a.zip(b) {
        for i in 0..SIDE {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f64>() + rest
}

/// One result with the type of operand 0.
pub(super) fn like_first(call: &OpCall<'_>) -> Result<Vec<Type>, String> {
    Ok(vec![call.float(0, 1)?.clone().into()])
}

/// One activation. A shape ending in `T, S` means ragged, which only attention's own ops produce.
pub(super) fn dense(dtype: DType, shape: impl Into<Vec<Dim>>) -> Result<Vec<Type>, String> {
    let result = TensorType::act(dtype, shape);
    if result.is_ragged() {
        return Err(format!("the result would have every element of {result}, which is ragged"));
    }
    Ok(vec![result.into()])
}

/// Reads every operand and writes every result once; `flops_per_element` on each result element.
pub(super) fn streaming(
    call: &OpCall<'_>,
    results: &[Type],
    dims: &Dims,
    flops_per_element: u64,
) -> Work {
    let bytes = |t: &Type| bytes_of(t, dims);
    let elements = |t: &Type| t.tensor().map_or(0, |t| t.elements(dims));
    let moved = call.operands.iter().flatten().map(|t| bytes(t)).chain(results.iter().map(bytes));
    Work {
        bytes: moved.fold(0, u64::saturating_add),
        flops: results
            .iter()
            .map(elements)
            .fold(0, u64::saturating_add)
            .saturating_mul(flops_per_element),
    }
}

/// Bytes of a tensor; none of a cache plane, whose rows the ops that touch them count.
pub(crate) fn bytes_of(ty: &Type, dims: &Dims) -> u64 {
    ty.tensor().map_or(0, |t| t.bytes(dims))
}

/// No work at all.
pub(super) fn free(_: &OpCall<'_>, _: &[Type], _: &Dims) -> Work {
    Work::default()
}

/// Splits a shape into (product of the leading dimensions, last dimension).
pub(super) fn rows_cols(shape: &[usize]) -> (usize, usize) {
    match shape.split_last() {
        Some((&cols, lead)) => (lead.iter().product(), cols),
        None => (1, 1),
    }
}

/// Checks `axis` against a rank and a use that needs a constant dimension there.
pub(super) fn const_axis(t: &TensorType, axis: usize) -> Result<u64, String> {
    match t.shape.get(axis) {
        Some(Dim::Const(n)) => Ok(*n),
        Some(d) => Err(format!("axis {axis} of {t} is {d}, expected a constant")),
        None => Err(format!("axis {axis} is outside {t}")),
    }
}

/// `(outer, axis, inner)` sizes around `axis`.
pub(super) fn around(shape: &[usize], axis: usize) -> (usize, usize, usize) {
    (shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product())
}

/// Rows of `table` picked by `rows`, as op results of shape `shape`.
pub(super) fn pick_rows(
    table: &Tensor,
    rows: &Tensor,
    shape: Vec<usize>,
) -> Result<Vec<Tensor>, String> {
    let (count, width) = (table.shape[0], table.shape[1..].iter().product::<usize>());
    let mut data = Vec::with_capacity(rows.data.len() * width);
    for &row in &rows.data {
        let row = row as usize;
        if row >= count {
            return Err(format!("row {row} is outside {count} row(s)"));
        }
        data.extend(&table.data[row * width..(row + 1) * width]);
    }
    Ok(vec![Tensor { shape, data }])
}
