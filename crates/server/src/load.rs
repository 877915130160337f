//! How engines load, here or for front ends elsewhere.

use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use infernum::{Frontend, Progress, Stage};
use infernum_link::{Driver, Facts, Handle};
use infernum_runtime::StepInputs;

use super::adapters::AdapterArgs;
use super::app::App;
use super::maker::{Made, Maker, ModelEngine};
use super::model::{Entry, NamedModel, Served};
use super::worker::{Line, Worker};
use super::{Args, HostArgs};

/// Has a task run that hands out what an engine tells.
pub(crate) type Spawn<'a> = &'a dyn Fn(std::pin::Pin<Box<dyn Future<Output = ()> + Send>>);

/// A model that is loaded, and the way to its engine.
pub(crate) struct Loaded {
    pub(crate) frontend: Frontend,
    pub(crate) facts: Facts,
    pub(crate) handle: Handle,
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
    for (model, entry) in models.iter().zip(app.models().iter()) {
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
        Ok((loaded, engine, driver, maker)) => {
            if sender.send(Ok(loaded)).is_ok() && driver.run(engine, maker).is_err() {
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
    let Loaded { frontend, facts, handle } = loaded;
    let metrics = app.metrics.model(&entry.name, StepInputs::BLOCK_SIZE, facts.blocks);
    let metrics = Arc::new(metrics);
    let (line, deliver) = Line::local(&handle, &facts, args.limits.queue, metrics.clone());
    spawn(Box::pin(deliver));
    let worker = Worker::new(vec![line], args.limits.unread());
    entry.set(Served::new(&entry.name, frontend, facts, worker, metrics)); // it is kept there
}

type Ready = (Loaded, ModelEngine, Driver, Maker);

fn load(
    named: &NamedModel,
    args: &HostArgs,
    adapters: &AdapterArgs,
    queue: usize,
) -> Result<Ready, Box<dyn Error>> {
    let mut maker = Maker::new(named, args, adapters);
    let Made { mut engine, frontend, facts, banks } = maker.first(queue)?;
    let (handle, driver) = infernum_link::engine();
    let mut driver = driver.with_adapters(adapters.files(banks)?);
    for (name, folder) in adapters.named() {
        let loaded = driver.load_adapter(&mut engine, name, folder);
        loaded.map_err(|e| format!("--lora {name}: {e}"))?;
    }
    Ok((Loaded { frontend, facts, handle }, engine, driver, maker))
}

/// How often it is told how far a download is.
const DOWNLOAD_TOLD: Duration = Duration::from_secs(10);

/// What was told of a download.
#[derive(Default)]
pub(super) struct Told(Mutex<Option<Download>>);

#[derive(Clone, Copy)]
struct Download {
    total: u64,
    done: u64,
    start: Instant,
    told: Instant,
}

impl Told {
    /// A line for each part of loading that takes a while, for how far a download is, and for each doubt about the spec.
    pub(super) fn log(&self, progress: Progress<'_>) {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match progress {
            Progress::Begin { stage, total } => {
                tracing::info!("{stage}");
                let now = Instant::now();
                let download = Download { total, done: 0, start: now, told: now };
                *told = Some(download).filter(|_| stage == Stage::Download);
            }
            Progress::Advance(by) => *told = told.map(|d| d.advanced(by)),
            Progress::End => *told = None,
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
pub(super) fn chain(error: &dyn Error) -> String {
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
