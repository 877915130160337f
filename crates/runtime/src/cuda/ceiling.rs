//! How fast a GPU's memory can be read.

use std::sync::Arc;

use infernum_codegen::cuda::{Cubin, Device};
use infernum_codegen::{KernelLaunch, Launch};
use infernum_ir::Dims;

use super::driver::{DeviceMemory, Event, Function, Gpu, Stream};
use crate::exec::GpuError;

/// Bytes that are read at once: many times what caches hold.
pub const CEILING_BYTES: u64 = 4 << 30;

/// Bytes a second at which `kernel` reads [`CEILING_BYTES`]: the best of several times.
pub fn read_ceiling(
    gpu: &Arc<Gpu>,
    (launch, kernel): (&Launch, &KernelLaunch),
    (cubin, name): (&Cubin, &str),
    device: &Device,
) -> Result<f64, GpuError> {
    let function = Function::load(gpu, &cubin.0, name)?;
    let stream = Stream::new(gpu)?;
    let memory = DeviceMemory::zeroed(gpu, "measuring", CEILING_BYTES)?;
    let result = DeviceMemory::zeroed(gpu, "measuring", 16)?;
    let size = kernel.geometry.eval(launch, &Dims::default(), device);
    let (grid, shared) =
        size.map_err(|message| GpuError::Call { call: "read_ceiling", message })?;
    let mut best = f64::INFINITY;
    for _ in 0..8 {
        let (start, end) = (Event::new(gpu)?, Event::new(gpu)?);
        let mut arguments = [memory.address(), result.address(), 0];
        stream.record(&start)?;
        stream.launch(&function, grid, kernel.geometry.block, shared, &mut arguments, false)?;
        stream.record(&end)?;
        end.synchronize()?;
        best = best.min(f64::from(start.until(&end)?) / 1e3);
    }
    Ok(CEILING_BYTES as f64 / best)
}
