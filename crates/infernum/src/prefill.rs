//! Tokens straight on an executor, without an engine.

use infernum_runtime::{ExecError, Executor, StepInputs, StepOutput};

/// Computes the tokens of one sequence in steps of at most `chunk`. Its rows lie in these blocks of the cache;
/// `each` sees what each step yields.
pub fn prefill<E: Executor + ?Sized>(
    executor: &mut E,
    tokens: &[u32],
    blocks: &[u32],
    chunk: usize,
    mut each: impl FnMut(&StepOutput),
) -> Result<(), ExecError> {
    let mut inputs = StepInputs::new(StepInputs::BLOCK_SIZE);
    let mut done = 0;
    for part in tokens.chunks(chunk.max(1)) {
        done += part.len();
        inputs.clear();
        inputs.push(part, done, blocks)?;
        let ticket = executor.submit(&inputs)?;
        each(executor.wait(ticket)?);
    }
    Ok(())
}
