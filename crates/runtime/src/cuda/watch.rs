//! Looking at memory around each launch: checks of kernels fence them in, benches count what is read.

use infernum_codegen::Launch;
use infernum_ir::Dims;

use super::driver::{DeviceMemory, Stream};
use super::frame::Frame;

/// All memory that launches may write to, but for the weights.
pub(crate) struct DeviceState<'a> {
    pub(crate) stream: &'a Stream,
    pub(crate) arena: &'a DeviceMemory,
    pub(crate) states: &'a [DeviceMemory],
    pub(crate) inputs: &'a DeviceMemory,
    /// Rows of the cache that the step's tokens have.
    pub(crate) slots: &'a [usize],
}

/// Stands around every launch of an executor, which then runs without graphs.
pub(crate) trait Watch: Send {
    /// Bytes before and after activations, and around each plane of the cache, that nobody uses.
    fn margin(&self) -> u64;

    /// The memory is there and nothing has run yet.
    fn begin(&self, memory: &DeviceState<'_>) -> Result<(), String>;

    /// Calls `run`, which launches once, and fails where that did what it may not.
    fn around(
        &self,
        memory: &DeviceState<'_>,
        launch: &Launch,
        frame: &Frame<'_>,
        dims: &Dims,
        run: &mut dyn FnMut() -> Result<(), String>,
    ) -> Result<(), String>;
}
