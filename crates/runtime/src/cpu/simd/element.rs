//! Element types: activations, weights in raw bytes, and their generic loads.

use half::{bf16, f16};

use super::vector::Simd;

/// Scalar types of activations and weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the variants are the field's own names")]
pub enum Float {
    F32,
    Bf16,
    F16,
}

impl Float {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Float::F32 => 4,
            Float::Bf16 | Float::F16 => 2,
        }
    }
}

/// Activations to read, row-major.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the variants are the field's own names")]
pub enum Act<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

impl<'a> Act<'a> {
    /// Number of elements.
    pub const fn len(self) -> usize {
        match self {
            Act::F32(x) => x.len(),
            Act::Bf16(x) => x.len(),
            Act::F16(x) => x.len(),
        }
    }

    /// Whether there are no elements.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Type of the elements.
    pub const fn dtype(self) -> Float {
        match self {
            Act::F32(_) => Float::F32,
            Act::Bf16(_) => Float::Bf16,
            Act::F16(_) => Float::F16,
        }
    }

    /// The elements in a range; panics outside.
    #[must_use]
    pub fn slice(self, range: std::ops::Range<usize>) -> Act<'a> {
        match self {
            Act::F32(x) => Act::F32(&x[range]),
            Act::Bf16(x) => Act::Bf16(&x[range]),
            Act::F16(x) => Act::F16(&x[range]),
        }
    }

    /// The elements' memory.
    pub fn as_bytes(self) -> &'a [u8] {
        match self {
            Act::F32(x) => bytemuck::cast_slice(x),
            Act::Bf16(x) => bytemuck::cast_slice(x),
            Act::F16(x) => bytemuck::cast_slice(x),
        }
    }
}

/// Activations to write, row-major.
#[derive(Debug)]
#[allow(missing_docs, reason = "the variants are the field's own names")]
pub enum ActMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
    F16(&'a mut [f16]),
}

impl ActMut<'_> {
    /// Number of elements.
    pub const fn len(&self) -> usize {
        match self {
            ActMut::F32(x) => x.len(),
            ActMut::Bf16(x) => x.len(),
            ActMut::F16(x) => x.len(),
        }
    }

    /// Whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Type of the elements.
    pub const fn dtype(&self) -> Float {
        match self {
            ActMut::F32(_) => Float::F32,
            ActMut::Bf16(_) => Float::Bf16,
            ActMut::F16(_) => Float::F16,
        }
    }

    /// The elements' memory.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        match self {
            ActMut::F32(x) => bytemuck::cast_slice_mut(x),
            ActMut::Bf16(x) => bytemuck::cast_slice_mut(x),
            ActMut::F16(x) => bytemuck::cast_slice_mut(x),
        }
    }
}

/// Why bytes are no weight matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WeightError {
    /// A segment that ends within a row.
    #[error(
        "weight segment {segment} has {bytes} bytes, which is not a whole number of rows of \
         {row_bytes} bytes"
    )]
    PartialRow {
        /// Position among the segments.
        segment: usize,
        /// Its length.
        bytes: usize,
        /// Bytes of one row.
        row_bytes: usize,
    },
    /// Rows of no elements, or longer than memory can be.
    #[error("weight rows of {columns} columns are not possible")]
    Columns {
        /// Elements of one row.
        columns: usize,
    },
}

/// A weight matrix `[N, K]`, row-major little-endian bytes of any alignment, in one or more
/// segments of whole rows: several tensors of a mapped file read as their concatenation.
///
/// With `K = 1` it is a vector of `N`, such as a bias.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    dtype: Float,
    columns: usize,
    rows: usize,
    segments: &'a [&'a [u8]],
}

