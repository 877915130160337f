//! Finds out which kernels are fastest on a GPU.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use infernum_codegen::Plan;
use infernum_codegen::cuda::{Device, Library, TunedVariants, site, sites};
use infernum_ir::Sym;
use infernum_passes::data::Kernels;
use infernum_passes::fuse::{Bucket, Measured};
use infernum_runtime::cuda::{CudaExecutor, CudaOptions};
use infernum_runtime::{Executor, GroupKind, PlanExecutor, StepInputs, most_blocks, tables};

use crate::capacity::Capacity;
use crate::error::Error;
use crate::load::Loader;
use crate::machine::Machine;

/// Steps of one measurement, each a replayed graph over all weights: more than any cache holds.
const STEPS: usize = 24;

/// A variant must be this much faster to be chosen, or it is noise.
const GAIN: f64 = 0.003;

/// Rows of context of each sequence where nothing else is said.
pub const CONTEXT: usize = 512;

/// What a search found.
#[derive(Clone, Debug, PartialEq)]
pub enum Found {
    /// A step takes so long with the variants chosen so far.
    Start {
        /// Sequences of the step.
        batch: usize,
        /// Milliseconds.
        ms: f64,
    },
    /// Another variant is faster.
    Better {
        /// Milliseconds of a step with it.
        ms: f64,
        /// Its name.
        variant: String,
        /// The launches that it is for.
        site: String,
    },
    /// Time is over; what was found so far is kept.
    OutOfTime,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Found::Start { batch, ms } => write!(f, "{batch} sequence(s): {ms:.4} ms a step"),
            Found::Better { ms, variant, site } => {
                write!(f, "  {ms:.4} ms with {variant} for {site}")
            }
            Found::OutOfTime => f.write_str("out of time: what was found so far is kept"),
        }
    }
}

/// Before a model is run for the first time on a GPU, if [`RunOptions::autotune`] wants it: tunes
/// for one sequence. Does nothing on the host, and on a GPU that was tuned before.
///
/// [`RunOptions::autotune`]: crate::RunOptions::autotune
pub fn autotune(loader: &Loader<'_>) -> Result<(), Error> {
    let (Some(device), Some(seconds)) = (loader.machine.device(), loader.run.autotune) else {
        return Ok(());
    };
    if loader.run.kernels().choices_file(&device.arch).is_none_or(|path| path.exists()) {
        return Ok(());
    }
    let mut tuner = Tuner::new(*loader, 1, CONTEXT)?;
    tuner.tune(1, Instant::now() + Duration::from_secs(seconds), &mut |_| {})?;
    tuner.save()?;
    Ok(())
}

/// A model on a GPU whose kernels can be exchanged.
pub struct Tuner<'a> {
    loader: Loader<'a>,
    device: Device,
    templates: Library,
    kernels: Kernels,
    capacity: Capacity,
    tuned: TunedVariants,
    executor: CudaExecutor,
    /// The name of the cost table.
    target: String,
}

