//! What benches measure: prompts in chunks and decoded tokens, straight on an executor.

use std::hint::black_box;
use std::time::{Duration, Instant};

use infernum::prefill;
use infernum_codegen::Plan;
use infernum_runtime::{
    ExecError, PickedRows, PlanExecutor, SequenceSteps, StepInputs, most_blocks, tables,
};
use serde::Serialize;

/// How fast a prompt and an answer were.
#[derive(Clone, Copy, Serialize)]
pub(crate) struct Run {
    pub(crate) prefill_tokens_per_second: f64,
    pub(crate) decode_tokens_per_second: f64,
}

/// Tokens and the time they took.
#[derive(Clone, Copy, Debug)]
struct Speed {
    tokens: usize,
    time: Duration,
}

impl Speed {
    /// What was done since `start`.
    fn since(start: Instant, tokens: usize) -> Speed {
        Speed { tokens, time: start.elapsed() }
    }

    /// Tokens a second.
    fn rate(self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64().max(1e-9)
    }
}

/// What is measured: sequences, each with tokens of prompt, computed in chunks, and tokens decoded.
pub(crate) struct Lengths {
    pub(crate) prompt: usize,
    pub(crate) generate: usize,
    pub(crate) batch: usize,
    pub(crate) chunk: usize,
    pub(crate) vocab: u64,
}

impl Lengths {
    /// Token `i` of the prompt and the answer of a sequence: spread over the vocabulary, and different in each
    /// sequence, as equal tokens go to the same experts.
    pub(crate) fn token(&self, sequence: usize, i: usize) -> u32 {
        ((i as u64 * 7919 + sequence as u64 * 104_729) % self.vocab.max(1)) as u32
    }

    /// The blocks of each sequence, which has its own, group by group.
    fn blocks(&self, executor: &dyn PlanExecutor) -> Vec<Vec<u32>> {
        let (groups, size) = (executor.groups(), StepInputs::BLOCK_SIZE);
        let length = self.prompt + self.generate;
        let own = most_blocks(&groups, length, size, self.chunk) as u32;
        let of = |b: u32| tables(&groups, length, size, self.chunk, b * own..(b + 1) * own);
        (0..self.batch as u32).map(of).collect()
    }

    /// The step that decodes token `i` of every sequence.
    fn decode(
        &self,
        inputs: &mut StepInputs,
        blocks: &[Vec<u32>],
        i: usize,
    ) -> Result<(), ExecError> {
        inputs.clear();
        let mut all = blocks.iter().enumerate();
        all.try_for_each(|(b, blocks)| inputs.push(&[self.token(b, i)], i + 1, blocks))
    }
}

/// A prompt and an answer of every sequence: prompts one after another, answers together.
pub(crate) fn once(executor: &mut dyn PlanExecutor, lengths: &Lengths) -> Result<Run, ExecError> {
    let Lengths { prompt, generate, batch, chunk, .. } = *lengths;
    let (groups, size) = (executor.groups(), StepInputs::BLOCK_SIZE);
    let blocks = lengths.blocks(executor);
    let start = Instant::now();
    for (b, blocks) in blocks.iter().enumerate() {
        let sequence =
            SequenceSteps::new(size, blocks.clone()).with_groups(&groups).without_logits();
        let tokens: Vec<u32> = (0..prompt).map(|i| lengths.token(b, i)).collect();
        prefill(executor, sequence, &tokens, chunk, |output| _ = black_box(output))?;
    }
    let prompts = Speed::since(start, prompt * batch);
    let mut inputs = StepInputs::asking(size).with_groups(&groups);
    let start = Instant::now();
    for i in prompt..prompt + generate {
        lengths.decode(&mut inputs, &blocks, i)?;
        black_box(executor.run(&inputs)?);
    }
    let decode = Speed::since(start, generate * batch);
    Ok(Run { prefill_tokens_per_second: prompts.rate(), decode_tokens_per_second: decode.rate() })
}

/// The rows of weights that the last step of [`once`], done again, reads by number.
pub(crate) fn picked_rows(
    executor: &mut dyn PlanExecutor,
    lengths: &Lengths,
) -> Result<Option<Vec<PickedRows>>, ExecError> {
    let blocks = lengths.blocks(executor);
    let mut inputs = StepInputs::asking(StepInputs::BLOCK_SIZE).with_groups(&executor.groups());
    lengths.decode(&mut inputs, &blocks, lengths.prompt + lengths.generate - 1)?;
    executor.picked_rows(&inputs)
}

/// The tokens of a plan's vocabulary.
pub(crate) fn vocab(plan: &Plan) -> u64 {
    plan.vocabulary().max(1)
}

/// The middle one; NaN of none.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The logits after the prompt of [`once`].
pub(crate) fn after_prompt(
    executor: &mut dyn PlanExecutor,
    lengths: &Lengths,
) -> Result<Vec<f32>, ExecError> {
    let sequence = SequenceSteps::for_tokens(&executor.groups(), lengths.prompt, lengths.chunk);
    let tokens: Vec<u32> = (0..lengths.prompt).map(|i| lengths.token(0, i)).collect();
    let mut last = Vec::new();
    prefill(executor, sequence, &tokens, lengths.chunk, |output| last.clone_from(&output.logits))?;
    Ok(last)
}
