//! The models that are served: how they load, and what requests need to know of them.

use std::cell::Cell;
use std::error::Error;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use infernum::{
    Capacity, Frontend, Loader, Machine, ModelOptions, Progress, Stage, block_bytes, name_on_hub,
    tune,
};
use infernum_frontend_hf::Model;
use infernum_frontend_hf::checkpoint::Checkpoint;
use infernum_ir::Sym;
use infernum_runtime::{
    AdapterBanks, AdapterId, Engine, GroupKind, KvMode, PlanExecutor, Request, StepInputs,
    most_blocks,
};

use super::Args;
use super::app::App;
use super::error::ApiError;
use super::metrics::{Counted, ModelMetrics};
use super::outbox::Outbox;
use super::worker::{Gone, Inbox, Running, Worker, connect};

/// A model as the command line names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamedModel {
    pub(crate) name: String,
    /// `None` for the built-in demo.
    pub(crate) folder: Option<std::path::PathBuf>,
}

impl NamedModel {
    /// The built-in demo model.
    pub(crate) fn demo() -> NamedModel {
        NamedModel { name: "ember".to_owned(), folder: None }
    }

    /// `DIR`, named as the folder is, `ORG/NAME` of the hub, named so, or `NAME=` and either; `demo` is the built-in model.
    pub(crate) fn parse(text: &str) -> Result<NamedModel, String> {
        let (name, folder) = match text.split_once('=') {
            Some((name, folder)) => (Some(name.to_owned()), folder),
            None => (None, text),
        };
        let path = std::path::PathBuf::from(folder);
        let own = || {
            if let Some(name) = name_on_hub(&path) {
                return Some(name);
            }
            let full = path.canonicalize().unwrap_or_else(|_| path.clone());
            full.file_name().map(|n| n.to_string_lossy().into_owned())
        };
        let name = name.or_else(own).filter(|n| !n.is_empty());
        let name = name.ok_or_else(|| format!("expected DIR or NAME=DIR, found `{text}`"))?;
        if folder.is_empty() {
            return Err(format!("expected NAME=DIR, found `{text}`"));
        }
        Ok(NamedModel { name, folder: (folder != "demo").then_some(path) })
    }
}

/// A model that is ready.
#[derive(Clone)]
pub(crate) struct Served {
    pub(crate) name: String,
    pub(crate) frontend: Arc<Frontend>,
    pub(crate) max_length: usize,
    pub(crate) vocab: usize,
    /// Numbers of a row of output: of what does not generate, those of a vector, or scores.
    pub(crate) width: usize,
    pub(crate) worker: Arc<Worker>,
    pub(crate) metrics: Arc<ModelMetrics>,
    pub(crate) about: About,
    /// What adapters it has room for.
    pub(crate) banks: Arc<AdapterBanks>,
    /// Where this is a model with an adapter: which one, and the model's name.
    pub(crate) adapter: Option<(AdapterId, String)>,
}

/// What a model is, for those who list models.
#[derive(Clone, Debug)]
pub(crate) struct About {
    /// `model_type` of its config.
    pub(crate) family: String,
    /// `safetensors` or `gguf`.
    pub(crate) format: &'static str,
    /// Of its weights.
    pub(crate) bytes: u64,
}

impl About {
    pub(crate) fn of(model: &Model) -> About {
        let family = model.config.model_type().ok().flatten().unwrap_or_default();
        About {
            family: family.to_owned(),
            format: if model.files.gguf().is_some() { "gguf" } else { "safetensors" },
            bytes: model.checkpoint.as_ref().map_or(0, Checkpoint::data_len),
        }
    }
}

impl Served {
    /// The model with an adapter, under a name of its own.
    pub(crate) fn adapted(&self, name: &str, adapter: AdapterId) -> Served {
        Served {
            name: name.to_owned(),
            adapter: Some((adapter, self.name.clone())),
            ..self.clone()
        }
    }

