//! What can be chosen of an executor.

/// How to set an executor up.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each turns one thing on or off")]
pub struct CudaOptions {
    /// Blocks of the KV cache.
    pub kv_blocks: usize,
    /// Tokens of the longest sequence; what a step holds at most when `None`.
    pub max_length: Option<usize>,
    /// Record decode steps as CUDA graphs.
    pub graphs: bool,
    /// Let a kernel start before the one before it has ended, where the GPU can.
    pub overlap: bool,
    /// Fills activations with NaN before they are written. Slow; no graphs.
    pub poison: bool,
    /// Measures the time that each op takes: see [`profile`](crate::exec::PlanExecutor::profile). Slow; no graphs.
    pub profile: bool,
    /// Kernels are to be [exchanged](super::CudaExecutor::retarget): there is room for whatever others need, and
    /// nothing is recorded ahead of its use.
    pub exchanges: bool,
}

impl Default for CudaOptions {
    fn default() -> Self {
        CudaOptions {
            kv_blocks: 64,
            max_length: None,
            graphs: true,
            overlap: true,
            poison: false,
            profile: false,
            exchanges: false,
        }
    }
}
