//! From a model's name to the engine that runs it, the first time and whenever it is woken.

use std::error::Error;
use std::path::PathBuf;

use infernum::{
    Capacity, Frontend, Loader, Machine, Model, ModelOptions, Progress, block_bytes, tune,
};
use infernum_codegen::Plan;
use infernum_frontend_hf::checkpoint::Checkpoint;
use infernum_ir::Sym;
use infernum_link::{Depth, Facts, Source};
use infernum_runtime::{
    AdapterBanks, Engine, GroupKind, KvMode, PlanExecutor, StepInputs, most_blocks,
};

use super::adapters::AdapterArgs;
use super::load::{Told, chain};
use super::model::NamedModel;
use super::{EngineArgs, HostArgs};

pub(super) type ModelEngine = Engine<Box<dyn PlanExecutor>>;

/// What an engine is made of.
pub(super) struct Maker {
    named: NamedModel,
    args: HostArgs,
    options: ModelOptions,
    /// Where it runs, and the model as it was compiled for that: kept while the engine sleeps lightly.
    machine: Option<Machine>,
    plan: Option<Plan>,
    /// What front ends know of it, once it was made.
    known: Option<Known>,
}

/// What stays the same of an engine that is made again.
#[derive(Clone, Debug, PartialEq)]
struct Known {
    blocks: usize,
    banks: AdapterBanks,
    vocab: usize,
    width: usize,
    max_length: usize,
}

/// An engine that is made again, but is not what it was.
#[derive(Debug, thiserror::Error)]
enum Changed {
    #[error(
        "expected room for the {expected} blocks of the KV cache that there were before, found {found}: other programs take \
         the memory"
    )]
    Blocks { expected: usize, found: usize },
    #[error(
        "the model's files have changed to those of another model: expected sequences of {} tokens out of {} and rows of {}, \
         with the same room for adapters; found {}, {} and {}",
        expected.max_length, expected.vocab, expected.width, found.max_length, found.vocab, found.width
    )]
    Model { expected: Box<Known>, found: Box<Known> },
}

/// An engine that was made for the first time, with what is known of it.
pub(super) struct Made {
    pub(super) engine: ModelEngine,
    pub(super) frontend: Frontend,
    pub(super) facts: Facts,
    pub(super) banks: AdapterBanks,
}

impl Maker {
    /// Of a model, with room for so many adapters.
    pub(super) fn new(named: &NamedModel, args: &HostArgs, adapters: &AdapterArgs) -> Maker {
        let (model, random_weights) = (named.folder.clone(), args.random_weights);
        let mut compile = args.compile.clone();
        compile.lora.max_loras = adapters.room(&compile.lora);
        let options = ModelOptions { model, random_weights, encoding: None, compile };
        let (named, args) = (named.clone(), args.clone());
        Maker { named, args, options, machine: None, plan: None, known: None }
    }

    /// Makes the engine for the first time; `queue` requests may wait for it.
    pub(super) fn first(&mut self, queue: usize) -> Result<Made, Box<dyn Error>> {
        let model = self.open()?;
        // The same files from now on, whatever its name on the hub comes to mean.
        self.options.model = place(&model).or(self.options.model.take());
        let frontend = open_frontend(&self.named, &model)?;
        if model.task.generates() {
            // What all grammars need is built while the weights load.
            let (grammars, name) = (frontend.grammars().clone(), self.named.name.clone());
            std::thread::spawn(move || {
                if let Err(error) = grammars.warm() {
                    tracing::warn!(model = name, %error, "no structured output");
                }
            });
        }
        let (engine, known) = self.build(&model)?;
        let family = model.config.model_type().ok().flatten().unwrap_or_default().to_owned();
        let format = if model.files.gguf().is_some() { "gguf" } else { "safetensors" };
        let facts = Facts {
            max_length: known.max_length,
            vocab: known.vocab,
            width: known.width,
            blocks: known.blocks,
            sequences: engine.options().max_running,
            queue,
            family,
            format: format.to_owned(),
            bytes: model.checkpoint.as_ref().map_or(0, Checkpoint::data_len),
            on: engine.executor().describe(),
        };
        let banks = known.banks.clone();
        self.known = Some(known);
        Ok(Made { engine, frontend, facts, banks })
    }

