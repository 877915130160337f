//! Weights on their way to the GPU: from the mapped file through a ring of pinned memory. No copy of
//! the model is ever on the host.

use std::sync::Arc;

use rayon::prelude::*;

use super::driver::{DeviceMemory, Event, Gpu, Pinned, Result, Stream};
use crate::exec::weights::Loaded;
use crate::exec::{AdapterWeights, LoadError};
use infernum_codegen::{Recipe, Weight, row_bytes};
use infernum_ir::{Dims, TensorType};

/// Where each tensor begins, as the widest loads and matrix units want it.
const ALIGN: u64 = 256;

/// Bytes that one thread loads at once, at most.
const WIDEST_LOAD: u64 = 16;

/// Bytes of one part of the ring; a few keep both the copying cores and the bus busy.
const PART: usize = 16 << 20;
const PARTS: usize = 4;

/// The plan's weights in one allocation.
#[derive(Debug)]
pub(super) struct Weights {
    memory: DeviceMemory,
    offsets: Vec<u64>,
}

impl Weights {
    /// Copies what is stored; `plan` and `weights` are the same constants. Rows of another weight
    /// are read where that one lies.
    ///
    /// What is to be packed goes to memory of its own first, part by part, from where `repack` makes it: of a part of the
    /// first type, at the first address, its packed form at the second.
    pub(super) fn upload(
        gpu: &Arc<Gpu>,
        stream: &Stream,
        plan: &[Weight],
        weights: &[Loaded],
        repack: &Repack<'_>,
    ) -> std::result::Result<Weights, LoadError> {
        let bytes = |w: &Loaded| w.segments.iter().map(|s| s.len() as u64).sum::<u64>();
        let views: Vec<Option<(usize, u64)>> = plan.iter().map(view).collect();
        let size = |(weight, loaded): (&Weight, &Loaded)| match loaded.unpacked[..] {
            [] => bytes(loaded),
            _ => weight.ty.bytes(&Dims::default()),
        };
        let (offsets, end) = place(&views, plan.iter().zip(weights).map(size));
        let memory = DeviceMemory::zeroed(gpu, "the weights", end)?;
        let largest = weights.iter().map(bytes).max().unwrap_or(0);
        let parts = weights.iter().flat_map(|w| &w.unpacked);
        let largest_part = parts.map(|ty| ty.bytes(&Dims::default())).max().unwrap_or(0);
        let staging = DeviceMemory::zeroed(gpu, "weights as they are stored", largest_part)?;
        let mut ring = Ring::new(gpu, usize::try_from(largest).unwrap_or(PART).min(PART))?;
        let stored = weights.iter().zip(&offsets).zip(&views).filter(|(_, view)| view.is_none());
        for ((weight, offset), _) in stored {
            let segments: Vec<&[u8]> = weight.segments.iter().map(|s| &s[..]).collect();
            if weight.unpacked.is_empty() {
                ring.send(stream, &segments, memory.address() + offset)?;
                continue;
            }
            let (mut at, mut to) = (0, memory.address() + offset);
            for part in &weight.unpacked {
                let len = part.bytes(&Dims::default());
                let own = cut(&segments, at, len as usize);
                ring.send(stream, &own, staging.address())?;
                to += repack(stream, part, staging.address(), to)?;
                at += len as usize;
            }
        }
        stream.synchronize()?;
        Ok(Weights { memory, offsets })
    }

    pub(super) fn address(&self, weight: u32) -> Option<u64> {
        Some(self.memory.address() + self.offsets.get(weight as usize)?)
    }

    /// Copies an adapter to its rows of each bank, behind the steps that were submitted; on return its bytes are there.
    pub(super) fn set_rows(
        &self,
        gpu: &Arc<Gpu>,
        stream: &Stream,
        slot: usize,
        adapter: &AdapterWeights,
    ) -> Result<()> {
        let largest = adapter.rows().map(|(_, bytes)| bytes.len()).max().unwrap_or(0);
        let mut ring = Ring::new(gpu, largest.min(PART))?;
        for (weight, bytes) in adapter.rows() {
            let Some(bank) = self.address(weight as u32) else { continue };
            ring.send(stream, &[&bytes[..]], bank + (slot * bytes.len()) as u64)?;
        }
        stream.synchronize()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// A copy of all of them.
    pub(super) fn read(&self, stream: &Stream) -> Result<Vec<u8>> {
        stream.read(&self.memory)
    }
}

/// Makes the packed form of a weight of a type, which lies at the first address, at the second: its bytes.
pub(super) type Repack<'a> =
    dyn Fn(&Stream, &TensorType, u64, u64) -> std::result::Result<u64, LoadError> + 'a;

/// A range of what segments hold.
fn cut<'a>(segments: &[&'a [u8]], mut from: usize, mut len: usize) -> Vec<&'a [u8]> {
    let mut found = Vec::new();
    for segment in segments {
        let start = from.min(segment.len());
        let end = segment.len().min(start + len);
        if start < end {
            found.push(&segment[start..end]);
        }
        (from, len) = (from - start, len - (end - start));
    }
    found
}

/// The weight that a view is of, and its first byte there. Rows that begin where wide loads cannot
/// (short vectors) are stored again.
fn view(weight: &Weight) -> Option<(usize, u64)> {
    let Recipe::Rows { weight: of, start } = weight.recipe else { return None };
    let from = row_bytes(&weight.ty)?.checked_mul(start)?;
    from.is_multiple_of(WIDEST_LOAD).then_some((of as usize, from))
}

