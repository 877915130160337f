//! Scales and minimums of a unit.

use infernum_ir::encoding::Element;
use infernum_ir::encoding::packing::Factor;

use super::super::element::Float;
use super::super::isa::Isa;
use super::super::ops;
use super::{CHUNK, Codes, ROWS};

/// Lanes that a block's number stands in: in f32 vectors of eight, blocks 0 to 3 twice.
pub(super) const LANES: usize = 8;

/// The scales and minimums of a unit's rows, for each chunk and half of its blocks as vectors of [`LANES`]; those of a
/// half are those of all where groups are no smaller than blocks.
pub(super) struct Factors {
    /// `[chunks, ROWS, halves, LANES]`
    scales: Vec<f32>,
    /// As scales, or nothing.
    minimums: Vec<f32>,
    chunks: usize,
    halves: usize,
    /// `[chunks, halves]`: which group of a row each block is of.
    places: Vec<[u8; 4]>,
}

impl Factors {
    pub(super) fn new(w: &Codes<'_>) -> Factors {
        let (chunks, halves) = (w.packing.columns as usize / CHUNK, 1 + usize::from(w.halves()));
        let numbers = chunks * ROWS * halves * LANES;
        let minimums = if w.packing.minimum.is_some() { numbers } else { 0 };
        let group = w.packing.group as usize;
        let place = |(chunk, half): (usize, usize)| {
            std::array::from_fn(|block| ((chunk * CHUNK + block * 32 + half * 16) / group) as u8)
        };
        let places = (0..chunks).flat_map(|c| (0..halves).map(move |h| (c, h))).map(place);
        let (scales, minimums) = (vec![0.0; numbers], vec![0.0; minimums]);
        Factors { scales, minimums, chunks, halves, places: places.collect() }
    }

    /// Chunks of a unit.
    pub(super) fn chunks(&self) -> usize {
        self.chunks
    }

    /// Reads those of a unit.
    pub(super) fn read(&mut self, isa: Isa, w: &Codes<'_>, unit: &[u8]) {
        self.spread(isa, w, unit, &w.packing.scale, false);
        if let Some(minimum) = &w.packing.minimum {
            self.spread(isa, w, unit, minimum, true);
        }
    }

    fn spread(&mut self, isa: Isa, w: &Codes<'_>, unit: &[u8], factor: &Factor, minimum: bool) {
        /// Of a unit of most columns, in the smallest groups.
        const MOST: usize = ROWS * 32;
        let (groups, mut numbers) = (w.packing.groups() as usize, [0.0; MOST]);
        let numbers = &mut numbers[..ROWS * groups];
        read(isa, factor.element, &unit[factor.at as usize..], numbers);
        if let Some((element, at)) = factor.outer {
            let mut outer = [0.0; ROWS];
            read(isa, element, &unit[at as usize..], &mut outer);
            for (numbers, outer) in numbers.chunks_exact_mut(groups).zip(outer) {
                numbers.iter_mut().for_each(|n| *n *= outer);
            }
        }
        let out = if minimum { &mut self.minimums } else { &mut self.scales };
        for (i, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let (half, row, chunk) =
                (i % self.halves, i / self.halves % ROWS, i / self.halves / ROWS);
            let at = &self.places[chunk * self.halves + half];
            let numbers = &numbers[row * groups..][..groups];
            let four = at.map(|at| numbers[usize::from(at)]);
            out[..4].copy_from_slice(&four);
            out[4..].copy_from_slice(&four);
        }
    }

    /// The scale and the minimum of a half of a block.
    pub(super) fn of(&self, row: usize, chunk: usize, half: usize, block: usize) -> (f32, f32) {
        let at = ((chunk * ROWS + row) * self.halves + half) * LANES + block;
        (self.scales[at], self.minimums.get(at).copied().unwrap_or(0.0))
    }

    /// Scales `[halves, LANES]` of a row's chunk.
    pub(super) fn scales(&self, row: usize, chunk: usize) -> &[f32] {
        let len = self.halves * LANES;
        &self.scales[(chunk * ROWS + row) * len..][..len]
    }

    /// Minimums `[halves, LANES]` of a row's chunk, if there are any.
    pub(super) fn minimums(&self, row: usize, chunk: usize) -> Option<&[f32]> {
        let len = self.halves * LANES;
        self.minimums.get((chunk * ROWS + row) * len..)?.get(..len)
    }
}

/// Numbers of one type, one after another.
fn read(isa: Isa, element: Element, bytes: &[u8], out: &mut [f32]) {
    let float = |dtype: Float, out: &mut [f32]| {
        ops::widen_bytes(isa, dtype, &bytes[..out.len() * dtype.size()], out);
    };
    match element {
        Element::U8 => out.iter_mut().zip(bytes).for_each(|(o, b)| *o = f32::from(*b)),
        Element::I8 => out.iter_mut().zip(bytes).for_each(|(o, b)| *o = f32::from(*b as i8)),
        Element::F8e8m0 => {
            out.iter_mut().zip(bytes).for_each(|(o, b)| *o = element.read(&[*b]).float());
        }
        Element::F16 => float(Float::F16, out),
        Element::Bf16 => float(Float::Bf16, out),
        // Packed factors are of no other type.
        _ => float(Float::F32, out),
    }
}
