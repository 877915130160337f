//! How engines load, here or for front ends elsewhere.

use std::cell::Cell;
use std::error::Error;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use infernum::{
    Capacity, Frontend, Loader, Machine, ModelOptions, Progress, Stage, block_bytes, tune,
};
use infernum_frontend_hf::checkpoint::Checkpoint;
use infernum_ir::Sym;
use infernum_link::{Driver, Facts, Handle};
use infernum_runtime::{
    AdapterBanks, AdapterId, Engine, GroupKind, KvMode, PlanExecutor, StepInputs, most_blocks,
};

use super::adapters::{AdapterArgs, Room};
use super::app::App;
use super::model::{Entry, NamedModel, Served};
use super::worker::{Line, Worker};
use super::{Args, EngineArgs, HostArgs};

/// Has a task run that hands out what an engine tells.
pub(crate) type Spawn<'a> = &'a dyn Fn(std::pin::Pin<Box<dyn Future<Output = ()> + Send>>);

/// A model that is loaded, and the way to its engine.
pub(crate) struct Loaded {
    pub(crate) frontend: Frontend,
    pub(crate) facts: Facts,
    pub(crate) handle: Handle,
    /// What adapters it has room for.
    banks: AdapterBanks,
    /// Adapters that were named on the command line.
    adapters: Vec<(String, AdapterId)>,
}

/// Loads the models, one after the other, each on the thread that will run it. The first error ends it, as text: what caused it
/// may not leave its thread.
pub(crate) fn load_all(
    models: &[NamedModel],
    app: &Arc<App>,
    args: &Arc<Args>,
    spawn: Spawn<'_>,
) -> Result<Vec<JoinHandle<()>>, String> {
    let mut threads = Vec::new();
    for (model, entry) in models.iter().zip(&app.models) {
        let shared = app.clone();
        let name = model.name.clone();
        let failed = move || shared.failure.tell(&name);
        let queue = args.limits.queue;
        let (loaded, thread) = start(model, (&args.host, &args.adapters), queue, failed)?;
        threads.push(thread);
        serve(entry, app, loaded, args, spawn);
    }
    Ok(threads)
}

/// Loads a model on the thread that runs its engine from then on; `failed` is called if that panics.
pub(crate) fn start(
    model: &NamedModel,
    (args, adapters): (&HostArgs, &AdapterArgs),
    queue: usize,
    failed: impl FnOnce() + Send + 'static,
) -> Result<(Loaded, JoinHandle<()>), String> {
    let (sender, loaded) = std::sync::mpsc::channel();
    let (named, start) = (model.clone(), Instant::now());
    let (args, adapters) = (args.clone(), adapters.clone());
    let run = move || match load(&named, &args, &adapters, queue) {
        Ok((loaded, engine, driver)) => {
            if sender.send(Ok(loaded)).is_ok() && driver.run(engine).is_err() {
                failed();
            }
        }
        Err(error) => drop(sender.send(Err(chain(&*error)))),
    };
    let thread = std::thread::Builder::new().name(format!("engine {}", model.name)).spawn(run);
    let thread = thread.map_err(|e| format!("cannot start a thread: {e}"))?;
    let loaded = loaded.recv().unwrap_or_else(|_| Err("it panicked".to_owned()));
    let loaded = loaded.map_err(|e| format!("model `{}`: {e}", model.name))?;
    tracing::info!(
        model = model.name,
        on = loaded.facts.on,
        max_model_len = loaded.facts.max_length,
        kv_blocks = loaded.facts.blocks,
        ms = start.elapsed().as_millis() as u64,
        "ready"
    );
    Ok((loaded, thread))
}