/// Where each weight begins, and where all end: what is stored one after another, views within.
fn place(views: &[Option<(usize, u64)>], bytes: impl Iterator<Item = u64>) -> (Vec<u64>, u64) {
    let mut end = 0u64;
    let stored = views.iter().zip(bytes).map(|(view, bytes)| {
        let at = end;
        end += if view.is_none() { bytes.next_multiple_of(ALIGN) } else { 0 };
        at
    });
    let mut offsets: Vec<u64> = stored.collect();
    for (i, view) in views.iter().enumerate() {
        if let Some((of, from)) = view {
            offsets[i] = offsets[*of] + from;
        }
    }
    (offsets, end)
}

/// Pinned parts that are filled in turn, each once the GPU has taken what was in it.
struct Ring {
    parts: Vec<(Pinned, Event)>,
    next: usize,
    sent: usize,
}

impl Ring {
    /// Of parts of so many bytes.
    fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Ring> {
        let part = |_| Ok((Pinned::new(gpu, bytes)?, Event::new(gpu)?));
        let parts = (0..PARTS).map(part).collect::<Result<_>>()?;
        Ok(Ring { parts, next: 0, sent: 0 })
    }

    /// Sends segments to one place, one behind the other.
    fn send(&mut self, stream: &Stream, segments: &[&[u8]], mut to: u64) -> Result<()> {
        for pieces in filled(segments, self.parts[0].0.bytes().len().max(1)) {
            let (pinned, taken) = &mut self.parts[self.next];
            if self.sent >= PARTS {
                taken.synchronize()?;
            }
            let bytes = pieces.iter().map(|p| p.len()).sum();
            gather(&pieces, &mut pinned.bytes_mut()[..bytes]);
            stream.to_device(to, &pinned.bytes()[..bytes])?;
            stream.record(taken)?;
            to += bytes as u64;
            self.next = (self.next + 1) % PARTS;
            self.sent += 1;
        }
        Ok(())
    }
}

/// The segments in order, cut so that each part of so many bytes but the last is full: a copy takes many small ones.
fn filled<'a>(segments: &[&'a [u8]], part: usize) -> Vec<Vec<&'a [u8]>> {
    let mut parts: Vec<Vec<&[u8]>> = Vec::new();
    let mut room = 0;
    for segment in segments {
        let mut rest = *segment;
        while !rest.is_empty() {
            if room == 0 {
                parts.push(Vec::new());
                room = part;
            }
            let (piece, more) = rest.split_at(rest.len().min(room));
            parts.last_mut().into_iter().for_each(|p| p.push(piece));
            (rest, room) = (more, room - piece.len());
        }
    }
    parts
}

/// Copies pieces to where they lie one behind the other.
fn gather(pieces: &[&[u8]], mut to: &mut [u8]) {
    let mut copies = Vec::new();
    for piece in pieces {
        let (own, rest) = to.split_at_mut(piece.len());
        copies.push((own, *piece));
        to = rest;
    }
    // Several cores: a mapped file costs a page fault every few pages.
    copies.into_par_iter().for_each(|(to, from)| {
        to.par_chunks_mut(1 << 20)
            .zip(from.par_chunks(1 << 20))
            .for_each(|(to, from)| to.copy_from_slice(from));
    });
}

#[cfg(test)]
mod tests {
    use infernum_ir::{DType, TensorType};

    use super::*;

    #[test]
    fn small_segments_share_parts() {
        let bytes: Vec<u8> = (0..200u8).collect();
        for sizes in [&[3, 0, 1, 60, 7, 64, 65][..], &[200], &[0], &[]] {
            let mut rest = &bytes[..];
            let cut = |n: &usize| {
                let (own, more) = rest.split_at(*n);
                rest = more;
                own
            };
            let segments: Vec<&[u8]> = sizes.iter().map(cut).collect();
            let parts = filled(&segments, 16);
            let whole = |p: &Vec<&[u8]>| p.iter().map(|s| s.len()).sum::<usize>();
            assert!(parts.iter().rev().skip(1).all(|p| whole(p) == 16));
            let sent = parts.iter().flat_map(|p| {
                let mut to = vec![0; whole(p)];
                gather(p, &mut to);
                to
            });
            assert_eq!(sent.collect::<Vec<u8>>(), bytes[..sizes.iter().sum()]);
        }
    }

    #[test]
    fn views_take_no_memory_of_their_own() {
        let weight =
            |shape: &[u64], recipe| Weight { ty: TensorType::weight(DType::Bf16, shape), recipe };
        let stored = || Recipe::Tensor("w".to_owned());
        let rows = |weight, start| Recipe::Rows { weight, start };
        let plan = [
            weight(&[4, 64], rows(1, 12)), // before the one that it is of
            weight(&[16, 64], stored()),
            weight(&[40], stored()),
            weight(&[8], rows(2, 16)),
            weight(&[8], rows(2, 20)), // at 40 bytes: no wide load could read it
            weight(&[16, 64], rows(1, 0)),
        ];
        let views: Vec<_> = plan.iter().map(view).collect();
        let bytes = plan.iter().map(|w| w.ty.bytes(&infernum_ir::Dims::default()));
        let (offsets, end) = place(&views, bytes);
        assert_eq!(offsets, [12 * 128, 0, 2048, 2048 + 32, 2048 + 256, 0]);
        assert_eq!(end, 2048 + 256 + 256);
    }
}
