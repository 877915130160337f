//! The two steps that may be under way: what each brings to the GPU and back.

use std::sync::Arc;

use infernum_ir::DType;

use super::driver::{Event, Gpu, Pinned, Stream};
use crate::exec::{GpuError, StepOutput, elements};

/// One of them.
#[derive(Debug)]
pub(super) struct Turn {
    /// Its inputs, read by the GPU while the host fills the other's.
    pub(super) staged: Pinned,
    tokens: Pinned,
    logits: Pinned,
    done: Event,
    pub(super) ticket: u64,
    rows: usize,
    /// 0 where the logits stay on the GPU.
    columns: usize,
    /// The element type of the logits.
    dtype: DType,
}

impl Turn {
    /// For inputs of so many bytes and so many rows of output.
    pub(super) fn new(gpu: &Arc<Gpu>, inputs: usize, rows: usize) -> Result<Turn, GpuError> {
        Ok(Turn {
            staged: Pinned::new(gpu, inputs)?,
            tokens: Pinned::new(gpu, 4 * rows)?,
            logits: Pinned::new(gpu, 0)?,
            done: Event::new(gpu)?,
            ticket: 0,
            rows: 0,
            columns: 0,
            dtype: DType::F32,
        })
    }

    /// Waits until the GPU is done with it.
    pub(super) fn finish(&self) -> Result<(), GpuError> {
        self.done.synchronize()
    }

    /// Has the tokens of a step brought back, and `columns` logits of type `dtype` of each of its rows; 0
    /// for none.
    pub(super) fn bring(
        &mut self,
        gpu: &Arc<Gpu>,
        stream: &Stream,
        (rows, columns, dtype): (usize, usize, DType),
        (tokens, logits): (u64, u64),
    ) -> Result<(), GpuError> {
        (self.rows, self.columns, self.dtype) = (rows, columns, dtype);
        if rows > 0 {
            stream.to_host(&mut self.tokens.bytes_mut()[..4 * rows], tokens)?;
        }
        let bytes = elements::size(dtype) * rows * columns;
        if self.logits.bytes().len() < bytes {
            stream.synchronize()?;
            self.logits = Pinned::new(gpu, bytes)?;
        }
        if bytes > 0 {
            stream.to_host(&mut self.logits.bytes_mut()[..bytes], logits)?;
        }
        stream.record(&self.done)
    }

    /// What came back. The turn must be finished.
    pub(super) fn read(&self, output: &mut StepOutput) {
        (output.rows, output.columns) = (self.rows, self.columns);
        output.tokens.clear();
        output.tokens.extend_from_slice(words(&self.tokens, self.rows));
        output.logits.clear();
        let logits = &self.logits.bytes()[..elements::size(self.dtype) * self.rows * self.columns];
        if self.dtype == DType::F32 {
            output.logits.extend_from_slice(bytemuck::cast_slice(logits));
        } else {
            let mut values = Vec::with_capacity(self.rows * self.columns);
            elements::decode(self.dtype, logits, &mut values);
            output.logits.extend(values.into_iter().map(|v| v as f32));
        }
    }
}

fn words(memory: &Pinned, n: usize) -> &[u32] {
    bytemuck::cast_slice(&memory.bytes()[..4 * n])
}
