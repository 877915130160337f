//! Holds the CPU's kernels for fused ops against the ops' bodies, behind guards.

mod guards;

use infernum_codegen::{TargetKind, plan_buckets};
use infernum_ir::{DType, Module, Op, OpSet};

use self::guards::Guarded;
use super::cases::{CASES, Case, HEADS, RAGGED, Sizes};
use super::{Comparison, KernelVerdict, Trial, allowed};
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
    let allowed = allowed(op.tolerance, dtype);
    let guarded: &WrapKernel<'_> = &|launch, kernel| Box::new(Guarded::new(launch, kernel));
    let module = case.module(sizes, dtype, ops);
    KernelVerdict {
        op: op.name.to_owned(),
        variant: None,
        dtype,
        case: format!("{} {sizes}", case.attributes()),
        allowed,
        outcome: module.and_then(|m| compare(&m, seed, guarded, allowed)),
    }
}

/// A module's plan against its interpretation.
fn compare(
    module: &Module,
    seed: u64,
    wrap: &WrapKernel<'_>,
    allowed: f64,
) -> Result<Comparison, String> {
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
    trial.compare(&mut executor.map_err(|e| e.to_string())?, allowed)
}
