//! Holds the CPU's kernels for fused ops against the ops' bodies, behind guards.

mod guards;

use infernum_codegen::{TargetKind, expand, plan_buckets};
use infernum_ir::{DType, Module, Op, OpSet};
use infernum_passes::data::Kernels;

use self::guards::Guarded;
use super::batches::RAGGED;
use super::calls::CASES;
use super::cases::{Tried, is_written, made};
use super::sizes::{HEADS, Sizes};
use super::{Batch, Comparison, KernelVerdict, Trial, allowed};
use crate::cpu::{CpuExecutor, CpuOptions, WrapKernel, has_kernel};

const BLOCK: usize = 4;

const FLOATS: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// Runs every kernel of a fused op in `kernels`, and the `map` of each op that runs as one, in every
/// element type, over ragged batches on scattered blocks, dead memory filled with NaN. A kernel that
/// writes beside its results, to an operand or to another sequence's cache, or leaves an element
/// unwritten, fails. Only ops whose names contain `only` are tried.
pub fn check(kernels: &Kernels, seed: u64, only: &str) -> Vec<KernelVerdict> {
    let mut verdicts = Vec::new();
    let has_code = |op: &Op| has_kernel(op.name) || op.is_map();
    let named = |op: &Op| op.name.contains(only);
    for op in kernels.ops.fused().filter(has_code).filter(named) {
        for case in CASES.iter().filter(|case| case.op() == op.name) {
            for sizes in HEADS.map(Sizes::heads) {
                let tried = [Tried::Written(case, sizes), Tried::Cached(case, sizes)];
                let tried = &tried[..if case.takes_rows() { 2 } else { 1 }];
                for (dtype, tried) in
                    FLOATS.into_iter().flat_map(|d| tried.iter().map(move |t| (d, t)))
                {
                    verdicts.push(verdict(op, &kernels.ops, Ok(tried.clone()), dtype, seed));
                }
            }
        }
        for dtype in FLOATS.into_iter().filter(|_| !is_written(op)) {
            let calls = match made(kernels, op, dtype, seed) {
                Ok(calls) => calls.into_iter().map(Ok).collect(),
                Err(problem) => vec![Err(problem)],
            };
            let calls = calls.into_iter();
            verdicts.extend(calls.map(|call| verdict(op, &kernels.ops, call, dtype, seed)));
        }
    }
    verdicts
}

/// Fused ops with a kernel that [`check`] has no calls for.
pub fn unchecked(kernels: &Kernels) -> Vec<&'static str> {
    let has_call = |op: &Op| {
        CASES.iter().any(|c| c.op() == op.name)
            || (!is_written(*op) && made(kernels, *op, DType::F32, 1).is_ok())
    };
    let with_kernel = kernels.ops.fused().filter(|op| has_kernel(op.name));
    with_kernel.filter(|op| !has_call(op)).map(|op| op.name).collect()
}

fn verdict(
    op: Op,
    ops: &OpSet,
    tried: Result<Tried, String>,
    dtype: DType,
    seed: u64,
) -> KernelVerdict {
    let of_op = allowed(op.tolerance, dtype);
    let allowed = tried.as_ref().map_or(of_op, |tried| tried.allowed(of_op));
    let case = tried.as_ref().map_or_else(|_| String::new(), ToString::to_string);
    // An op without a kernel of its own runs as what it stands for.
    let module = tried.and_then(|tried| tried.module(dtype, ops));
    let module = module.and_then(|meant| {
        let run = expand(&meant, &|call| has_kernel(call.op.name)).map_err(|e| e.to_string())?;
        Ok((meant, run))
    });
    KernelVerdict {
        op: op.name.to_owned(),
        variant: None,
        dtype,
        case,
        allowed,
        outcome: module.and_then(|(meant, run)| compare_plan(&meant, &run, &RAGGED, seed, allowed)),
    }
}

/// The plan of what is run, behind guards, against the interpretation of what is meant.
pub(super) fn compare_plan(
    meant: &Module,
    run: &Module,
    batch: &Batch,
    seed: u64,
    allowed: f64,
) -> Result<Comparison, String> {
    let guarded: &WrapKernel<'_> = &|launch, kernel| Box::new(Guarded::new(launch, kernel));
    compare((meant, run), batch, seed, guarded, allowed)
}

fn compare(
    (meant, run): (&Module, &Module),
    batch: &Batch,
    seed: u64,
    wrap: &WrapKernel<'_>,
    allowed: f64,
) -> Result<Comparison, String> {
    let trial = Trial::new(meant, seed, batch, BLOCK)?;
    let buckets: Vec<_> = batch.buckets.iter().map(|b| (*b, run.clone())).collect();
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
