//! The lists of tokens that picks name, brought to the GPU with a step.

use std::sync::Arc;

use super::driver::{DeviceMemory, Gpu, Pinned, Stream};
use crate::exec::{GpuError, StepInputs};

/// Memory for the lists of one of the two steps that may be under way, on the host and on the GPU. It
/// grows as needed: kernels find it by the step's inputs, which recordings do not hold.
#[derive(Debug)]
pub(super) struct Lists {
    staged: Pinned,
    words: DeviceMemory,
}

impl Lists {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<Lists, GpuError> {
        let words = DeviceMemory::zeroed(gpu, WHAT, 0)?;
        Ok(Lists { staged: Pinned::new(gpu, 0)?, words })
    }

    /// Copies the lists of all rows, one behind the other, and says where kernels find them. The last step that this memory was for must have ended.
    pub(super) fn stage(
        &mut self,
        inputs: &StepInputs,
        gpu: &Arc<Gpu>,
        stream: &Stream,
    ) -> Result<u64, GpuError> {
        let bytes: &[u8] = bytemuck::cast_slice(inputs.step().picks.words());
        if self.staged.bytes().len() < bytes.len() {
            let room = bytes.len().next_power_of_two();
            self.staged = Pinned::new(gpu, room)?;
            self.words = DeviceMemory::zeroed(gpu, WHAT, room as u64)?;
        }
        if !bytes.is_empty() {
            self.staged.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
            stream.to_device(self.words.address(), &self.staged.bytes()[..bytes.len()])?;
        }
        Ok(self.words.address())
    }
}

const WHAT: &str = "lists of tokens";