    fn open(&self) -> Result<Model, infernum::Error> {
        let progress = Told::default();
        self.options.open_with_progress(&|p: Progress<'_>| progress.log(p))
    }

    fn build(&mut self, model: &Model) -> Result<(ModelEngine, Known), Box<dyn Error>> {
        let progress = Told::default();
        let progress = |p: Progress<'_>| progress.log(p);
        let Maker { args, options, .. } = &*self;
        let machine = match &self.machine {
            Some(machine) => machine.clone(),
            None => Machine::open(args.run.device)?,
        };
        let loader = Loader::new(model, options, &args.run, &machine).with_progress(&progress);
        let sequences = args.engine.sequences(&machine);
        let capacity = Capacity::new(sequences as u64, options.length(model)?);
        let plan = if let Some(plan) = &self.plan {
            plan.clone()
        } else {
            tune::autotune(&loader)?;
            loader.plan(Sym::B, capacity)?
        };
        let (groups, chunk) = (GroupKind::of_plan(&plan), loader.chunk());
        let cache = (&groups[..], chunk, block_bytes(&plan));
        let mut capacity = args.engine.with_cache(capacity, cache, &machine);
        if let Some(known) = &self.known {
            capacity.kv_blocks = Some(known.blocks);
        }
        let banks = AdapterBanks::of(&plan).also_named(model.other_names()?);
        let (vocab, width) = (plan.vocabulary() as usize, plan.width() as usize);
        let mut executor = loader.load(plan, capacity)?;
        if !args.no_tune_products {
            let tuned = executor.tune_products()?;
            let better = tuned.iter().filter(|t| t.best_us < t.first_us).count();
            tracing::debug!(products = tuned.len(), better, "cuBLASLt's algorithms competed");
        }
        let blocks = executor.kv_blocks();
        let options = args.engine.options(sequences);
        let engine = loader.engine(executor, capacity, options)?;
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
        self.machine = Some(machine);
        Ok((engine, Known { blocks, banks, vocab, width, max_length }))
    }

    fn again(&mut self) -> Result<ModelEngine, Box<dyn Error>> {
        let model = self.open()?;
        let (engine, found) = self.build(&model)?;
        let Some(expected) = &self.known else { return Ok(engine) };
        if found == *expected {
            return Ok(engine);
        }
        if found.blocks < expected.blocks {
            let (expected, found) = (expected.blocks, found.blocks);
            return Err(Changed::Blocks { expected, found }.into());
        }
        let (expected, found) = (Box::new(expected.clone()), Box::new(found));
        Err(Changed::Model { expected, found }.into())
    }
}

impl Source<Box<dyn PlanExecutor>> for Maker {
    fn put_away(&mut self, engine: Option<ModelEngine>, depth: Depth) {
        match depth {
            Depth::Light => {
                self.plan = engine.map(|e| e.executor().plan().clone()).or(self.plan.take());
            }
            Depth::Deep => {
                drop(engine);
                (self.plan, self.machine) = (None, None);
            }
        }
        tracing::info!(model = self.named.name, ?depth, "asleep");
    }

    fn make(&mut self) -> Result<ModelEngine, String> {
        let start = std::time::Instant::now();
        let made = self.again().map_err(|error| chain(&*error));
        match &made {
            Ok(_) => {
                self.plan = None; // the engine has it
                let ms = start.elapsed().as_millis() as u64;
                tracing::info!(model = self.named.name, ms, "awake");
            }
            Err(error) => tracing::error!(model = self.named.name, error, "it cannot be woken"),
        }
        made
    }
}

/// Where a model's files are on this machine.
fn place(model: &Model) -> Option<PathBuf> {
    let folder = model.files.path()?;
    Some(model.files.gguf().map_or_else(|| folder.to_owned(), |file| folder.join(file)))
}

/// The text side of a model, with a word on what of it cannot be used.
pub(super) fn open_frontend(
    named: &NamedModel,
    model: &Model,
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
