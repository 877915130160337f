//! The two steps that may be under way: what each brings to the GPU and back.

use std::ops::Range;
use std::sync::Arc;

use infernum_codegen::{Plan, Yields};
use infernum_ir::picking::PickRow;
use infernum_ir::{DType, Dims, NO_TOKEN};

use super::driver::{Event, Gpu, Pinned, Stream};
use super::lists::Lists;
use crate::exec::{GpuError, LogitRows, StepInputs, StepOutput, elements};
use crate::sampling::Logprobs;

/// One of them.
#[derive(Debug)]
pub(super) struct Turn {
    /// Its inputs, read by the GPU while the host fills the other's.
    pub(super) staged: Pinned,
    /// How its tokens are picked, where that is brought later.
    pub(super) picks: Pinned,
    /// What the picks name.
    pub(super) lists: Lists,
    tokens: Pinned,
    logits: Pinned,
    logit_rows: LogitRows,
    /// Log-probabilities, and the tokens that they are of.
    told: [Pinned; 2],
    /// The rows that they are told of.
    tells: Vec<(usize, PickRow)>,
    done: Event,
    pub(super) ticket: u64,
    left: Left,
}

/// What a step leaves on the GPU, and where.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left {
    pub(super) rows: usize,
    /// A token of each row, if they have one.
    pub(super) tokens: Option<u64>,
    /// Of each row; 0 where there are no logits.
    pub(super) columns: usize,
    /// The element type of the logits.
    pub(super) dtype: DType,
    pub(super) logits: u64,
    /// Of each row, where it can be told of: log-probabilities and tokens.
    pub(super) told: Option<(usize, [u64; 2])>,
}

impl Left {
    pub(super) const NOTHING: Left =
        Left { rows: 0, tokens: None, columns: 0, dtype: DType::F32, logits: 0, told: None };

    /// What a schedule's last call leaves for the host: logits, tokens, log-probabilities. Buffers lie from `arena` on.
    pub(super) fn of(plan: &Plan, arena: u64, schedule: usize, dims: &Dims) -> Left {
        let last = plan.schedules[schedule].calls.last();
        let program = last.and_then(|c| plan.programs.get(c.program as usize));
        let Some((program, yields)) = program.zip(plan.yields(schedule)) else {
            return Left::NOTHING;
        };
        let results = &program.results;
        let at = |i: usize| {
            let buffer = results.get(i).map(|c| program.buffers[c.buffer as usize]);
            arena + buffer.map_or(0, |region| region.offset)
        };
        let width = |i: usize| results.get(i).and_then(|c| c.ty.last_const()).unwrap_or(1) as usize;
        let rows = results.first().and_then(|c| c.ty.shape.first());
        let rows = rows.map_or(0, |d| d.eval(dims)) as usize;
        let dtype = results.first().map_or(DType::F32, |c| c.ty.dtype);
        let logits = Left { rows, columns: width(0), dtype, logits: at(0), ..Left::NOTHING };
        match yields {
            Yields::Tokens => Left { rows, tokens: Some(at(0)), ..Left::NOTHING },
            Yields::Logits => logits,
            Yields::Picks => {
                Left { tokens: Some(at(1)), told: Some((width(2), [at(2), at(3)])), ..logits }
            }
        }
    }
}

impl Turn {
    /// For inputs of so many bytes, of which some bring picks later, and so many rows of output, of each of which so
    /// many numbers are told.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        [inputs, picks]: [usize; 2],
        rows: usize,
        told: usize,
    ) -> Result<Turn, GpuError> {
        let told = || Pinned::new(gpu, 4 * rows * told);
        Ok(Turn {
            staged: Pinned::new(gpu, inputs)?,
            picks: Pinned::new(gpu, picks)?,
            tokens: Pinned::new(gpu, 4 * rows)?,
            lists: Lists::new(gpu)?,
            logits: Pinned::new(gpu, 0)?,
            logit_rows: LogitRows::All,
            told: [told()?, told()?],
            tells: Vec::new(),
            done: Event::new(gpu)?,
            ticket: 0,
            left: Left::NOTHING,
        })
    }

    /// Waits until the GPU is done with it.
    pub(super) fn finish(&self) -> Result<(), GpuError> {
        self.done.synchronize()
    }

    /// Has what is wanted of what a step left brought back: tokens, the logits of `logit_rows`, and what is
    /// told of rows.
    pub(super) fn bring(
        &mut self,
        gpu: &Arc<Gpu>,
        stream: &Stream,
        left: Left,
        logit_rows: &LogitRows,
        inputs: &StepInputs,
    ) -> Result<(), GpuError> {
        self.left = left;
        self.logit_rows.clone_from(logit_rows);
        let Left { rows, columns, dtype, logits, .. } = left;
        if let Some(tokens) = left.tokens.filter(|_| rows > 0) {
            stream.to_host(&mut self.tokens.bytes_mut()[..4 * rows], tokens)?;
        }
        self.tells.clear();
        if let Some((width, places)) = left.told {
            let wishes = inputs.step().picks.set_rows();
            self.tells.extend(wishes.filter(|(row, pick)| pick.told > 0 && *row < rows));
            for (told, from) in self.told.iter_mut().zip(places) {
                if !self.tells.is_empty() {
                    stream.to_host(&mut told.bytes_mut()[..4 * width * rows], from)?;
                }
            }
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
        parts(&self.logit_rows, self.left.rows).map(|part| part.len()).sum()
    }

    /// What came back. The turn must be finished.
    pub(super) fn read(&self, output: &mut StepOutput) {
        let Left { rows, columns, dtype, .. } = self.left;
        (output.rows, output.columns) = (rows, columns);
        output.tokens.clear();
        if self.left.tokens.is_some() {
            output.tokens.extend_from_slice(words(&self.tokens, rows));
        }
        output.told.clear();
        let told = self.tells.iter().filter(|(row, _)| output.tokens[*row] != NO_TOKEN);
        output.told.extend(told.map(|(row, pick)| (*row as u32, self.told(*row, pick))));
        output.logits.clear();
        output.logit_rows.clone_from(&self.logit_rows);
        let count = self.brought() * columns;
        let logits = &self.logits.bytes()[..elements::size(dtype) * count];
        if dtype == DType::F32 {
            output.logits.extend_from_slice(bytemuck::cast_slice(logits));
        } else {
            let mut values = Vec::with_capacity(count);
            elements::decode(dtype, logits, &mut values);
            output.logits.extend(values.into_iter().map(|v| v as f32));
        }
    }

    /// What is told of a row that has a token.
    fn told(&self, row: usize, pick: &PickRow) -> Logprobs {
        let width = self.left.told.map_or(0, |(width, _)| width);
        let [logprobs, tokens] = &self.told;
        let logprobs: &[f32] =
            bytemuck::cast_slice(&logprobs.bytes()[4 * width * row..][..4 * width]);
        let tokens = &words(tokens, width * (row + 1))[width * row..];
        let top = (pick.told as usize).min(width).min(1 + self.left.columns);
        let likeliest = tokens[1..top].iter().copied().zip(logprobs[1..top].iter().copied());
        Logprobs {
            token: pick.given.checked_sub(1).unwrap_or(words(&self.tokens, row + 1)[row]),
            logprob: logprobs[0],
            rank: tokens[0] + 1,
            top: likeliest.collect(),
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
