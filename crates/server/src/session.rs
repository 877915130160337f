//! From options to an engine that is ready to run.

use std::error::Error;
use std::time::{Duration, Instant};

use infernum_codegen::compile::{self, Options};
use infernum_codegen::{Limits, Plan};
use infernum_frontend_hf::{Checkpoint, LowerOptions, Model};
use infernum_ir::Sym;
use infernum_runtime::cpu::{CpuExecutor, CpuOptions};
use infernum_runtime::{Engine, EngineLimits, StepInputs, WeightSource};

use crate::args::ModelArgs;
use crate::report;

/// The target that plans are run on.
pub(crate) const CPU: &str = "cpu";

/// How a model is run.
#[derive(clap::Args, Clone, Copy, Debug)]
pub(crate) struct RunArgs {
    /// Threads; one a core when left out.
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    pub(crate) threads: usize,
    /// Most prompt tokens computed in one step.
    #[arg(long, value_name = "TOKENS", default_value_t = 256)]
    pub(crate) chunk: usize,
}

/// Compiles a model for steps of one sequence.
pub(crate) fn plan(
    model: &Model,
    args: &ModelArgs,
    run: &RunArgs,
    rows: Sym,
    max_length: u64,
) -> Result<Plan, Box<dyn Error>> {
    let (pipeline, kernels) = (args.pipeline()?, args.kernels()?);
    let costs = args.cost_table(CPU)?;
    let options = Options {
        model,
        lower: LowerOptions { dtype: args.dtype, max_length: Some(max_length), rows },
        pipeline: &pipeline,
        kernels: &kernels,
        costs: (CPU, &costs),
        rules: None,
        explain: false,
        limits: Limits { chunk: run.chunk.max(1) as u64, sequences: 1, max_length },
    };
    let bar = report::steps_bar("compiling", compile::step_names(&pipeline).len() as u64);
    let compiled = compile::compile(&options, &mut |_, _, _| bar.inc(1));
    bar.finish_and_clear();
    Ok(compiled?.plan)
}

/// Loads a plan.
pub(crate) fn executor(
    plan: Plan,
    weights: &dyn WeightSource,
    run: &RunArgs,
    max_length: usize,
    profile: bool,
) -> Result<CpuExecutor, Box<dyn Error>> {
    let options = CpuOptions {
        kv_blocks: max_length.div_ceil(StepInputs::BLOCK_SIZE),
        threads: run.threads,
        profile,
        ..CpuOptions::default()
    };
    Ok(CpuExecutor::new(plan, weights, options)?)
}

/// An engine for one sequence of at most `max_length` tokens.
pub(crate) fn engine(
    executor: CpuExecutor,
    run: &RunArgs,
    max_length: usize,
) -> Engine<CpuExecutor> {
    let plan = executor.plan();
    let vocab = plan.vocabulary();
    let limits = EngineLimits {
        step: plan.limits,
        max_length,
        chunk: run.chunk.max(1),
        blocks: max_length.div_ceil(StepInputs::BLOCK_SIZE),
        block_size: StepInputs::BLOCK_SIZE,
        vocab: vocab as usize,
    };
    Engine::new(executor, limits)
}

/// Reads a checkpoint's pages, with a progress bar, so that the first step does not wait for the
/// disk. A checkpoint in the page cache takes no time.
pub(crate) fn warm(checkpoint: &Checkpoint) {
    const PAGE: usize = 4096;
    let bar = report::bytes_bar("reading weights", checkpoint.data_len());
    let mut sum = 0u8;
    for tensor in checkpoint.tensors() {
        for part in tensor.data.chunks(1 << 24) {
            sum = part.iter().step_by(PAGE).fold(sum, |s, b| s.wrapping_add(*b));
            bar.inc(part.len() as u64);
        }
    }
    std::hint::black_box(sum);
    bar.finish_and_clear();
}

/// Tokens and the time they took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Speed {
    pub(crate) tokens: usize,
    pub(crate) time: Duration,
}

impl Speed {
    /// What was done since `start`.
    pub(crate) fn since(start: Instant, tokens: usize) -> Speed {
        Speed { tokens, time: start.elapsed() }
    }

    /// Tokens a second.
    pub(crate) fn rate(self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64().max(1e-9)
    }
}
