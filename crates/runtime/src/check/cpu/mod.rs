//! Holds the CPU's kernels for fused ops against the ops' bodies, behind guards.

mod guards;

use infernum_codegen::{TargetKind, plan_buckets};
use infernum_ir::{DType, Module, Op, OpSet};

use self::guards::Guarded;
use super::cases::{CASES, Case, HEADS, RAGGED, Sizes};
use super::{KernelVerdict, Trial, allowed};
use crate::cpu::{CpuExecutor, CpuOptions, WrapKernel, has_kernel};

const BLOCK: usize = 4;

/// Runs every kernel of a fused op in `ops` that there are cases for, in every element type, over
/// ragged batches on scattered blocks, dead memory filled with NaN. A kernel that writes beside its
/// results, to an operand or to another sequence's cache, or leaves an element unwritten, fails.
pub fn check(ops: &OpSet, seed: u64) -> Vec<KernelVerdict> {
    let mut verdicts = Vec::new();
    for op in ops.fused().filter(|op| has_kernel(op.name)) {
        for case in CASES.iter().filter(|case| case.op() == op.name) {
            for sizes in HEADS.map(Sizes::heads) {
                for dtype in [DType::F32, DType::Bf16, DType::F16] {
                    verdicts.push(verdict(op, ops, case, sizes, dtype, seed));
                }
            }
        }
    }
    verdicts
}

/// Fused ops with a kernel that [`check`] has no case for.
pub fn unchecked(ops: &OpSet) -> Vec<&'static str> {
    let has_case = |op: &Op| CASES.iter().any(|c| c.op() == op.name);
    ops.fused().filter(|op| has_kernel(op.name) && !has_case(op)).map(|op| op.name).collect()
}

fn verdict(
    op: Op,
    ops: &OpSet,
    case: &Case,
    sizes: Sizes,
    dtype: DType,
    seed: u64,
) -> KernelVerdict {
    let mut verdict = KernelVerdict {
        op: op.name.to_owned(),
        variant: None,
        dtype,
        case: format!("{} {sizes}", case.attributes()),
        error: 0.0,
        allowed: allowed(op.tolerance, dtype),
        problem: None,
    };
    let run = case
        .module(sizes, dtype, ops)
        .and_then(|m| compare(&m, seed, &|launch, kernel| Box::new(Guarded::new(launch, kernel))));
    match run {
        Ok(error) => verdict.error = error,
        Err(problem) => verdict.problem = Some(problem),
    }
    verdict
}

/// The worst error of a module's plan against its interpretation.
fn compare(module: &Module, seed: u64, wrap: &WrapKernel<'_>) -> Result<f64, String> {
    let batch = &RAGGED;
    let trial = Trial::new(module, seed, batch, BLOCK)?;
    let buckets: Vec<_> = batch.buckets.iter().map(|b| (*b, module.clone())).collect();
    let plan = plan_buckets(&buckets, TargetKind::Cpu, batch.limits).map_err(|e| e.to_string())?;
    let options = CpuOptions {
        kv_blocks: batch.blocks(BLOCK),
        block_size: BLOCK,
        threads: 2,
        poison: true,
        profile: false,
    };
    let executor = CpuExecutor::with_kernels(plan, &trial.weights, options, wrap);
    trial.worst(&mut executor.map_err(|e| e.to_string())?)
}
