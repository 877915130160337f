//! Types of IR values.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::encoding::quantised_rows::{GROUP, bytes_of_head, quantised_heads, quantised_rows};
use crate::{DType, Dim, Dims, Encoding, Sym};

/// The type of one value.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Type {
    /// A tensor.
    Tensor(TensorType),
    /// One version of one plane of a layer's KV cache: a row `[heads, dim]` per cached token, or one state of a
    /// fixed shape for a whole sequence.
    State(StateType),
}

/// A row-major tensor.
///
/// A shape that ends in `T, S` is *ragged*: token `t` holds only the context rows of its own
/// sequence, so a head has `Dims::pairs` elements, in token order.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TensorType {
    /// Element type; of what is encoded, that of its values: f32.
    pub dtype: DType,
    /// Outermost dimension first.
    pub shape: Vec<Dim>,
    /// Known when the checkpoint is loaded: a weight, or computed from weights alone.
    pub constant: bool,
    /// How a weight is stored, unless it is stored as its elements; of activations, that they are
    /// [`quantised_rows`](crate::encoding::quantised_rows), and `dtype` is that of results.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoding: Option<Encoding>,
}

/// The type of a KV-cache plane: of its rows or, of a slot, of all that a sequence has.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StateType {
    /// How long rows are kept.
    #[serde(default)]
    pub kind: StateKind,
    /// Element type of what is written and read and, unless it is encoded, of the cache.
    pub dtype: DType,
    /// Of a row: `[heads, dim]`. Of a slot: any, outermost dimension first.
    pub shape: Vec<u64>,
    /// How rows are stored, unless as their elements: as
    /// [`quantised_heads`](crate::encoding::quantised_rows::quantised_heads).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoding: Option<Encoding>,
}

/// What a plane keeps, and how long.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub enum StateKind {
    /// A row a token, as long as their sequence.
    #[default]
    Paged,
    /// A row a token, as long as a token to come may see them: the last so many rows, its own included.
    Ring(u64),
    /// No rows: one state of a fixed size, which all tokens so far have made; zeros before the first.
    Slot,
}

impl StateKind {
    /// The first row that is kept for a step whose first token stands at `position`.
    pub fn first_row(self, position: usize) -> usize {
        match self {
            StateKind::Paged | StateKind::Slot => 0,
            StateKind::Ring(window) => {
                (position + 1).saturating_sub(usize::try_from(window).unwrap_or(usize::MAX))
            }
        }
    }
}

impl StateType {
    /// Rows that are kept as long as their sequence.
    pub fn paged(dtype: DType, heads: u64, dim: u64) -> StateType {
        StateType { kind: StateKind::Paged, dtype, shape: vec![heads, dim], encoding: None }
    }

    /// One state of a sequence.
    pub fn slot(dtype: DType, shape: &[u64]) -> StateType {
        StateType { kind: StateKind::Slot, dtype, shape: shape.to_vec(), encoding: None }
    }

    /// Whether it is one state of a sequence, and has no rows.
    pub fn is_slot(&self) -> bool {
        self.kind == StateKind::Slot
    }

    /// Heads of a row.
    pub fn heads(&self) -> u64 {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Values of a head.
    pub fn dim(&self) -> u64 {
        self.shape.iter().skip(1).fold(1, |n, d| n.saturating_mul(*d))
    }

    /// Elements of a row or of a slot, saturating.
    pub fn elements(&self) -> u64 {
        self.shape.iter().fold(1, |n, d| n.saturating_mul(*d))
    }

    /// Bytes of a row or of a slot, saturating.
    pub fn bytes(&self) -> u64 {
        let bytes = match &self.encoding {
            None => self.dtype.bytes(self.elements()),
            Some(_) => self.heads().checked_mul(bytes_of_head(self.dim())),
        };
        bytes.unwrap_or(u64::MAX)
    }

    /// Why nothing can be stored so, if it is encoded and nothing can.
    pub fn encoding_fault(&self) -> Option<String> {
        let encoding = self.encoding.as_ref()?;
        let fits = encoding == quantised_heads() && !self.is_slot() && self.dtype.is_float();
        (!fits).then(|| {
            format!(
                "expected rows of floats, stored as they are or as `{}`",
                quantised_heads().name()
            )
        })
    }

    /// The dimensions of a row or of a slot.
    pub fn dims(&self) -> Vec<Dim> {
        self.shape.iter().copied().map(Dim::Const).collect()
    }
}

impl TensorType {
    /// An activation.
    pub fn act(dtype: DType, shape: impl Into<Vec<Dim>>) -> TensorType {
        TensorType { dtype, shape: shape.into(), constant: false, encoding: None }
    }

    /// A weight.
    pub fn weight(dtype: DType, shape: &[u64]) -> TensorType {
        let shape = shape.iter().copied().map(Dim::Const).collect();
        TensorType { dtype, shape, constant: true, encoding: None }
    }

