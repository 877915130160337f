//! From a model to an engine that is ready to run.

use infernum_codegen::compile::{self, Options};
use infernum_codegen::cuda::{Compiler, Cubin, Library, TunedVariants};
use infernum_codegen::{CacheLayout, Limits, Plan};
use infernum_frontend_hf::{LowerOptions, Model};
use infernum_ir::Sym;
use infernum_runtime::cpu::{CpuExecutor, CpuOptions};
use infernum_runtime::cuda::{CudaExecutor, CudaOptions, Gpu};
use infernum_runtime::{
    CheckpointWeights, Engine, EngineLimits, EngineOptions, GroupKind, LoadError, PlanExecutor,
    RandomWeights, StepInputs, WeightSource,
};

use crate::capacity::Capacity;
use crate::error::{Error, PlanFileError};
use crate::machine::Machine;
use crate::options::{CompileOptions, RunOptions};
use crate::plan_file;
use crate::progress::{Progress, Stage};
use crate::read_ahead;

/// Compiles a model for a machine and loads it there.
#[derive(Clone, Copy)]
pub struct Loader<'a> {
    /// The model.
    pub model: &'a Model,
    /// How it is compiled.
    pub compile: &'a CompileOptions,
    /// How it is run.
    pub run: &'a RunOptions,
    /// Where.
    pub machine: &'a Machine,
    /// Is told how far it is, by threads of its own, too.
    pub progress: &'a (dyn Fn(Progress<'_>) + Sync),
}

