//! Weights take their packed form while they are loaded.

use infernum_codegen::cuda::Device;
use infernum_codegen::{Launch, Plan, Run};
use infernum_ir::{Dims, TensorType};

use super::driver::{Extent, Function, Stream};
use crate::exec::LoadError;

/// Launches what makes the packed form of a weight of type `from` that lies at an address, at another: its bytes.
pub(super) fn repack(
    plan: &Plan,
    (device, functions): (&Device, &[Function]),
    stream: &Stream,
    from: &TensorType,
    (at, to): (u64, u64),
) -> Result<u64, LoadError> {
    let is_for = |l: &&Launch| matches!(l.operands.first(), Some(Some(v)) if v.ty.tensor().is_ok_and(|ty| ty == from));
    let launch = plan.repacks.iter().find(is_for);
    let kernel =
        launch.and_then(|l| Some((l, l.run.as_ref()?, l.results.first()?.ty.tensor().ok()?)));
    let Some((launch, Run::Kernel(kernel), packed)) = kernel else {
        return Err(LoadError::Plan(format!("it has nothing that packs {from}")));
    };
    let fail = |message| LoadError::Kernel { launch: launch.name.clone(), message };
    let dims = Dims::default();
    let (grid, shared) = kernel.geometry.eval(launch, &dims, device).map_err(fail)?;
    let extent = Extent { grid, block: kernel.geometry.block, shared };
    // No step is there yet, and none is read.
    stream.launch(&functions[kernel.kernel as usize], extent, &mut [at, to, 0], &mut [], false)?;
    Ok(packed.bytes(&dims))
}
