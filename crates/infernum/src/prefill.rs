//! Tokens straight on an executor, without an engine.

use infernum_runtime::{ExecError, Executor, SequenceSteps, StepInputs, StepOutput};

/// Computes the tokens of one sequence in steps of at most `chunk`. Its rows lie in these blocks of the cache;
/// `each` sees what each step yields.
pub fn prefill<E: Executor + ?Sized>(
    executor: &mut E,
    tokens: &[u32],
    blocks: &[u32],
    chunk: usize,
    mut each: impl FnMut(&StepOutput),
) -> Result<(), ExecError> {
    let mut sequence = SequenceSteps::new(StepInputs::BLOCK_SIZE, blocks.to_vec());
    for part in tokens.chunks(chunk.max(1)) {
        each(executor.run(sequence.next(part)?)?);
    }
    Ok(())
}