    /// Hands requests to the engine, to be computed with the adapter, if there is one.
    pub(crate) fn submit(
        &self,
        mut requests: Vec<Request>,
        rooms: Vec<Counted>,
    ) -> Result<Running, Gone> {
        let adapter = self.adapter.as_ref().map(|(adapter, _)| *adapter);
        requests.iter_mut().for_each(|request| request.adapter = adapter);
        self.worker.submit(requests, rooms)
    }

    /// Refuses `n` choices that would have to wait behind a full queue, before they are encoded.
    pub(crate) fn check_room(&self, n: usize) -> Result<(), ApiError> {
        let worker = &self.worker;
        // More than there is room for at all is refused as a value, not as a moment.
        if n > worker.room() || worker.has_room(n) {
            return Ok(());
        }
        Err(ApiError::busy(worker.status.retry_after()))
    }
}

/// A model on its way.
pub(crate) struct Entry {
    pub(crate) name: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    ready: OnceLock<Arc<Served>>,
    /// The model with each of its adapters.
    adapters: RwLock<Vec<Arc<Served>>>,
}

impl Entry {
    pub(crate) fn new(name: &str) -> Entry {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let created = now.unwrap_or_default().as_secs();
        Entry {
            name: name.to_owned(),
            created,
            ready: OnceLock::new(),
            adapters: RwLock::default(),
        }
    }

    /// The model is loaded.
    pub(crate) fn set(&self, served: Served) {
        let _ = self.ready.set(Arc::new(served)); // each is loaded once
    }

