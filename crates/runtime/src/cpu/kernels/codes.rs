//! Rows of the KV cache that are stored as codes: of each head `f8e4m3`, and behind those of all heads their scales.

use std::sync::LazyLock;

use infernum_ir::StateType;
use infernum_ir::encoding::quantised_rows::{quantise_heads, value};

use super::super::simd::{self, Isa};
use super::{Float, act, act_mut, parallel};

/// Heads of a row, and elements of each.
#[derive(Clone, Copy)]
pub(super) struct CodedRow {
    heads: usize,
    dim: usize,
}

impl CodedRow {
    /// How rows of a plane are stored; `None` where they are stored as their elements.
    pub(super) fn of(state: &StateType) -> Option<CodedRow> {
        let row = CodedRow { heads: state.heads() as usize, dim: state.dim() as usize };
        state.encoding.is_some().then_some(row)
    }

    /// Bytes of a row.
    pub(super) fn bytes(self) -> usize {
        self.heads * (self.dim + size_of::<f32>())
    }

    /// Elements of a row.
    pub(super) fn elements(self) -> usize {
        self.heads * self.dim
    }

    /// Stores a row of elements.
    pub(super) fn write(self, isa: Isa, dtype: Float, from: &[u8], to: &mut [u8]) {
        parallel::scratch(1, self.elements(), |values| {
            simd::widen(isa, act(dtype, from), values);
            to.copy_from_slice(&quantise_heads(values, self.dim));
        });
    }

    /// All of a row, as elements.
    pub(super) fn read_all(self, isa: Isa, row: &[u8], dtype: Float, to: &mut [u8]) {
        parallel::scratch(1, self.dim, |values| {
            for (head, to) in to.chunks_exact_mut((self.dim * dtype.size()).max(1)).enumerate() {
                self.read(row, head, values);
                simd::narrow(isa, values, act_mut(dtype, to));
            }
        });
    }

    /// The values of one head of a row.
    pub(super) fn read(self, row: &[u8], head: usize, to: &mut [f32]) {
        static VALUES: LazyLock<[f32; 256]> =
            LazyLock::new(|| std::array::from_fn(|code| value(code as u8, 1.0)));
        let (codes, scales) = row.split_at(self.heads * self.dim);
        let scale = scales.as_chunks().0.get(head).map_or(f32::NAN, |s| f32::from_le_bytes(*s));
        let codes = &codes[head * self.dim..][..self.dim];
        for (to, code) in to.iter_mut().zip(codes) {
            *to = VALUES[usize::from(*code)] * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_read_as_it_was_rounded() {
        let row = CodedRow { heads: 3, dim: 5 };
        let values: Vec<f32> = (0..15).map(|i| (i as f32 - 7.0) * 0.37).collect();
        let mut stored = vec![0; row.bytes()];
        row.write(Isa::best(), Float::F32, bytemuck::cast_slice(&values), &mut stored);
        for (head, values) in values.chunks(5).enumerate() {
            let mut found = [0.0; 5];
            row.read(&stored, head, &mut found);
            let most = values.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
            // The largest is exact, but for the scale's rounding; others are within half a step of four bits.
            let near =
                |(x, y): (&f32, &f32)| (x - y).abs() <= x.abs() / 16.0 + most / 448.0 / 512.0;
            assert!(values.iter().zip(&found).all(near), "{values:?} {found:?}");
        }
    }
}
