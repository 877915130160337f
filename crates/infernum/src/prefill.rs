//! Tokens straight on an executor, without an engine.

use infernum_runtime::{ExecError, Executor, SequenceSteps, StepOutput};

/// Computes the next tokens of a sequence in steps of at most `chunk`; `each` sees what each step
/// yields.
pub fn prefill<E: Executor + ?Sized>(
    executor: &mut E,
    mut sequence: SequenceSteps,
    tokens: &[u32],
    chunk: usize,
    mut each: impl FnMut(&StepOutput),
) -> Result<(), ExecError> {
    for part in tokens.chunks(chunk.max(1)) {
        each(executor.run(sequence.next(part)?)?);
    }
    Ok(())
}
