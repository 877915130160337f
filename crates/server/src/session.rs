//! From options to an engine that is ready to run.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use infernum_codegen::compile::{self, Options};
use infernum_codegen::cuda::{Cache, Choices, Compiler, Device, Library};
use infernum_codegen::{Limits, Plan, VERSION};
use infernum_frontend_hf::{Checkpoint, LowerOptions, Model};
use infernum_ir::Sym;
use infernum_passes::fuse::CostTable;
use infernum_runtime::cpu::{CpuExecutor, CpuOptions};
use infernum_runtime::cuda::{CudaExecutor, CudaOptions, Gpu};
use infernum_runtime::{
    CheckpointWeights, Engine, EngineLimits, EngineOptions, OptionsError, PlanExecutor,
    RandomWeights, StepInputs, WeightSource,
};

use crate::args::ModelArgs;
use crate::report;

/// The target of plans for the host.
pub(crate) const CPU: &str = "cpu";

/// How a model is run.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct RunArgs {
    /// cpu, cuda, or cuda:N for GPU N; the first GPU if there is one when left out.
    #[arg(long, value_name = "NAME", value_parser = device_choice)]
    pub(crate) device: Option<DeviceChoice>,
    /// Threads of the CPU; one a core when left out.
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    pub(crate) threads: usize,
    /// Most prompt tokens computed in one step; 256 on the CPU and 2048 on a GPU when left out.
    #[arg(long, value_name = "TOKENS")]
    pub(crate) chunk: Option<usize>,
    /// Launch the kernels of every step one by one instead of replaying CUDA graphs.
    #[arg(long)]
    pub(crate) no_graphs: bool,
    /// Let no kernel start before the one before it has ended.
    #[arg(long)]
    pub(crate) no_overlap: bool,
    /// Part of the GPU's memory that may be used; the KV cache gets what weights leave of it.
    #[arg(long, value_name = "PART", default_value_t = 0.9)]
    pub(crate) gpu_memory_utilization: f64,
    /// Run what `infernum compile --target ARCH --out DIR` wrote, instead of compiling.
    #[arg(long, value_name = "DIR")]
    pub(crate) plan: Option<PathBuf>,
    /// On a GPU that was never tuned: look for faster kernels first, for so many seconds.
    #[arg(long, value_name = "SECONDS")]
    pub(crate) autotune: Option<u64>,
    /// Run the kernels that templates name first, whatever `infernum tune` found.
    #[arg(long)]
    pub(crate) untuned: bool,
    /// Folder of compiled kernels; a folder of the user's own when left out.
    #[arg(long, value_name = "DIR")]
    pub(crate) kernel_cache: Option<PathBuf>,
}

/// What --device says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    Cpu,
    Cuda(i32),
}

pub(crate) fn device_choice(text: &str) -> Result<DeviceChoice, String> {
    match text.split_once(':').map_or((text, "0"), |parts| parts) {
        ("cpu", "0") => Ok(DeviceChoice::Cpu),
        ("cuda", number) if number.parse::<i32>().is_ok_and(|n| n >= 0) => {
            Ok(DeviceChoice::Cuda(number.parse().unwrap_or(0)))
        }
        _ => Err(format!("expected cpu, cuda or cuda:N, found `{text}`")),
    }
}

/// What plans run on.
#[derive(Clone, Debug)]
pub(crate) enum Machine {
    Cpu,
    Gpu(Arc<Gpu>),
}

impl RunArgs {
    /// What was asked for, or the first GPU if there is one.
    pub(crate) fn machine(&self) -> Result<Machine, Box<dyn Error>> {
        Ok(match self.device {
            Some(DeviceChoice::Cuda(n)) => Machine::Gpu(Gpu::open(n)?),
            None if Gpu::count().is_ok_and(|n| n > 0) => Machine::Gpu(Gpu::open(0)?),
            Some(DeviceChoice::Cpu) | None => Machine::Cpu,
        })
    }

    /// Most prompt tokens in one step.
    pub(crate) fn chunk(&self, machine: &Machine) -> usize {
        let default = if matches!(machine, Machine::Cpu) { 256 } else { 2048 };
        self.chunk.unwrap_or(default).max(1)
    }

    /// What `infernum tune` found for an architecture, if it is wanted.
    pub(crate) fn choices(&self, arch: &str) -> Choices {
        if self.untuned { Choices::default() } else { self.cache().choices(arch) }
    }

    /// Where compiled kernels are.
    pub(crate) fn cache(&self) -> Cache {
        if let Some(folder) = &self.plan {
            return Cache::new(&folder.join("cubins"));
        }
        self.kernel_cache.as_deref().map_or_else(Cache::user, Cache::new)
    }
}

impl Machine {
    pub(crate) fn device(&self) -> Option<Device> {
        match self {
            Machine::Cpu => None,
            Machine::Gpu(gpu) => Some(Device::of(gpu.sm, gpu.sms)),
        }
    }