impl<'a> Tuner<'a> {
    /// Loads the model for steps of at most so many sequences, each with so many rows of context.
    pub fn new(loader: Loader<'a>, sequences: usize, context: usize) -> Result<Tuner<'a>, Error> {
        let (Machine::Gpu(gpu), Some(device)) = (loader.machine, loader.machine.device()) else {
            return Err(Error::NothingToTune);
        };
        let capacity = Capacity::new(sequences as u64, (context as u64).saturating_add(1));
        let tuned = loader.tuned()?;
        let plan = loader.plan_with(Sym::B, capacity, &tuned)?;
        let cubins = loader.cubins(&plan)?;
        let kv_blocks = capacity.blocks(&GroupKind::of_plan(&plan), loader.chunk());
        let options = CudaOptions { kv_blocks, ..CudaOptions::default() };
        let weights = loader.weights(&plan);
        let executor = CudaExecutor::new(plan, &cubins, &*weights, gpu, options)?;
        let kernels = loader.compile.kernels()?;
        let (target, _) = loader.machine.costs(loader.compile)?;
        let templates = loader.templates();
        Ok(Tuner { loader, device, templates, kernels, capacity, tuned, executor, target })
    }

    /// One pass over the sites of a decode step, each variant in the place of the one chosen so far,
    /// until `end`. Tells what it finds.
    pub fn tune(
        &mut self,
        batch: usize,
        end: Instant,
        tell: &mut dyn FnMut(Found),
    ) -> Result<(), Error> {
        let plan = self.executor.plan();
        let schedule = step(plan, batch)?;
        let sites = sites(plan, schedule, &self.kernels.ops, &self.templates, &self.device)?;
        let mut best = self.measure(batch)?;
        tell(Found::Start { batch, ms: best });
        for (site, variants) in sites.iter().filter(|(_, variants)| variants.len() > 1) {
            for variant in variants {
                if Instant::now() > end {
                    tell(Found::OutOfTime);
                    return Ok(());
                }
                let before = self.tuned.choose(site, variant);
                if before.as_ref() == Some(variant) {
                    continue;
                }
                let time = self.retarget().and_then(|()| self.measure(batch));
                // A variant that cannot be launched here is none.
                if let Some(ms) = time.ok().filter(|ms| *ms < best * (1.0 - GAIN)) {
                    best = ms;
                    tell(Found::Better { ms, variant: variant.clone(), site: site.clone() });
                } else {
                    match before {
                        Some(before) => _ = self.tuned.choose(site, &before),
                        None => self.tuned.forget(site),
                    }
                }
            }
        }
        self.retarget()
    }

    /// What each call of a decode step takes, inside the replayed step: all overlap with their
    /// neighbours is counted.
    pub fn price(&mut self, batch: usize) -> Result<Vec<Measured>, Error> {
        let (plan, whole) = (self.plan()?, self.measure(batch)?);
        let schedule = step(&plan, batch)?;
        let bucket = plan.schedules[schedule].bucket;
        let bucket = Bucket { max: bucket.max.min(plan.limits.seqs), ..bucket };
        let mut calls = Vec::new();
        for (key, _) in sites(&plan, schedule, &self.kernels.ops, &self.templates, &self.device)? {
            let (mut without, mut count, mut of) = (plan.clone(), 0, None);
            for call in &plan.schedules[schedule].calls {
                let program = &plan.programs[call.program as usize];
                let here: Vec<_> =
                    program.launches.iter().filter(|l| site(l, bucket) == key).collect();
                count += here.len();
                of = here.first().map(|l| (*l).clone()).or(of);
                let launches = &mut without.programs[call.program as usize].launches;
                launches.retain(|l| site(l, bucket) != key);
            }
            let Some(launch) = of else { continue };
            self.exchange(without)?;
            let shorter = (whole - self.measure(batch)?) / count as f64;
            let types = launch.operands.iter().map(|v| v.as_ref().map(|v| v.ty.to_string()));
            calls.push(Measured {
                target: self.target.clone(),
                op: launch.op,
                bucket: Some(bucket),
                dtype: None,
                operands: Some(types.map(|t| t.unwrap_or_else(|| "_".to_owned())).collect()),
                us: (shorter * 1e3).max(0.0),
            });
        }
        self.retarget()?;
        Ok(calls)
    }

    /// Which variants were found to be fastest.
    pub fn tuned(&self) -> &TunedVariants {
        &self.tuned
    }

    /// What it runs on, for people.
    pub fn describe(&self) -> String {
        self.executor.describe()
    }

    /// Keeps what was found, for every model that is run on such a GPU; the file's path.
    pub fn save(&self) -> Result<PathBuf, Error> {
        let path = self.loader.run.kernels().choices_file(&self.device.arch);
        let path = path.ok_or(Error::NoFolder)?;
        let fail = |source| Error::Io { path: path.display().to_string(), source };
        self.tuned.save(&path).map_err(fail)?;
        Ok(path)
    }

    fn plan(&self) -> Result<Plan, Error> {
        self.loader.plan_with(Sym::B, self.capacity, &self.tuned)
    }

    fn retarget(&mut self) -> Result<(), Error> {
        let plan = self.plan()?;
        self.exchange(plan)
    }

    fn exchange(&mut self, plan: Plan) -> Result<(), Error> {
        let cubins = self.loader.cubins(&plan)?;
        Ok(self.executor.retarget(plan, &cubins)?)
    }

    /// Milliseconds of a step: the median.
    fn measure(&mut self, batch: usize) -> Result<f64, Error> {
        let context = self.capacity.max_length as usize;
        let (groups, chunk) = (self.executor.groups(), self.loader.chunk());
        let per_sequence = most_blocks(&groups, context, StepInputs::BLOCK_SIZE, chunk) as u32;
        let mut inputs = StepInputs::asking(StepInputs::BLOCK_SIZE).with_groups(&groups);
        for b in 0..batch as u32 {
            let blocks = b * per_sequence..(b + 1) * per_sequence;
            let tables = tables(&groups, context, StepInputs::BLOCK_SIZE, chunk, blocks);
            inputs.push(&[b], context, &tables)?;
        }
        let mut times = Vec::new();
        for step in 0..STEPS + 4 {
            let start = Instant::now();
            self.executor.run(&inputs)?;
            if step >= 4 {
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }
}

/// The schedule of a decode step of so many sequences, as it is measured: of likeliest tokens.
fn step(plan: &Plan, batch: usize) -> Result<usize, Error> {
    let tokens = batch as u64;
    plan.greedy_schedule(tokens, true).ok_or(Error::NoStep { tokens })
}
