//! Weights on their way to the GPU: from the mapped file through a ring of pinned memory. No copy of
//! the model is ever on the host.

use std::sync::Arc;

use rayon::prelude::*;

use super::driver::{DeviceMemory, Event, Gpu, GpuError, Pinned, Result, Stream};
use crate::weights::Loaded;

/// Where each tensor begins, as the widest loads and matrix units want it.
const ALIGN: u64 = 256;

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
    pub(super) fn upload(gpu: &Arc<Gpu>, stream: &Stream, weights: &[Loaded]) -> Result<Weights> {
        let mut end = 0u64;
        let offsets: Vec<u64> = weights
            .iter()
            .map(|w| {
                let at = end;
                let bytes: usize = w.segments.iter().map(|s| s.len()).sum();
                end += (bytes as u64).next_multiple_of(ALIGN);
                at
            })
            .collect();
        let memory = DeviceMemory::zeroed(gpu, "the weights", end)?;
        let mut ring = Ring::new(gpu)?;
        for (weight, offset) in weights.iter().zip(&offsets) {
            let mut to = memory.address() + offset;
            for segment in &weight.segments {
                ring.send(stream, segment, to)?;
                to += segment.len() as u64;
            }
        }
        stream.synchronize()?;
        Ok(Weights { memory, offsets })
    }

    pub(super) fn address(&self, weight: u32) -> Option<u64> {
        Some(self.memory.address() + self.offsets.get(weight as usize)?)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.memory.bytes()
    }
}

/// Pinned parts that are filled in turn, each once the GPU has taken what was in it.
struct Ring {
    parts: Vec<(Pinned, Event)>,
    next: usize,
    sent: usize,
}

impl Ring {
    fn new(gpu: &Arc<Gpu>) -> Result<Ring> {
        let part = |_| Ok((Pinned::new(gpu, PART)?, Event::new(gpu)?));
        let parts = (0..PARTS).map(part).collect::<Result<_>>()?;
        Ok(Ring { parts, next: 0, sent: 0 })
    }

    fn send(&mut self, stream: &Stream, bytes: &[u8], mut to: u64) -> Result<()> {
        for chunk in bytes.chunks(PART) {
            let (pinned, taken) = &mut self.parts[self.next];
            if self.sent >= PARTS {
                taken.synchronize()?;
            }
            let part = &mut pinned.bytes_mut()[..chunk.len()];
            // Several cores: a mapped file costs a page fault every few pages.
            part.par_chunks_mut(1 << 20)
                .zip(chunk.par_chunks(1 << 20))
                .for_each(|(to, from)| to.copy_from_slice(from));
            stream.to_device(to, &pinned.bytes()[..chunk.len()])?;
            stream.record(taken)?;
            to += chunk.len() as u64;
            self.next = (self.next + 1) % PARTS;
            self.sent += 1;
        }
        Ok(())
    }
}

impl From<GpuError> for crate::LoadError {
    fn from(e: GpuError) -> Self {
        crate::LoadError::Gpu(e)
    }
}