    /// The name of its cost table, and the table.
    pub(crate) fn costs(&self, args: &ModelArgs) -> Result<(String, CostTable), Box<dyn Error>> {
        let Some(device) = self.device() else {
            return Ok((CPU.to_owned(), args.cost_table(CPU)?));
        };
        // A chip without a table of its own has that of the one before it.
        let known = Device::KNOWN.iter().rev().filter(|(_, sm, _)| *sm <= device.sm);
        for (name, ..) in known {
            if CostTable::named(name, args.data.as_deref()).is_ok() {
                return Ok(((*name).to_owned(), args.cost_table(name)?));
            }
        }
        Err(format!("there are no costs for {}: expected at least sm_75", device.arch).into())
    }

    /// The pipeline that `default` stands for.
    pub(crate) fn pipeline(&self) -> &'static str {
        match self {
            Machine::Cpu => "default",
            Machine::Gpu(_) => "cuda",
        }
    }
}

/// The largest step that is wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) sequences: u64,
    pub(crate) max_length: u64,
    /// Blocks of the KV cache; enough for all sequences at their longest when `None`.
    pub(crate) kv_blocks: Option<usize>,
}

impl Size {
    /// One sequence.
    pub(crate) fn one(max_length: u64) -> Size {
        Size::of(1, max_length)
    }

    /// So many sequences, each with room in the cache.
    pub(crate) fn of(sequences: u64, max_length: u64) -> Size {
        Size { sequences, max_length, kv_blocks: None }
    }

    /// Blocks of the KV cache that it takes.
    pub(crate) fn blocks(self) -> usize {
        let all = self.max_length.div_ceil(StepInputs::BLOCK_SIZE as u64) * self.sequences;
        self.kv_blocks.unwrap_or(all as usize)
    }
}

/// Compiles a model.
pub(crate) fn plan(
    model: &Model,
    args: &ModelArgs,
    run: &RunArgs,
    rows: Sym,
    size: Size,
    machine: &Machine,
) -> Result<Plan, Box<dyn Error>> {
    if let Some(folder) = &run.plan {
        return written_plan(folder, rows, size, machine);
    }
    let (device, templates) = (machine.device(), Library::new(args.data.as_deref()));
    let choices = device.as_ref().map(|d| run.choices(&d.arch)).unwrap_or_default();
    let device = device.as_ref().map(|d| (d, &templates, &choices));
    plan_with(model, args, run, rows, size, machine, device)
}

/// A plan and its kernels, as written by `infernum compile --out`.
#[derive(Debug, thiserror::Error)]
enum WrittenPlanError {
    #[error("{path}: {source}")]
    Io { path: String, source: std::io::Error },
    #[error("{path}: expected a plan of version {VERSION}: {message}; compile it again")]
    Json { path: String, message: String },
    #[error("{path}: the plan is for {expected}, this machine has {found}; compile it for that")]
    Device { path: String, expected: String, found: String },
    #[error("{path}: the plan holds {expected}, wanted are {found}; compile it for those")]
    Size { path: String, expected: String, found: String },
}

/// Reads what `infernum compile --out` wrote to a folder.
fn written_plan(
    folder: &Path,
    rows: Sym,
    size: Size,
    machine: &Machine,
) -> Result<Plan, Box<dyn Error>> {
    let file = folder.join("plan.json");
    let path = file.display().to_string();
    let bytes = std::fs::read(&file)
        .map_err(|source| WrittenPlanError::Io { path: path.clone(), source })?;
    let json = |message: String| WrittenPlanError::Json { path: path.clone(), message };
    let plan: Plan = serde_json::from_slice(&bytes).map_err(|e| json(e.to_string()))?;
    if plan.version != VERSION {
        return Err(json(format!("found version {}", plan.version)).into());
    }
    let arch = |d: Option<Device>| d.map_or("the CPU".to_owned(), |d| d.arch);
    let (expected, found) = (arch(plan.device.clone()), arch(machine.device()));
    if expected != found {
        return Err(WrittenPlanError::Device { path, expected, found }.into());
    }
    let (b, s) = (plan.limits.b, plan.limits.s);
    let holds = |b: u64, length: u64| format!("{b} sequence(s) of {length} tokens");
    if size.sequences > b || size.sequences * size.max_length > s {
        let expected = holds(b, s.checked_div(b).unwrap_or(0));
        let found = holds(size.sequences, size.max_length);
        return Err(WrittenPlanError::Size { path, expected, found }.into());
    }
    if plan.output_rows != Some(rows) {
        let name = |rows: Option<Sym>| match rows {
            Some(Sym::T) => "logits of every token".to_owned(),
            _ => "logits of each sequence's last token".to_owned(),
        };
        let (expected, found) = (name(plan.output_rows), name(Some(rows)));
        return Err(WrittenPlanError::Size { path, expected, found }.into());
    }
    Ok(plan)
}