/// Has a model served by the engine of this process.
fn serve(entry: &Entry, app: &App, loaded: Loaded, args: &Args, spawn: Spawn<'_>) {
    let Loaded { frontend, facts, handle, banks, adapters } = loaded;
    let metrics = app.metrics.model(&entry.name, StepInputs::BLOCK_SIZE, facts.blocks);
    let metrics = Arc::new(metrics);
    let (line, deliver) = Line::local(&handle, &facts, args.limits.queue, metrics.clone());
    spawn(Box::pin(deliver));
    let worker = Worker::new(vec![line], args.limits.unread());
    let room = Some(Arc::new(Room { banks, engine: handle }));
    let served = Served { room, ..Served::new(&entry.name, frontend, facts, worker, metrics) };
    for (name, adapter) in adapters {
        tracing::info!(adapter = name, of = entry.name, "ready");
        entry.add_adapter(served.adapted(&name, adapter));
    }
    entry.set(served);
}

type Ready = (Loaded, Engine<Box<dyn PlanExecutor>>, Driver);

fn load(
    named: &NamedModel,
    args: &HostArgs,
    adapters: &AdapterArgs,
    queue: usize,
) -> Result<Ready, Box<dyn Error>> {
    let (model, random_weights) = (named.folder.clone(), args.random_weights);
    let mut compile = args.compile.clone();
    compile.lora.max_loras = adapters.room(&compile.lora);
    let options = ModelOptions { model, random_weights, encoding: None, compile };
    let progress = Told::default();
    let progress = |p: Progress<'_>| progress.log(p);
    let model = options.open_with_progress(&progress)?;
    let frontend = open_frontend(named, &model)?;
    let generates = model.task.generates();
    // What all grammars need is built while the weights load.
    let (grammars, name) = (frontend.grammars().clone(), named.name.clone());
    if generates {
        std::thread::spawn(move || {
            if let Err(error) = grammars.warm() {
                tracing::warn!(model = name, %error, "no structured output");
            }
        });
    }
    let machine = Machine::open(args.run.device)?;
    let loader = Loader::new(&model, &options, &args.run, &machine).with_progress(&progress);
    let sequences = args.engine.sequences(&machine);
    let capacity = Capacity::new(sequences as u64, options.length(&model)?);
    tune::autotune(&loader)?;
    let plan = loader.plan(Sym::B, capacity)?;
    let (groups, chunk) = (GroupKind::of_plan(&plan), loader.chunk());
    let cache = (&groups[..], chunk, block_bytes(&plan));
    let capacity = args.engine.with_cache(capacity, cache, &machine);
    let banks = AdapterBanks::of(&plan);
    let (vocab, width) = (plan.vocabulary() as usize, plan.width() as usize);
    let mut executor = loader.load(plan, capacity)?;
    if !args.no_tune_products {
        let tuned = executor.tune_products()?;
        let better = tuned.iter().filter(|t| t.best_us < t.first_us).count();
        tracing::debug!(products = tuned.len(), better, "cuBLASLt's algorithms competed");
    }
    let (blocks, on) = (executor.kv_blocks(), executor.describe());
    let options = args.engine.options(sequences);
    let mut engine = loader.engine(executor, capacity, options)?;
    let adapters = adapters.load(&banks, &mut engine)?;
    // A sequence can be no longer than the cache.
    let max_length = capacity.longest(&groups, chunk, blocks);
    // Nothing is given back of what was taken up front.
    let whole = vec![GroupKind::Paged; groups.len()];
    let least = Capacity::one(capacity.max_length).blocks(&whole, chunk);
    if options.kv == KvMode::Contiguous && blocks < least {
        let message = "a contiguous KV cache needs room for the longest sequence at least: choose \
                       a shorter --max-length or a larger cache";
        return Err(message.into());
    }
    let family = model.config.model_type().ok().flatten().unwrap_or_default().to_owned();
    let format = if model.files.gguf().is_some() { "gguf" } else { "safetensors" };
    let facts = Facts {
        max_length,
        vocab,
        width,
        blocks,
        sequences,
        queue,
        family,
        format: format.to_owned(),
        bytes: model.checkpoint.as_ref().map_or(0, Checkpoint::data_len),
        on,
    };
    let (handle, driver) = infernum_link::engine();
    Ok((Loaded { frontend, facts, handle, banks, adapters }, engine, driver))
}