impl<'a> Weights<'a> {
    /// Checks that every segment is a whole number of rows of `columns` elements.
    pub fn new(
        dtype: Float,
        columns: usize,
        segments: &'a [&'a [u8]],
    ) -> Result<Self, WeightError> {
        let row_bytes = columns
            .checked_mul(dtype.size())
            .filter(|&bytes| bytes > 0)
            .ok_or(WeightError::Columns { columns })?;
        let mut rows = 0;
        for (segment, bytes) in segments.iter().map(|s| s.len()).enumerate() {
            if bytes % row_bytes != 0 {
                return Err(WeightError::PartialRow { segment, bytes, row_bytes });
            }
            rows += bytes / row_bytes;
        }
        Ok(Weights { dtype, columns, rows, segments })
    }

    /// Type of the elements.
    pub const fn dtype(&self) -> Float {
        self.dtype
    }

    /// `N`, over all segments.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// `K`.
    pub const fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes of one row.
    pub const fn row_bytes(&self) -> usize {
        self.columns * self.dtype.size()
    }

    /// The bytes of rows `start..end`, as (first row, bytes), one item for each segment that
    /// they touch.
    pub(super) fn pieces(
        &self,
        start: usize,
        end: usize,
    ) -> impl Iterator<Item = (usize, &'a [u8])> + use<'a> {
        let row_bytes = self.row_bytes();
        let mut first = 0;
        self.segments.iter().filter_map(move |segment| {
            let (from, to) = (first, first + segment.len() / row_bytes);
            first = to;
            let (lo, hi) = (start.max(from), end.min(to));
            (lo < hi).then(|| (lo, &segment[(lo - from) * row_bytes..(hi - from) * row_bytes]))
        })
    }
}

/// Widest vector, in bytes.
const VECTOR: usize = 64;

/// An element type that kernels are generic over.
///
/// # Safety
/// As [`Simd`]; the `_tail` forms need `n <= LANES` elements and read or write no more, the
/// missing lanes being zero.
pub(super) trait Element: Copy + 'static {
    const SIZE: usize;

    unsafe fn load<S: Simd>(p: *const u8) -> S::V;
    unsafe fn store<S: Simd>(p: *mut u8, v: S::V);

    #[inline(always)]
    unsafe fn load_tail<S: Simd>(p: *const u8, n: usize) -> S::V {
        let mut buffer = [0_u8; VECTOR];
        // SAFETY: n elements at p by contract; at most LANES of them, which fit.
        unsafe {
            std::ptr::copy_nonoverlapping(p, buffer.as_mut_ptr(), n * Self::SIZE);
            Self::load::<S>(buffer.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn store_tail<S: Simd>(p: *mut u8, v: S::V, n: usize) {
        let mut buffer = [0_u8; VECTOR];
        // SAFETY: room for n elements at p by contract; the buffer holds LANES of them.
        unsafe {
            Self::store::<S>(buffer.as_mut_ptr(), v);
            std::ptr::copy_nonoverlapping(buffer.as_ptr(), p, n * Self::SIZE);
        }
    }
}

macro_rules! element {
    ($type:ty, $load:ident, $store:ident) => {
        impl Element for $type {
            const SIZE: usize = size_of::<$type>();

            #[inline(always)]
            unsafe fn load<S: Simd>(p: *const u8) -> S::V {
                // SAFETY: as the caller's.
                unsafe { S::$load(p) }
            }
            #[inline(always)]
            unsafe fn store<S: Simd>(p: *mut u8, v: S::V) {
                // SAFETY: as the caller's.
                unsafe { S::$store(p, v) }
            }
        }
    };
}

element!(f32, load_f32, store_f32);
element!(bf16, load_bf16, store_bf16);
element!(f16, load_f16, store_f16);

/// Evaluates an expression with `$E` bound to the element type of a [`Float`].
macro_rules! with_element {
    ($dtype:expr, $E:ident => $body:expr) => {
        match $dtype {
            $crate::cpu::simd::Float::F32 => {
                type $E = f32;
                $body
            }
            $crate::cpu::simd::Float::Bf16 => {
                type $E = half::bf16;
                $body
            }
            $crate::cpu::simd::Float::F16 => {
                type $E = half::f16;
                $body
            }
        }
    };
}
pub(super) use with_element;