impl<'a> Loader<'a> {
    /// A loader that tells nobody how far it is.
    pub fn new(
        model: &'a Model,
        compile: &'a CompileOptions,
        run: &'a RunOptions,
        machine: &'a Machine,
    ) -> Loader<'a> {
        Loader { model, compile, run, machine, progress: &|_| {} }
    }

    /// The same, telling how far it is.
    #[must_use]
    pub fn with_progress(self, progress: &'a (dyn Fn(Progress<'_>) + Sync)) -> Loader<'a> {
        Loader { progress, ..self }
    }

    /// Compiles the model for steps of at most `capacity`, or reads the plan that
    /// [`RunOptions::plan`] names. It yields logits for each sequence's last token (`rows` is
    /// [`Sym::B`], as an engine needs it), or for every token ([`Sym::T`]).
    pub fn plan(&self, rows: Sym, capacity: Capacity) -> Result<Plan, Error> {
        if let Some(folder) = &self.run.plan {
            capacity.check(self.chunk())?;
            let ops = self.compile.kernels()?.ops;
            let plan = plan_file::read(folder, rows, capacity, self.machine, &ops)?;
            if self.compile.reproducible && !plan.reproducible {
                let path = folder.join("plan.json").display().to_string();
                return Err(PlanFileError::NotReproducible { path }.into());
            }
            return Ok(plan);
        }
        self.plan_with(rows, capacity, &self.tuned()?)
    }

    /// The variants of kernels that were found to be fastest on this machine, if they are wanted.
    pub fn tuned(&self) -> Result<TunedVariants, Error> {
        let Machine::Gpu(gpu) = self.machine else { return Ok(TunedVariants::default()) };
        Ok(self.run.tuned(&gpu.name, self.compile.data.as_deref())?)
    }

    /// Compiles the model with these variants of kernels, where it is for a GPU.
    pub fn plan_with(
        &self,
        rows: Sym,
        capacity: Capacity,
        tuned: &TunedVariants,
    ) -> Result<Plan, Error> {
        capacity.check(self.chunk())?;
        let (device, templates) = (self.machine.device(), self.templates());
        let (pipeline, kernels) =
            (self.compile.pipeline(self.machine.pipeline())?, self.compile.kernels()?);
        let (target, costs) = self.machine.costs(self.compile)?;
        let adapters = self.compile.lora.adapters()?;
        let options = Options {
            model: self.model,
            lower: LowerOptions {
                dtype: self.compile.dtype,
                max_length: Some(capacity.max_length),
                rows,
            },
            pipeline: &pipeline,
            kernels: &kernels,
            costs: (&target, &costs),
            rules: None,
            adapters: adapters.as_ref(),
            kv_dtype: self.compile.kv_dtype,
            explain: false,
            limits: self.limits(capacity),
            templates: &templates,
            device: device.as_ref().map(|d| (d, tuned)),
        };
        let total = compile::step_names(&pipeline).len() as u64;
        (self.progress)(Progress::Begin { stage: Stage::Compile, total });
        let compiled =
            compile::compile(&options, &mut |_, _, _| (self.progress)(Progress::Advance(1)));
        (self.progress)(Progress::End);
        let compiled = compiled?;
        compiled.warnings.iter().for_each(|w| (self.progress)(Progress::Warning(w)));
        if let [first, others @ ..] = &compiled.choices.dropped[..] {
            let others = match others.len() {
                0 => String::new(),
                n => format!(", and {n} more"),
            };
            let notice = format!("a kernel that was chosen no longer fits: {first}{others}");
            (self.progress)(Progress::Notice(&notice));
        }
        Ok(compiled.plan)
    }

    /// Most prompt tokens in one step.
    pub fn chunk(&self) -> usize {
        let default = if matches!(self.machine, Machine::Cpu) { 256 } else { 2048 };
        self.run.chunk.unwrap_or(default).max(1)
    }

    /// The largest step of a plan of this capacity.
    pub fn limits(&self, capacity: Capacity) -> Limits {
        Limits {
            chunk: self.chunk() as u64,
            sequences: capacity.sequences,
            max_length: capacity.max_length,
        }
    }

    /// The templates of CUDA kernels.
    pub fn templates(&self) -> Library {
        Library::new(self.compile.data.as_deref())
    }

    /// The model's weights, or random ones where it has no checkpoint.
    pub fn weights(&self, plan: &Plan) -> Box<dyn WeightSource + 'a> {
        match (&self.model.checkpoint, self.machine) {
            (Some(checkpoint), _) => Box::new(CheckpointWeights::new(checkpoint)),
            (None, Machine::Cpu) => Box::new(RandomWeights::for_plan(plan, 1)),
            (None, Machine::Gpu(_)) => Box::new(RandomWeights::pooled(plan, 1)),
        }
    }

    /// The machine code of a plan's kernels, compiled where it is not known yet.
    pub fn cubins(&self, plan: &Plan) -> Result<Vec<Cubin>, Error> {
        let arch = plan.device.as_ref().map_or("", |d| &d.arch);
        let (cubins, _) = self.run.kernels().cubins(&plan.kernels, arch, &mut Compiler::find)?;
        Ok(cubins)
    }

    /// Loads a plan with the model's weights, or random ones where it has none.
    pub fn load(&self, plan: Plan, capacity: Capacity) -> Result<Box<dyn PlanExecutor>, Error> {
        if let (None, Some(free)) = (&self.model.checkpoint, free_memory())
            && matches!(self.machine, Machine::Cpu)
            && plan.stored_bytes() > free
        {
            let (what, bytes) = ("random weights", plan.stored_bytes());
            return Err(LoadError::Memory { what, bytes }.into());
        }
        if let Some(notice) = self.model.cache_notice() {
            (self.progress)(Progress::Notice(&notice));
        }
        let weights = self.weights(&plan);
        let load = || self.load_with(plan, &*weights, capacity);
        let Some(checkpoint) = &self.model.checkpoint else { return load() };
        // More would push out what is yet to be loaded.
        let most = free_memory().map_or(u64::MAX, |free| free / 2);
        read_ahead::while_loading(checkpoint, most, self.progress, load)
    }

    /// Loads a plan with weights from elsewhere.
    pub fn load_with(
        &self,
        plan: Plan,
        weights: &dyn WeightSource,
        capacity: Capacity,
    ) -> Result<Box<dyn PlanExecutor>, Error> {
        let profile = self.run.profile;
        Ok(match self.machine {
            Machine::Cpu => {
                let groups = GroupKind::of_plan(&plan);
                let kv_blocks = capacity.blocks(&groups, self.chunk());
                let threads = self.run.threads;
                let options = CpuOptions { kv_blocks, threads, profile, ..CpuOptions::default() };
                Box::new(CpuExecutor::new(plan, weights, options)?)
            }
            Machine::Gpu(gpu) => {
                let part = self.run.gpu_memory_utilization;
                let kv_blocks = fitting_blocks(&plan, capacity, self.chunk(), gpu, part)?;
                let cubins = self.cubins(&plan)?;
                let (graphs, overlap) = (!self.run.no_graphs, !self.run.no_overlap);
                let options = CudaOptions {
                    kv_blocks,
                    max_length: usize::try_from(capacity.max_length).ok(),
                    graphs,
                    overlap,
                    profile,
                    ..CudaOptions::default()
                };
                Box::new(CudaExecutor::new(plan, &cubins, weights, gpu, options)?)
            }
        })
    }

    /// Compiles the model and loads it: an engine that is ready.
    pub fn start(
        &self,
        capacity: Capacity,
        options: EngineOptions,
    ) -> Result<Engine<Box<dyn PlanExecutor>>, Error> {
        let plan = self.plan(Sym::B, capacity)?;
        self.engine(self.load(plan, capacity)?, capacity, options)
    }

    /// An engine over an executor that this loaded.
    pub fn engine(
        &self,
        executor: Box<dyn PlanExecutor>,
        capacity: Capacity,
        options: EngineOptions,
    ) -> Result<Engine<Box<dyn PlanExecutor>>, Error> {
        let limits = engine_limits(&*executor, self.chunk(), capacity);
        Ok(Engine::new(executor, limits, options)?)
    }
}

