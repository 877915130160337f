//! The two steps that may be under way: what each brings to the GPU and back.

use std::ops::Range;
use std::sync::Arc;

use infernum_ir::DType;

use super::driver::{Event, Gpu, Pinned, Stream};
use super::penalised::Penalised;
use crate::exec::{GpuError, LogitRows, StepOutput, elements};

/// One of them.
#[derive(Debug)]
pub(super) struct Turn {
    /// Its inputs, read by the GPU while the host fills the other's.
    pub(super) staged: Pinned,
    /// Tokens with penalties.
    pub(super) penalised: Penalised,
    tokens: Pinned,
    logits: Pinned,
    logit_rows: LogitRows,
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
            penalised: Penalised::new(gpu)?,
            logits: Pinned::new(gpu, 0)?,
            logit_rows: LogitRows::All,
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

    /// Has the tokens of a step brought back, and `columns` logits of type `dtype` of each of
    /// `logit_rows`; 0 for none.
    pub(super) fn bring(
        &mut self,
        gpu: &Arc<Gpu>,
        stream: &Stream,
        (rows, columns, dtype): (usize, usize, DType),
        logit_rows: &LogitRows,
        (tokens, logits): (u64, u64),
    ) -> Result<(), GpuError> {
        (self.rows, self.columns, self.dtype) = (rows, columns, dtype);
        self.logit_rows.clone_from(logit_rows);
        if rows > 0 {
            stream.to_host(&mut self.tokens.bytes_mut()[..4 * rows], tokens)?;
        }
        let (row, brought) = (elements::size(dtype) * columns, self.brought());
        if self.logits.bytes().len() < row * brought {
            stream.synchronize()?;
            // Room for more of them, so that this is rare.
            self.logits = Pinned::new(gpu, row * brought.next_power_of_two().min(rows))?;
        }
        let mut to = self.logits.bytes_mut();
        for part in parts(logit_rows, rows).filter(|part| row > 0 && !part.is_empty()) {
            let (head, tail) = to.split_at_mut(row * part.len());
            stream.to_host(head, logits + (row * part.start) as u64)?;
            to = tail;
        }
        stream.record(&self.done)
    }

    /// How many rows of logits come back.
    fn brought(&self) -> usize {
        parts(&self.logit_rows, self.rows).map(|part| part.len()).sum()
    }

    /// What came back. The turn must be finished.
    pub(super) fn read(&self, output: &mut StepOutput) {
        (output.rows, output.columns) = (self.rows, self.columns);
        output.tokens.clear();
        output.tokens.extend_from_slice(words(&self.tokens, self.rows));
        output.logits.clear();
        output.logit_rows.clone_from(&self.logit_rows);
        let count = self.brought() * self.columns;
        let logits = &self.logits.bytes()[..elements::size(self.dtype) * count];
        if self.dtype == DType::F32 {
            output.logits.extend_from_slice(bytemuck::cast_slice(logits));
        } else {
            let mut values = Vec::with_capacity(count);
            elements::decode(self.dtype, logits, &mut values);
            output.logits.extend(values.into_iter().map(|v| v as f32));
        }
    }
}

/// Rows that lie one behind the other, together; none beyond `rows`.
fn parts(wanted: &LogitRows, rows: usize) -> impl Iterator<Item = Range<usize>> + '_ {
    let (all, some) = match wanted {
        LogitRows::All => (Some(0..rows), [].as_slice()),
        LogitRows::Of(some) => (None, some.as_slice()),
    };
    let some = &some[..some.partition_point(|row| (*row as usize) < rows)];
    let neighbours = some.chunk_by(|a, b| a + 1 == *b);
    all.into_iter().chain(neighbours.map(|part| part[0] as usize..part[0] as usize + part.len()))
}

fn words(memory: &Pinned, n: usize) -> &[u32] {
    bytemuck::cast_slice(&memory.bytes()[..4 * n])
}