    /// A weight that is stored in an encoding.
    pub fn encoded(encoding: Encoding, shape: &[u64]) -> TensorType {
        TensorType { encoding: Some(encoding), ..TensorType::weight(DType::F32, shape) }
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// The innermost dimension, when it is a constant.
    pub fn last_const(&self) -> Option<u64> {
        self.shape.last().and_then(|d| d.as_const())
    }

    /// True for a shape ending in `T, S`.
    pub fn is_ragged(&self) -> bool {
        matches!(
            self.shape.as_slice(),
            [.., Dim::Sym { sym: Sym::T, times: 1 }, Dim::Sym { sym: Sym::S, times: 1 }]
        )
    }

    /// Concrete sizes under `dims`; a ragged `[.., T, S]` becomes `[.., pairs]`.
    pub fn sizes(&self, dims: &Dims) -> Vec<usize> {
        let mut sizes: Vec<usize> = self.shape.iter().map(|d| d.eval(dims) as usize).collect();
        if self.is_ragged() {
            sizes.truncate(sizes.len() - 2);
            sizes.push(dims.pairs as usize);
        }
        sizes
    }

    /// Number of elements under `dims`, saturating.
    pub fn elements(&self, dims: &Dims) -> u64 {
        let plain = if self.is_ragged() { self.rank() - 2 } else { self.rank() };
        let head = if self.is_ragged() { dims.pairs } else { 1 };
        self.shape[..plain].iter().fold(head, |n, d| n.saturating_mul(d.eval(dims)))
    }

    /// Bytes under `dims`, saturating.
    pub fn bytes(&self, dims: &Dims) -> u64 {
        match &self.encoding {
            None => self.elements(dims).saturating_mul(self.dtype.size()),
            Some(encoding) => {
                let shape: Vec<u64> = self.shape.iter().map(|d| d.eval(dims)).collect();
                // Where a step has no rows, nothing is stored.
                let none = !self.constant && shape.contains(&0);
                if none { 0 } else { encoding.bytes(&shape).unwrap_or(u64::MAX) }
            }
        }
    }

    /// Why nothing can be stored so, if it is encoded and nothing can.
    pub fn encoding_fault(&self) -> Option<String> {
        let encoding = self.encoding.as_ref()?;
        if encoding == quantised_rows() {
            let whole = self.last_const().is_some_and(|k| k > 0 && k % GROUP as u64 == 0);
            let fits = !self.constant && self.rank() == 2 && whole;
            return (!fits).then(|| {
                format!("expected rows, not const, of a whole number of {GROUP} columns")
            });
        }
        let sizes: Option<Vec<u64>> = self.shape.iter().map(|d| d.as_const()).collect();
        let fault = match sizes.as_deref() {
            Some([.., rows, columns]) if self.constant => encoding.layout(*rows, *columns).err()?,
            _ => "expected const and at least two constant dimensions".to_owned(),
        };
        Some(fault)
    }
}

impl Type {
    /// The tensor type, or a message naming what was found.
    pub fn tensor(&self) -> Result<&TensorType, String> {
        match self {
            Type::Tensor(t) => Ok(t),
            Type::State(_) => Err(format!("expected a tensor, found {self}")),
        }
    }

    /// The state type, or a message naming what was found.
    pub fn state(&self) -> Result<&StateType, String> {
        match self {
            Type::State(s) => Ok(s),
            Type::Tensor(_) => Err(format!("expected a KV-cache state, found {self}")),
        }
    }
}

impl From<TensorType> for Type {
    fn from(t: TensorType) -> Type {
        Type::Tensor(t)
    }
}

impl From<StateType> for Type {
    fn from(s: StateType) -> Type {
        Type::State(s)
    }
}

/// Prints `[a, b, c]`.
pub(crate) struct Shape<'a>(pub(crate) &'a [Dim]);

impl fmt::Display for Shape<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, d) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{d}")?;
        }
        f.write_str("]")
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.constant {
            f.write_str("const ")?;
        }
        match &self.encoding {
            None => write!(f, "{}{}", self.dtype, Shape(&self.shape)),
            Some(encoding) if self.constant => write!(f, "{encoding}{}", Shape(&self.shape)),
            Some(encoding) => write!(f, "{encoding} {}{}", self.dtype, Shape(&self.shape)),
        }
    }
}

impl fmt::Display for StateType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("state ")?;
        match self.kind {
            StateKind::Paged => {}
            StateKind::Ring(window) => write!(f, "ring({window}) ")?,
            StateKind::Slot => f.write_str("slot ")?,
        }
        if let Some(encoding) = &self.encoding {
            write!(f, "{encoding} ")?;
        }
        write!(f, "{}{}", self.dtype, Shape(&self.dims()))
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Type::Tensor(t) => t.fmt(f),
            Type::State(s) => s.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_of_codes_have_a_scale_for_each_head() {
        let plane = StateType {
            encoding: Some(quantised_heads().clone()),
            kind: StateKind::Ring(64),
            ..StateType::paged(DType::Bf16, 8, 128)
        };
        assert_eq!(plane.to_string(), "state ring(64) quantised_heads bf16[8, 128]");
        assert_eq!(plane.bytes(), 8 * (128 + 4));
        assert_eq!(plane.encoding_fault(), None);
        let wrong = [
            StateType { kind: StateKind::Slot, ..plane.clone() },
            StateType { dtype: DType::I32, ..plane.clone() },
            StateType { encoding: Some(quantised_rows().clone()), ..plane },
        ];
        assert!(wrong.iter().all(|ty| ty.encoding_fault().is_some()));
    }

    #[test]
    fn quantised_rows_have_codes_and_scales() {
        let rows = TensorType {
            encoding: Some(quantised_rows().clone()),
            ..TensorType::act(DType::Bf16, [Dim::sym(Sym::T), Dim::Const(384)])
        };
        assert_eq!(rows.to_string(), "quantised_rows bf16[T, 384]");
        assert_eq!(rows.encoding_fault(), None);
        let bytes = |t| rows.bytes(&Dims { t, ..Dims::default() });
        assert_eq!([1, 13].map(bytes), [384 + 3 * 4 * 4, 13 * 384 + 3 * 16 * 4]);
        assert_eq!(bytes(0), 0);
        for shape in [vec![Dim::sym(Sym::T), Dim::Const(100)], vec![Dim::Const(384)]] {
            assert!(TensorType { shape, ..rows.clone() }.encoding_fault().is_some());
        }
        assert!(TensorType { constant: true, ..rows.clone() }.encoding_fault().is_some());
    }
}
