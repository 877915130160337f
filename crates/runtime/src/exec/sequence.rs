//! One sequence, step by step: for whoever drives an executor without an engine.

use super::{ExecError, GroupKind, StepInputs, groups};

/// A sequence on blocks of the cache that are its own. A prompt in chunks, on an executor:
///
/// ```
/// # use infernum_runtime::{ExecError, Executor, SequenceSteps};
/// fn logits(executor: &mut dyn Executor, prompt: &[u32], chunk: usize) -> Result<Vec<f32>, ExecError> {
///     let mut sequence = SequenceSteps::for_tokens(&executor.groups(), prompt.len(), chunk);
///     let mut logits = Vec::new();
///     for tokens in prompt.chunks(chunk) {
///         logits.extend_from_slice(&executor.run(sequence.next(tokens)?)?.logits);
///     }
///     Ok(logits)
/// }
/// ```
#[derive(Clone, Debug)]
pub struct SequenceSteps {
    inputs: StepInputs,
    blocks: Vec<u32>,
    context: usize,
}

impl SequenceSteps {
    /// An empty sequence on `blocks`, in order, each of `block_size` tokens: a table for each group of layers, see
    /// [`StepInputs::push`].
    pub fn new(block_size: usize, blocks: Vec<u32>) -> SequenceSteps {
        SequenceSteps { inputs: StepInputs::new(block_size), blocks, context: 0 }
    }

    /// An empty sequence with room for so many tokens, in steps of at most `chunk`, on the first blocks of a cache
    /// whose blocks are of [`StepInputs::BLOCK_SIZE`] tokens.
    pub fn for_tokens(groups: &[GroupKind], tokens: usize, chunk: usize) -> SequenceSteps {
        let tables = groups::tables(groups, tokens, StepInputs::BLOCK_SIZE, chunk, 0..);
        SequenceSteps::new(StepInputs::BLOCK_SIZE, tables).with_groups(groups)
    }

    /// The same for a cache of several groups of layers.
    #[must_use]
    pub fn with_groups(self, groups: &[GroupKind]) -> SequenceSteps {
        SequenceSteps { inputs: self.inputs.with_groups(groups), ..self }
    }

    /// Its steps bring no logits, where the executor picks tokens itself.
    #[must_use]
    pub fn without_logits(self) -> SequenceSteps {
        let inputs = StepInputs::asking(self.inputs.block_size());
        SequenceSteps { inputs: inputs.with_groups(self.inputs.groups()), ..self }
    }

    /// The step that computes its next tokens. It must run before the next is asked for.
    pub fn next(&mut self, tokens: &[u32]) -> Result<&StepInputs, ExecError> {
        self.inputs.clear();
        self.inputs.push(tokens, self.context + tokens.len(), &self.blocks)?;
        self.context += tokens.len();
        Ok(&self.inputs)
    }

    /// Tokens of all steps so far.
    pub fn context(&self) -> usize {
        self.context
    }
}
