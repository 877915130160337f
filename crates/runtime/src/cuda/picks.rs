//! Which rows of weights a step reads, where tokens choose them: experts, and rows of a table.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use infernum_codegen::{Arg, Launch};
use infernum_ir::{DType, Dims, Type};

use super::frame::Frame;
use super::watch::{DeviceState, Watch};
use crate::exec::{GpuError, PickedRows};

/// Reads the operand `ids` of every launch that has one beside weights.
#[derive(Clone, Default)]
pub(super) struct Picks(Arc<Mutex<Vec<PickedRows>>>);

impl Picks {
    /// What was found, in the order of the launches.
    pub(super) fn take(&self) -> Vec<PickedRows> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Watch for Picks {
    fn margin(&self) -> u64 {
        0
    }

    fn begin(&self, _: &DeviceState<'_>) -> Result<(), String> {
        Ok(())
    }

    fn around(
        &self,
        memory: &DeviceState<'_>,
        launch: &Launch,
        frame: &Frame<'_>,
        dims: &Dims,
        run: &mut dyn FnMut() -> Result<(), String>,
    ) -> Result<(), String> {
        let mut operands = launch.named_values().take(launch.operands.len());
        let ids = operands.find(|(name, _)| *name == "ids").and_then(|(_, v)| v);
        if let Some(value) = ids
            && let Type::Tensor(ty) = &value.ty
            && ty.dtype == DType::U32
        {
            let (mut bytes, fail) = (vec![0; ty.bytes(dims) as usize], |e: GpuError| e.to_string());
            memory.stream.to_host(&mut bytes, frame.address(value)?).map_err(fail)?;
            memory.stream.synchronize().map_err(fail)?;
            let picked: HashSet<&[u8]> = bytes.chunks_exact(4).collect();
            for weight in launch.operands.iter().flatten() {
                if let (Arg::Weight(slot), Type::Tensor(ty)) = (weight.arg, &weight.ty) {
                    let unbound = || format!("{:?} is not bound", weight.arg);
                    let weight =
                        *frame.call.weights.get(slot as usize).ok_or_else(unbound)? as usize;
                    let of = ty.shape.first().map_or(1, |d| d.eval(dims)) as usize;
                    let picked =
                        PickedRows { op: launch.op.clone(), weight, rows: picked.len(), of };
                    self.0.lock().unwrap_or_else(PoisonError::into_inner).push(picked);
                }
            }
        }
        run()
    }
}