/// As [`plan`], with these kernels.
pub(crate) fn plan_with(
    model: &Model,
    args: &ModelArgs,
    run: &RunArgs,
    rows: Sym,
    size: Size,
    machine: &Machine,
    device: Option<(&Device, &Library, &Choices)>,
) -> Result<Plan, Box<dyn Error>> {
    let (pipeline, kernels) = (args.pipeline(machine.pipeline())?, args.kernels()?);
    let (target, costs) = machine.costs(args)?;
    let options = Options {
        model,
        lower: LowerOptions { dtype: args.dtype, max_length: Some(size.max_length), rows },
        pipeline: &pipeline,
        kernels: &kernels,
        costs: (&target, &costs),
        rules: None,
        explain: false,
        limits: Limits {
            chunk: run.chunk(machine) as u64,
            sequences: size.sequences,
            max_length: size.max_length,
        },
        device,
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
    size: Size,
    profile: bool,
    machine: &Machine,
) -> Result<Box<dyn PlanExecutor>, Box<dyn Error>> {
    let kv_blocks = size.blocks();
    Ok(match machine {
        Machine::Cpu => {
            let threads = run.threads;
            let options = CpuOptions { kv_blocks, threads, profile, ..CpuOptions::default() };
            Box::new(CpuExecutor::new(plan, weights, options)?)
        }
        Machine::Gpu(gpu) => {
            let kv_blocks = fitting_blocks(&plan, size, gpu, run.gpu_memory_utilization)?;
            let arch = plan.device.as_ref().map_or("", |d| &d.arch);
            let (cubins, _) = run.cache().cubins(&plan.kernels, arch, &mut Compiler::find)?;
            let (graphs, overlap) = (!run.no_graphs, !run.no_overlap);
            let options =
                CudaOptions { kv_blocks, graphs, overlap, profile, ..CudaOptions::default() };
            Box::new(CudaExecutor::new(plan, &cubins, weights, gpu, options)?)
        }
    })
}

/// Loads a plan with the model's weights, or random ones where it has none.
pub(crate) fn load(
    plan: Plan,
    model: &Model,
    run: &RunArgs,
    size: Size,
    machine: &Machine,
) -> Result<Box<dyn PlanExecutor>, Box<dyn Error>> {
    if let Some(checkpoint) = &model.checkpoint {
        warm(checkpoint);
        let weights = CheckpointWeights::new(checkpoint);
        return executor(plan, &weights, run, size, false, machine);
    }
    let random = match machine {
        Machine::Cpu => RandomWeights::of(&plan, 1),
        Machine::Gpu(_) => RandomWeights::pooled(&plan, 1),
    };
    executor(plan, &random, run, size, false, machine)
}

/// Blocks of KV cache for `size`, or as many as fit, but enough for one sequence.
fn fitting_blocks(plan: &Plan, size: Size, gpu: &Gpu, part: f64) -> Result<usize, Box<dyn Error>> {
    /// For libraries, kernels' own memory, inputs and graphs.
    const REST: u64 = 512 << 20;
    let (free, total) = gpu.memory()?;
    let used = total - free;
    let other = used + plan.stored_bytes() + plan.arena_bytes + REST;
    let left = ((total as f64 * part.clamp(0.0, 1.0)) as u64).saturating_sub(other);
    let block = (plan.kv_bytes_per_token() * StepInputs::BLOCK_SIZE as u64).max(1);
    let (fits, least) = ((left / block) as usize, Size::one(size.max_length).blocks());
    if fits < least {
        let mib = |bytes: u64| bytes >> 20;
        return Err(format!(
            "the KV cache of one sequence of {} tokens takes {} MiB, and {} of the GPU's {} MiB are \
             left for it at --gpu-memory-utilization {part}: {} MiB are taken by others, {} MiB are \
             weights, {} MiB activations; choose a shorter --max-length",
            size.max_length,
            mib(block * least as u64),
            mib(left),
            mib(total),
            mib(used),
            mib(plan.stored_bytes()),
            mib(plan.arena_bytes),
        )
        .into());
    }
    Ok(fits.min(size.blocks()))
}

/// An engine for sequences of at most `size`.
pub(crate) fn engine(
    executor: Box<dyn PlanExecutor>,
    run: &RunArgs,
    size: Size,
    machine: &Machine,
    options: EngineOptions,
) -> Result<Engine<Box<dyn PlanExecutor>>, OptionsError> {
    let limits = limits(&*executor, run.chunk(machine), size);
    Engine::new(executor, limits, options)
}

/// What an engine over an executor may hold.
pub(crate) fn limits(executor: &dyn PlanExecutor, chunk: usize, size: Size) -> EngineLimits {
    let plan = executor.plan();
    EngineLimits {
        step: plan.limits,
        max_length: size.max_length as usize,
        chunk,
        blocks: executor.kv_blocks(),
        block_size: StepInputs::BLOCK_SIZE,
        vocab: plan.vocabulary() as usize,
    }
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
