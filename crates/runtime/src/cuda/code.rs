//! Kernels on a GPU.

use std::sync::Arc;

use infernum_codegen::cuda::{Cubin, Device};
use infernum_codegen::{Arg, Plan, Run, TargetKind};
use infernum_ir::{StepInput, Type};

use super::driver::{DeviceMemory, Function, Gpu};
use crate::exec::{LoadError, plan_check};

/// A plan's kernels, loaded.
pub(super) struct Code {
    pub(super) device: Device,
    pub(super) functions: Vec<Function>,
    /// Each kernel's own memory.
    pub(super) scratch: Vec<Option<DeviceMemory>>,
}

impl Code {
    pub(super) fn load(plan: &Plan, cubins: &[Cubin], gpu: &Arc<Gpu>) -> Result<Code, LoadError> {
        plan_check::check(plan, TargetKind::Cuda)?;
        let none = || LoadError::Plan("it has no kernels for a GPU".to_owned());
        let device = plan.device.clone().ok_or_else(none)?;
        if cubins.len() != plan.kernels.len() {
            let (found, expected) = (cubins.len(), plan.kernels.len());
            return Err(LoadError::Plan(format!(
                "{found} compiled kernel(s), expected {expected}"
            )));
        }
        let functions = plan.kernels.iter().zip(cubins).map(|(k, c)| {
            Function::load(gpu, &c.0, &k.name).map_err(|e| LoadError::Kernel {
                launch: format!("kernel `{}` for {}", k.name, device.arch),
                message: e.to_string(),
            })
        });
        let functions = functions.collect::<Result<Vec<_>, _>>()?;
        let own = |bytes: u64| DeviceMemory::zeroed(gpu, "the kernels' own memory", bytes);
        let scratch =
            plan.kernels.iter().map(|k| (k.scratch > 0).then(|| own(k.scratch)).transpose());
        let scratch = scratch.collect::<Result<Vec<_>, _>>()?;
        Ok(Code { device, functions, scratch })
    }
}

/// Whether any launch is a library's.
pub(super) fn uses_library(plan: &Plan) -> bool {
    let mut launches = plan.programs.iter().flat_map(|p| &p.launches);
    launches.any(|l| matches!(l.run, Some(Run::Matmul(_))))
}

/// Whether any launch runs generated rows and prompt rows apart.
pub(super) fn runs_parts(plan: &Plan) -> bool {
    let mut launches = plan.programs.iter().flat_map(|p| &p.launches);
    launches.any(|l| matches!(l.run, Some(Run::Parts { .. })))
}

/// Whether any launch reads an input of the step as an operand.
pub(super) fn reads(plan: &Plan, input: StepInput) -> bool {
    let launches = plan.programs.iter().flat_map(|p| &p.launches);
    let mut operands = launches.flat_map(|l| l.operands.iter().flatten());
    operands.any(|v| v.arg == Arg::Step(input) && matches!(v.ty, Type::Tensor(_)))
}
