//! Finds out which kernels are fastest on a GPU.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use infernum_codegen::cuda::{
    Choices, Chosen, Compiler, Device, Library, Rivals, Site, TunedFile, TunedVariants, reattach,
    rivals,
};
use infernum_codegen::{Plan, Yields};
use infernum_ir::{Dims, Sym};
use infernum_passes::data::Kernels;
use infernum_passes::fuse::{Bucket, Measured};
use infernum_runtime::cuda::{CudaExecutor, CudaOptions, Gpu};
use infernum_runtime::{
    Executor, GroupKind, PlanExecutor, SamplingParams, StepInputs, TokenPick, most_blocks, tables,
};

use crate::capacity::Capacity;
use crate::error::Error;
use crate::load::Loader;
use crate::machine::Machine;

/// A measurement is the fastest of so many rounds.
const ROUNDS: usize = 3;

/// Steps of a round, one behind the other: fewer where they take long.
const STEPS: std::ops::RangeInclusive<usize> = 4..=24;

/// Seconds that a round is to take.
const ROUND: f64 = 0.01;

/// A variant must be this much faster to be chosen, or it is noise.
const GAIN: f64 = 0.003;

/// Weights that a shortened step reads, in bytes: more than any cache holds.
const COLD: u64 = 1 << 30;

/// Rows of context of each sequence where nothing else is said.
pub const CONTEXT: usize = 512;

/// What is tuned.
#[derive(Clone, Debug)]
pub struct Tuning {
    /// Most sequences that are decoded together.
    pub sequences: usize,
    /// Rows of context of each.
    pub context: usize,
    /// Decode steps of so many sequences, and no others; of all kinds when empty.
    pub batches: Vec<usize>,
    /// Beside those of `batches`: steps with prompts.
    pub prompts: bool,
    /// Calls of these ops alone; of all when empty.
    pub only: Vec<String>,
}

/// What a search found.
#[derive(Clone, Debug, PartialEq)]
pub enum Found {
    /// What there is to try.
    Begin {
        /// Kinds of steps.
        kinds: usize,
        /// Sites with several variants.
        sites: usize,
        /// Variants of theirs.
        variants: usize,
        /// Seconds of measuring, at most.
        seconds: u64,
    },
    /// A variant is admitted, but cannot be launched.
    Refused(String),
    /// A step takes so long with the variants chosen so far.
    Start {
        /// What is in the step.
        step: String,
        /// Milliseconds, of a step with fewer layers.
        ms: f64,
    },
    /// Another variant is faster.
    Better {
        /// Milliseconds of a step with it.
        ms: f64,
        /// Its name.
        variant: String,
        /// The launches that it is for.
        site: Site,
    },
    /// Time is over; what was found so far is kept.
    OutOfTime {
        /// Variants that were not tried.
        left: usize,
    },
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Found::Begin { kinds, sites, variants, seconds } => write!(
                f,
                "{kinds} kind(s) of steps, {sites} site(s), {variants} variants: at most {seconds} s of measuring"
            ),
            Found::Refused(reason) => write!(f, "  not tried: {reason}"),
            Found::Start { step, ms } => write!(f, "{step}: {ms:.4} ms, with fewer layers"),
            Found::Better { ms, variant, site } => {
                write!(f, "  {ms:.4} ms with {variant} for {site}")
            }
            Found::OutOfTime { left } => {
                write!(f, "out of time: {left} variants were not tried; what was found is kept")
            }
        }
    }
}

/// Before a model is run for the first time on a GPU, if [`RunOptions::autotune`] wants it: tunes
/// for one sequence. Does nothing on the host, and on a GPU that was tuned before.
///
/// [`RunOptions::autotune`]: crate::RunOptions::autotune
pub fn autotune(loader: &Loader<'_>) -> Result<(), Error> {
    let (Machine::Gpu(gpu), Some(seconds)) = (loader.machine, loader.run.autotune) else {
        return Ok(());
    };
    if loader.run.kernels().tuned_file(&gpu.name).is_none_or(|path| path.exists()) {
        return Ok(());
    }
    let (batches, only) = (vec![1], Vec::new());
    let tuning = Tuning { sequences: 1, context: CONTEXT, batches, prompts: false, only };
    let mut tuner = Tuner::new(*loader, tuning)?;
    tuner.tune(Duration::from_secs(seconds), &mut |_| {})?;
    tuner.save()?;
    Ok(())
}