/// Bytes of memory that programs may still take, where the system says.
fn free_memory() -> Option<u64> {
    let all = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = all.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Blocks of KV cache for `capacity`, or as many as fit, but enough for one sequence.
fn fitting_blocks(
    plan: &Plan,
    capacity: Capacity,
    chunk: usize,
    gpu: &Gpu,
    part: f64,
) -> Result<usize, Error> {
    /// For libraries, kernels' own memory, inputs and graphs.
    const REST: u64 = 512 << 20;
    let (free, total) = gpu.memory()?;
    let used = total - free;
    let other = used + plan.stored_bytes() + plan.arena_bytes + REST;
    let left = ((total as f64 * part.clamp(0.0, 1.0)) as u64).saturating_sub(other);
    let (block, groups) = (block_bytes(plan), GroupKind::of_plan(plan));
    let least = Capacity::one(capacity.max_length).blocks(&groups, chunk);
    let fits = (left / block) as usize;
    if fits < least {
        let mib = |bytes: u64| bytes >> 20;
        return Err(Error::NoRoom {
            max_length: capacity.max_length,
            needed: mib(block.saturating_mul(least as u64)),
            left: mib(left),
            total: mib(total),
            part,
            used: mib(used),
            weights: mib(plan.stored_bytes()),
            activations: mib(plan.arena_bytes),
        });
    }
    Ok(fits.min(capacity.blocks(&groups, chunk)))
}

/// Bytes of a block of the cache, in all arrays; 1 at least.
pub fn block_bytes(plan: &Plan) -> u64 {
    let row = CacheLayout::of(plan, StepInputs::BLOCK_SIZE).row_bytes();
    row.saturating_mul(StepInputs::BLOCK_SIZE as u64).max(1)
}

/// What an engine over an executor may hold.
pub fn engine_limits(
    executor: &dyn PlanExecutor,
    chunk: usize,
    capacity: Capacity,
) -> EngineLimits {
    let plan = executor.plan();
    EngineLimits {
        step: plan.limits,
        max_length: capacity.max_length as usize,
        chunk,
        blocks: executor.kv_blocks(),
        block_size: StepInputs::BLOCK_SIZE,
        vocab: plan.vocabulary() as usize,
    }
}
