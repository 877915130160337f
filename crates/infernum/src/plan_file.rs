//! A plan and its kernels, as written by `infernum compile --out`.

use std::path::Path;

use infernum_codegen::cuda::Device;
use infernum_codegen::{FaultKind, Plan, PlanFault};
use infernum_ir::{OpSet, Sym};

use crate::capacity::Capacity;
use crate::error::PlanFileError;
use crate::machine::Machine;

/// Reads what `infernum compile --out` wrote to a folder.
pub(crate) fn read(
    folder: &Path,
    rows: Sym,
    capacity: Capacity,
    machine: &Machine,
    ops: &OpSet,
) -> Result<Plan, PlanFileError> {
    let file = folder.join("plan.json");
    let path = file.display().to_string();
    let bytes =
        std::fs::read(&file).map_err(|source| PlanFileError::Io { path: path.clone(), source })?;
    let fail = |fault: PlanFault| match fault.kind {
        FaultKind::UnknownOp(op) => PlanFileError::UnknownOp { path: path.clone(), op },
        FaultKind::Malformed => {
            PlanFileError::Json { path: path.clone(), message: fault.to_string() }
        }
    };
    let plan = Plan::read(&bytes, ops).map_err(fail)?;
    let arch = |d: Option<Device>| d.map_or("the CPU".to_owned(), |d| d.arch);
    let (expected, found) = (arch(plan.device.clone()), arch(machine.device()));
    if expected != found {
        return Err(PlanFileError::Device { path, expected, found });
    }
    let (b, s) = (plan.limits.seqs, plan.limits.s);
    let holds = |b: u64, length: u64| format!("{b} sequence(s) of {length} tokens");
    if capacity.sequences > b
        || capacity.sequences.saturating_mul(capacity.max_length).min(i32::MAX as u64) > s
    {
        let expected = holds(b, s.checked_div(b).unwrap_or(0));
        let found = holds(capacity.sequences, capacity.max_length);
        return Err(PlanFileError::Size { path, expected, found });
    }
    if plan.output_rows != Some(rows) {
        let name = |rows: Option<Sym>| match rows {
            Some(Sym::T) => "logits of every token".to_owned(),
            _ => "logits of each sequence's last token".to_owned(),
        };
        let (expected, found) = (name(plan.output_rows), name(Some(rows)));
        return Err(PlanFileError::Size { path, expected, found });
    }
    Ok(plan)
}