/// A model on a GPU whose kernels can be exchanged.
pub struct Tuner<'a> {
    loader: Loader<'a>,
    tuning: Tuning,
    gpu: &'a Gpu,
    device: Device,
    templates: Library,
    kernels: Kernels,
    /// What was known before, and what was found.
    tuned: TunedVariants,
    found: Chosen,
    /// With what was chosen so far, whole.
    plan: Plan,
    executor: CudaExecutor,
    /// The name of the cost table.
    target: String,
}

/// A step that stands for those of a schedule: the largest of them.
#[derive(Clone, Copy, Debug)]
struct Sample {
    schedule: usize,
    /// Sequences of one generated row.
    generated: usize,
    /// Rows of one prompt beside them.
    prompt: usize,
    /// Whether tokens are drawn.
    draws: bool,
}

impl<'a> Tuner<'a> {
    /// Loads the model.
    pub fn new(loader: Loader<'a>, tuning: Tuning) -> Result<Tuner<'a>, Error> {
        let (Machine::Gpu(gpu), Some(device)) = (loader.machine, loader.machine.device()) else {
            return Err(Error::NothingToTune);
        };
        // One sequence more, for a prompt.
        let (chunk, context) = (loader.chunk(), tuning.context.saturating_add(1));
        let longest = Capacity::new(tuning.sequences as u64, context.max(chunk) as u64);
        let tuned = loader.tuned()?;
        let plan = loader.plan_with(Sym::B, longest, &tuned)?;
        let groups = GroupKind::of_plan(&plan);
        let each = Capacity { max_length: context as u64, ..longest }.blocks(&groups, chunk);
        let prompt = Capacity::one(longest.max_length).blocks(&groups, chunk);
        let options = CudaOptions {
            kv_blocks: each.saturating_add(prompt),
            exchanges: true,
            ..CudaOptions::default()
        };
        let (cubins, weights) = (loader.cubins(&plan)?, loader.weights(&plan));
        let executor = CudaExecutor::new(plan.clone(), &cubins, &*weights, gpu, options)?;
        Ok(Tuner {
            tuning,
            gpu,
            device,
            templates: loader.templates(),
            kernels: loader.compile.kernels()?,
            tuned,
            found: Chosen { source: "this search".to_owned(), ..Chosen::default() },
            plan,
            executor,
            target: loader.machine.costs(loader.compile)?.0,
            loader,
        })
    }

    /// Tries every variant that is admitted at a site in the place of the one chosen so far, in a step of each kind
    /// that has the site, with fewer layers. No new one is tried after so much time of measuring; kernels are
    /// compiled before. Tells what it finds.
    pub fn tune(&mut self, time: Duration, tell: &mut dyn FnMut(Found)) -> Result<(), Error> {
        let (samples, mut known, mut kernels) =
            (samples(&self.plan, &self.tuning), BTreeSet::new(), Vec::new());
        let mut all: Vec<(Sample, Vec<Rivals>)> = Vec::new();
        for sample in samples {
            let (ops, library, device) = (&self.kernels.ops, &self.templates, &self.device);
            let (found, of) = rivals(&self.plan, sample.schedule, ops, library, device)?;
            let wanted =
                |site: &Site| self.tuning.only.is_empty() || self.tuning.only.contains(&site.op);
            let new: Vec<Rivals> = found
                .into_iter()
                .filter(|r| wanted(&r.site) && known.insert(r.site.clone()))
                .collect();
            let refused = new.iter().flat_map(|r| &r.refused);
            refused.for_each(|reason| tell(Found::Refused(reason.clone())));
            let new: Vec<Rivals> = new.into_iter().filter(|r| r.variants.len() > 1).collect();
            if !new.is_empty() {
                kernels.extend(of);
                all.push((sample, new));
            }
        }
        let count = |all: &[Rivals]| all.iter().map(|r| r.variants.len()).sum::<usize>();
        let mut left = all.iter().map(|(_, rivals)| count(rivals)).sum();
        let sites = all.iter().map(|(_, rivals)| rivals.len()).sum();
        let (kinds, seconds) = (all.len(), time.as_secs());
        tell(Found::Begin { kinds, sites, variants: left, seconds });
        self.loader.run.kernels().cubins(&kernels, &self.device.arch, &mut Compiler::find)?;
        let end = Instant::now() + time;
        for (sample, rivals) in all {
            if Instant::now() > end {
                break;
            }
            let inputs = self.inputs(sample)?;
            // With what was found for the same calls in steps of another kind.
            let (plan, _) = self.attached(sample.schedule, &self.found)?;
            let mut best = self.time(&plan, sample, &inputs, f64::INFINITY)?;
            self.plan = plan;
            tell(Found::Start { step: sample.to_string(), ms: best });
            for rivals in &rivals {
                if Instant::now() > end {
                    break;
                }
                left -= self.contest((sample, &inputs), rivals, &mut best, end, tell)?;
            }
        }
        if left > 0 {
            tell(Found::OutOfTime { left });
        }
        Ok(())
    }

    /// Has the variants of a site compete; how many did.
    fn contest(
        &mut self,
        (sample, inputs): (Sample, &StepInputs),
        rivals: &Rivals,
        best: &mut f64,
        end: Instant,
        tell: &mut dyn FnMut(Found),
    ) -> Result<usize, Error> {
        let site = &rivals.site;
        let (_, choices) = self.attached(sample.schedule, &self.found)?;
        let mut chosen = rivals.running(&choices).map(str::to_owned);
        let mut tried = 0;
        for variant in &rivals.variants {
            if Instant::now() > end {
                break;
            }
            tried += 1;
            if chosen.as_ref() == Some(variant) {
                continue;
            }
            let mut found = self.found.clone();
            found.sites.insert(site.clone(), variant.clone());
            let (plan, choices) = self.attached(sample.schedule, &found)?;
            if rivals.running(&choices) != Some(variant) {
                continue;
            }
            match self.time(&plan, sample, inputs, *best) {
                Ok(ms) if ms < *best * (1.0 - GAIN) => {
                    (*best, chosen, self.found, self.plan) =
                        (ms, Some(variant.clone()), found, plan);
                    let (variant, site) = (variant.clone(), site.clone());
                    tell(Found::Better { ms, variant, site });
                }
                Ok(_) => {}
                Err(error) => tell(Found::Refused(format!("{variant} for {site}: {error}"))),
            }
        }
        // What was the fastest from the beginning stays so if the order changes.
        if let Some(chosen) = chosen.filter(|_| tried == rivals.variants.len()) {
            self.found.sites.insert(site.clone(), chosen);
        }
        Ok(tried)
    }

    /// The plan with the kernels of one schedule chosen anew, and what was chosen.
    fn attached(&self, schedule: usize, found: &Chosen) -> Result<(Plan, Choices), Error> {
        let mut plan = self.plan.clone();
        let (ops, library, device) = (&self.kernels.ops, &self.templates, &self.device);
        let tuned = self.tuned.with_first(found.clone());
        let choices = reattach(&mut plan, schedule, ops, library, device, &tuned)?;
        Ok((plan, choices))
    }

    /// Milliseconds of a sample's step in a plan, with fewer layers. One that takes far longer than `best` is run
    /// once or twice.
    fn time(
        &mut self,
        plan: &Plan,
        sample: Sample,
        inputs: &StepInputs,
        best: f64,
    ) -> Result<f64, Error> {
        self.exchange(shortened(plan, sample.schedule, COLD))?;
        self.measure(inputs, best)
    }

    /// What each call of a decode step takes, inside the replayed step: all overlap with their
    /// neighbours is counted.
    pub fn price(&mut self, batch: usize) -> Result<Vec<Measured>, Error> {
        let tokens = batch as u64;
        let plan = self.plan.clone();
        let schedule = plan.greedy_schedule(tokens, true).ok_or(Error::NoStep { tokens })?;
        let bucket = plan.steps(schedule).ok_or(Error::NoStep { tokens })?;
        let sample = Sample { schedule, generated: batch, prompt: 0, draws: false };
        let inputs = self.inputs(sample)?;
        self.exchange(plan.clone())?;
        let whole = self.measure(&inputs, f64::INFINITY)?;
        let programs = || plan.schedules[schedule].calls.iter().map(|c| c.program as usize);
        let mut sites: Vec<(Site, String)> = Vec::new();
        for launch in programs().flat_map(|p| &plan.programs[p].launches) {
            let site = Site::of(launch, bucket);
            if !sites.iter().any(|(known, _)| *known == site) {
                sites.push((site, launch.op.clone()));
            }
        }
        let mut calls = Vec::new();
        for (key, op) in sites {
            let (mut without, mut count) = (plan.clone(), 0);
            for program in programs() {
                let is_here = |l: &&infernum_codegen::Launch| Site::of(l, bucket) == key;
                count += plan.programs[program].launches.iter().filter(is_here).count();
                without.programs[program].launches.retain(|l| !is_here(&l));
            }
            self.exchange(without)?;
            let shorter = (whole - self.measure(&inputs, f64::INFINITY)?) / count.max(1) as f64;
            calls.push(Measured {
                target: self.target.clone(),
                op,
                bucket: Some(bucket),
                dtype: None,
                operands: Some(key.operands),
                us: (shorter * 1e3).max(0.0),
            });
        }
        self.exchange(plan)?;
        Ok(calls)
    }

    /// What it runs on, for people.
    pub fn describe(&self) -> String {
        self.executor.describe()
    }

    /// Keeps what was found, for every model that is run on such a GPU; the file's path, and how
    /// many choices it has then.
    pub fn save(&self) -> Result<(PathBuf, usize), Error> {
        let path = self.loader.run.kernels().tuned_file(&self.gpu.name);
        let path = path.ok_or(Error::NoFolder)?;
        let choices = self.write(&path)?;
        Ok((path, choices))
    }

    /// Writes what was found to a file, and adds to one that is there; how many choices it has then.
    pub fn write(&self, path: &Path) -> Result<usize, Error> {
        let nvrtc = Compiler::find().map_or("no NVRTC".to_owned(), |compiler| {
            let (major, minor) = compiler.version;
            format!("NVRTC {major}.{minor}")
        });
        let (major, minor) = (self.gpu.driver / 1000, self.gpu.driver % 1000 / 10);
        let file = TunedFile {
            device: self.gpu.name.clone(),
            arch: self.device.arch.clone(),
            measured_with: format!("driver for CUDA {major}.{minor}, {nvrtc}"),
            choices: self.found.sites.clone(),
        };
        Ok(file.save(path)?.choices.len())
    }

    fn exchange(&mut self, plan: Plan) -> Result<(), Error> {
        let cubins = self.loader.cubins(&plan)?;
        Ok(self.executor.retarget(plan, &cubins)?)
    }

    fn inputs(&self, sample: Sample) -> Result<StepInputs, Error> {
        let (groups, chunk) = (self.executor.groups(), self.loader.chunk());
        let mut inputs = StepInputs::asking(StepInputs::BLOCK_SIZE).with_groups(&groups);
        let params = SamplingParams { temperature: 1.0, ..SamplingParams::GREEDY };
        let pick = TokenPick { params, ..TokenPick::default() };
        let prompt: Vec<u32> = (0..sample.prompt as u32).map(|i| i % 64).collect();
        let generated =
            (0..sample.generated as u32).map(|token| (vec![token], self.tuning.context + 1));
        let rows = generated.chain((!prompt.is_empty()).then_some((prompt, sample.prompt)));
        let mut first = 0;
        for (row, (tokens, context)) in rows.enumerate() {
            if row == sample.generated {
                inputs.begin_prompts();
            }
            let most = most_blocks(&groups, context, StepInputs::BLOCK_SIZE, chunk) as u32;
            let blocks = first..first + most;
            first += most;
            let table = tables(&groups, context, StepInputs::BLOCK_SIZE, chunk, blocks);
            inputs.push(&tokens, context, &table)?;
            if sample.draws {
                inputs.set_pick(&pick);
            }
        }
        Ok(inputs)
    }

    /// Milliseconds of a step, the fastest of some rounds of them.
    fn measure(&mut self, inputs: &StepInputs, best: f64) -> Result<f64, Error> {
        let executor = &mut self.executor;
        let mut round = |steps: usize| -> Result<f64, Error> {
            let start = Instant::now();
            if executor.feeds() {
                // The next one is submitted while a step runs: the host's part takes no time.
                let mut before = executor.submit(inputs)?;
                for _ in 1..steps {
                    let next = executor.submit(inputs)?;
                    executor.wait(before)?;
                    before = next;
                }
                executor.wait(before)?;
            } else {
                for _ in 0..steps {
                    executor.run(inputs)?;
                }
            }
            Ok(start.elapsed().as_secs_f64() * 1e3 / steps as f64)
        };
        let recorded = round(1)?;
        if recorded > 20.0 * best + 1e3 {
            return Ok(recorded);
        }
        let once = round(2)?;
        if once > 1.5 * best {
            return Ok(once);
        }
        let steps = ((ROUND * 1e3 / once) as usize).clamp(*STEPS.start(), *STEPS.end());
        let mut fastest = f64::INFINITY;
        for _ in 0..ROUNDS {
            fastest = fastest.min(round(steps)?);
        }
        Ok(fastest)
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sample { generated, prompt, draws, .. } = self;
        let rows = match (generated, prompt) {
            (n, 0) => format!("{n} sequence(s)"),
            (0, n) => format!("a prompt of {n} token(s)"),
            (g, p) => format!("{g} sequence(s) and a prompt of {p} token(s)"),
        };
        write!(f, "{rows}{}", if *draws { ", tokens drawn" } else { "" })
    }
}

/// A step of each kind that is tuned.
fn samples(plan: &Plan, tuning: &Tuning) -> Vec<Sample> {
    let Tuning { batches, prompts, .. } = tuning;
    let wanted = |steps: Bucket| match (&batches[..], steps.decode) {
        ([], true) => !prompts,
        ([], false) => true,
        (some, true) => some.iter().any(|n| steps.holds(*n as u64, true)),
        (_, false) => *prompts,
    };
    let one = |schedule: usize| {
        let steps = plan.steps(schedule).filter(|s| s.min <= s.max && wanted(*s))?;
        let most = steps.max as usize;
        // A prompt, and beside it rows of all other sequences, but not more than half.
        let beside = tuning.sequences.saturating_sub(1).min(most / 2);
        let generated = if steps.decode { most } else { beside };
        let draws = plan.yields(schedule) == Some(Yields::Picks);
        Some(Sample { schedule, generated, prompt: most - generated, draws })
    };
    let is_run = |sample: &Sample| {
        let (tokens, decode) = ((sample.generated + sample.prompt) as u64, sample.prompt == 0);
        let schedule = if sample.draws { Plan::schedule } else { Plan::greedy_schedule };
        schedule(plan, tokens, decode) == Some(sample.schedule)
    };
    (0..plan.schedules.len()).filter_map(one).filter(is_run).collect()
}

/// A plan with fewer calls of the programs of a schedule that is run again and again, as layers are: as many as read
/// `cold` bytes of weights, more than caches hold, so that a step takes less time and its launches as much as in a whole one.
fn shortened(plan: &Plan, schedule: usize, cold: u64) -> Plan {
    let mut short = plan.clone();
    let bytes = |weight: &u32| plan.weights[*weight as usize].ty.bytes(&Dims::default());
    let mut left: BTreeMap<u32, u64> = BTreeMap::new();
    short.schedules[schedule].calls.retain(|call| {
        let left = left.entry(call.program).or_insert_with(|| {
            let read: u64 = call.weights.iter().map(bytes).fold(0, u64::saturating_add);
            cold.div_ceil(read.max(1)).max(2)
        });
        let is_kept = *left > 0;
        *left = left.saturating_sub(1);
        is_kept
    });
    short
}

#[cfg(test)]
mod tests;
