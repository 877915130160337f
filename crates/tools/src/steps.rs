//! What benches measure: prompts in chunks and decoded tokens, straight on an executor.

use std::hint::black_box;
use std::time::{Duration, Instant};

use infernum::prefill;
use infernum_codegen::Plan;
use infernum_runtime::{ExecError, PlanExecutor, SequenceSteps, StepInputs, most_blocks, tables};
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
    /// Token `i` of the prompt and the answer: spread over the vocabulary.
    pub(crate) fn token(&self, i: usize) -> u32 {
        (i as u64 * 7919 % self.vocab.max(1)) as u32
    }
}

/// A prompt and an answer of every sequence: prompts one after another, answers together.
pub(crate) fn once(executor: &mut dyn PlanExecutor, lengths: &Lengths) -> Result<Run, ExecError> {
    let Lengths { prompt, generate, batch, chunk, .. } = *lengths;
    let (groups, size) = (executor.groups(), StepInputs::BLOCK_SIZE);
    let per_sequence = most_blocks(&groups, prompt + generate, size, chunk) as u32;
    let blocks = (0..batch as u32).map(|b| {
        let own = b * per_sequence..(b + 1) * per_sequence;
        tables(&groups, prompt + generate, size, chunk, own)
    });
    let blocks: Vec<Vec<u32>> = blocks.collect();
    let tokens: Vec<u32> = (0..prompt + generate).map(|i| lengths.token(i)).collect();
    let start = Instant::now();
    for blocks in &blocks {
        let sequence =
            SequenceSteps::new(size, blocks.clone()).with_groups(&groups).without_logits();
        prefill(executor, sequence, &tokens[..prompt], chunk, |output| _ = black_box(output))?;
    }
    let prompts = Speed::since(start, prompt * batch);
    let mut inputs = StepInputs::asking(size).with_groups(&groups);
    let start = Instant::now();
    for i in prompt..prompt + generate {
        inputs.clear();
        for blocks in &blocks {
            inputs.push(&tokens[i..=i], i + 1, blocks)?;
        }
        black_box(executor.run(&inputs)?);
    }
    let decode = Speed::since(start, generate * batch);
    Ok(Run { prefill_tokens_per_second: prompts.rate(), decode_tokens_per_second: decode.rate() })
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
    let tokens: Vec<u32> = (0..lengths.prompt).map(|i| lengths.token(i)).collect();
    let mut last = Vec::new();
    prefill(executor, sequence, &tokens, lengths.chunk, |output| last.clone_from(&output.logits))?;
    Ok(last)
}