/// The text side of a model, with a word on what of it cannot be used.
pub(crate) fn open_frontend(
    named: &NamedModel,
    model: &infernum::Model,
) -> Result<Frontend, infernum::Error> {
    let frontend = Frontend::open(model)?;
    if let Err(error) = frontend.template()
        && model.task.generates()
    {
        tracing::warn!(model = named.name, %error, "no chats: the chat template cannot be used");
    }
    for key in &frontend.defaults().unsupported {
        tracing::warn!(model = named.name, key, "generation_config.json: not supported, left out");
    }
    Ok(frontend)
}

/// How often it is told how far a download is.
const DOWNLOAD_TOLD: Duration = Duration::from_secs(10);

/// What was told of a download.
#[derive(Default)]
struct Told(Cell<Option<Download>>);

#[derive(Clone, Copy)]
struct Download {
    total: u64,
    done: u64,
    start: Instant,
    told: Instant,
}

impl Told {
    /// A line for each part of loading that takes a while, for how far a download is, and for each doubt about the spec.
    fn log(&self, progress: Progress<'_>) {
        match progress {
            Progress::Begin { stage, total } => {
                tracing::info!("{stage}");
                let now = Instant::now();
                let download = Download { total, done: 0, start: now, told: now };
                self.0.set(Some(download).filter(|_| stage == Stage::Download));
            }
            Progress::Advance(by) => self.0.set(self.0.get().map(|d| d.advanced(by))),
            Progress::End => self.0.set(None),
            Progress::Warning(warning) => tracing::warn!("{warning}"),
            Progress::Notice(notice) => tracing::warn!("{notice}"),
        }
    }
}

impl Download {
    fn advanced(mut self, by: u64) -> Download {
        self.done += by;
        if self.done == self.total || self.told.elapsed() >= DOWNLOAD_TOLD {
            self.told = Instant::now();
            let seconds = self.start.elapsed().as_secs_f64().max(1e-3);
            let rate = (self.done as f64 / seconds) as u64 >> 20;
            tracing::info!(
                mib = self.done >> 20,
                of_mib = self.total >> 20,
                mib_per_second = rate,
                "downloading"
            );
        }
        self
    }
}

/// An error with its causes.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(e) = cause {
        let next = e.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = e.source();
    }
    text
}

/// The KV cache of the CPU when nothing else is asked for.
const CPU_CACHE: u64 = 1 << 30;

impl EngineArgs {
    /// Sequences that run together.
    fn sequences(&self, machine: &Machine) -> usize {
        let default = if matches!(machine, Machine::Cpu) { 32 } else { 256 };
        self.max_sequences.unwrap_or(default)
    }

    /// The capacity with the cache that was asked for, of these groups of layers, in steps of at most so many rows of
    /// a sequence, and with blocks of so many bytes. A GPU gives what it has; the host is shared,
    /// and gives [`CPU_CACHE`], but always enough for one sequence.
    fn with_cache(
        &self,
        capacity: Capacity,
        (groups, chunk, block_bytes): (&[GroupKind], usize, u64),
        machine: &Machine,
    ) -> Capacity {
        let block = StepInputs::BLOCK_SIZE;
        let asked =
            self.kv_blocks.or_else(|| self.kv_tokens.map(|n| most_blocks(groups, n, block, chunk)));
        let least = Capacity::one(capacity.max_length).blocks(groups, chunk);
        let default = match machine {
            Machine::Gpu(_) => None,
            Machine::Cpu => {
                let most = CPU_CACHE / block_bytes.max(1);
                Some(capacity.blocks(groups, chunk).min((most as usize).max(least)))
            }
        };
        Capacity { kv_blocks: asked.or(default), ..capacity }
    }
}