    /// The model with its adapters, in the order of their loading.
    pub(crate) fn adapters(&self) -> Vec<Arc<Served>> {
        self.adapters.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds the model with an adapter; false, adding nothing, where there is one of its name.
    pub(crate) fn add_adapter(&self, served: Served) -> bool {
        let mut all = self.adapters.write().unwrap_or_else(PoisonError::into_inner);
        let is_new = all.iter().all(|known| known.name != served.name);
        if is_new {
            all.push(Arc::new(served));
        }
        is_new
    }

    /// Takes an adapter out, by name.
    pub(crate) fn remove_adapter(&self, name: &str) -> Option<Arc<Served>> {
        let mut all = self.adapters.write().unwrap_or_else(PoisonError::into_inner);
        let at = all.iter().position(|known| known.name == name)?;
        Some(all.remove(at))
    }

    /// The model, once it is loaded.
    pub(crate) fn served(&self) -> Option<&Arc<Served>> {
        self.ready.get()
    }
}

/// Loads the models, one after the other, each on the thread that will run it; `deliver` is given
/// the task that each needs. The first error ends it, as text: what caused it may not leave its
/// thread.
pub(crate) fn load_all(
    models: &[NamedModel],
    app: &Arc<App>,
    args: &Arc<Args>,
    deliver: &dyn Fn(Outbox, Arc<ModelMetrics>),
) -> Result<Vec<JoinHandle<()>>, String> {
    let mut threads = Vec::new();
    for (model, entry) in models.iter().zip(&app.models) {
        let (sender, loaded) = std::sync::mpsc::channel();
        let (model, args, shared) = (model.clone(), args.clone(), app.clone());
        let start = Instant::now();
        let thread = std::thread::Builder::new()
            .name(format!("engine {}", model.name))
            .spawn(move || match load(&model, &args) {
                Ok((parts, engine, inbox)) => {
                    if sender.send(Ok(parts)).is_ok() && inbox.serve(engine).is_err() {
                        shared.failure.tell(&model.name);
                    }
                }
                Err(error) => drop(sender.send(Err(chain(&*error)))),
            })
            .map_err(|e| format!("cannot start a thread: {e}"))?;
        threads.push(thread);
        let parts = loaded.recv().unwrap_or_else(|_| Err("it panicked".to_owned()));
        let mut parts = parts.map_err(|e| format!("model `{}`: {e}", entry.name))?;
        let metrics = &app.metrics;
        let metrics = Arc::new(metrics.model(&entry.name, StepInputs::BLOCK_SIZE, parts.blocks));
        tracing::info!(
            model = entry.name,
            on = parts.on,
            max_model_len = parts.max_length,
            kv_blocks = parts.blocks,
            ms = start.elapsed().as_millis() as u64,
            "ready"
        );
        let adapters = std::mem::take(&mut parts.adapters);
        let served = parts.serve(&entry.name, &metrics, deliver);
        let adapted = adapters.iter().map(|(name, id)| served.adapted(name, *id));
        for adapted in adapted.collect::<Vec<_>>() {
            tracing::info!(adapter = adapted.name, of = entry.name, "ready");
            entry.add_adapter(adapted);
        }
        entry.set(served);
    }
    Ok(threads)
}

/// What leaves the engine's thread.
struct Parts {
    frontend: Frontend,
    max_length: usize,
    vocab: usize,
    width: usize,
    blocks: usize,
    about: About,
    on: String,
    worker: Worker,
    outbox: Outbox,
    banks: AdapterBanks,
    /// Adapters that were named on the command line.
    adapters: Vec<(String, AdapterId)>,
}

impl Parts {
    fn serve(
        self,
        name: &str,
        metrics: &Arc<ModelMetrics>,
        deliver: &dyn Fn(Outbox, Arc<ModelMetrics>),
    ) -> Served {
        deliver(self.outbox, metrics.clone());
        Served {
            name: name.to_owned(),
            frontend: Arc::new(self.frontend),
            max_length: self.max_length,
            vocab: self.vocab,
            width: self.width,
            worker: Arc::new(self.worker),
            metrics: metrics.clone(),
            about: self.about,
            banks: Arc::new(self.banks),
            adapter: None,
        }
    }
}

type Loaded = (Parts, Engine<Box<dyn PlanExecutor>>, Inbox);

fn load(named: &NamedModel, args: &Args) -> Result<Loaded, Box<dyn Error>> {
    let (model, random_weights) = (named.folder.clone(), args.random_weights);
    let mut compile = args.compile.clone();
    compile.lora.max_loras = args.adapters.room(&compile.lora);
    let options = ModelOptions { model, random_weights, encoding: None, compile };
    let progress = Told::default();
    let progress = |p: Progress<'_>| progress.log(p);
    let model = options.open_with_progress(&progress)?;
    let (frontend, about) = (Frontend::open(&model)?, About::of(&model));
    let generates = model.task.generates();
    if let Err(error) = frontend.template()
        && generates
    {
        tracing::warn!(model = named.name, %error, "no chats: the chat template cannot be used");
    }
    for key in &frontend.defaults().unsupported {
        tracing::warn!(model = named.name, key, "generation_config.json: not supported, left out");
    }
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
    let adapters = args.adapters.load(&banks, &mut engine)?;
    let unread = usize::try_from(args.limits.max_unread_bytes).unwrap_or(usize::MAX);
    let (worker, inbox, outbox) = connect(sequences, args.limits.queue, unread);
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
    let parts = Parts {
        frontend,
        max_length,
        vocab,
        width,
        blocks,
        about,
        on,
        worker,
        outbox,
        banks,
        adapters,
    };
    Ok((parts, engine, inbox))
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

impl super::EngineArgs {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_named() {
        let parse = |text| NamedModel::parse(text).map(|m| (m.name, m.folder));
        let dir = |text: &str| Some(std::path::PathBuf::from(text));
        assert_eq!(parse("a=/x/y"), Ok(("a".to_owned(), dir("/x/y"))));
        assert_eq!(parse("/x/y"), Ok(("y".to_owned(), dir("/x/y"))));
        let on_hub = parse("org/name@v1:Q8_0");
        assert!(on_hub.is_ok_and(|(name, _)| ["org/name:Q8_0", "name@v1:Q8_0"].contains(&&*name)));
        assert_eq!(parse("a=demo"), Ok(("a".to_owned(), None)));
        assert!(parse("=x").is_err() && parse("x=").is_err() && parse("").is_err());
    }
}
