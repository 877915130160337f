//! `infernum tune`: finds out which kernels are fastest on this GPU.

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use infernum_codegen::Plan;
use infernum_codegen::cuda::{Choices, Compiler, Device, Library, sites};
use infernum_frontend_hf::Model;
use infernum_ir::Sym;
use infernum_passes::data::Kernels;
use infernum_runtime::cuda::{CudaExecutor, CudaOptions};
use infernum_runtime::{CheckpointWeights, Executor, PlanExecutor, RandomWeights, StepInputs};

use super::bench;
use crate::args::ModelArgs;
use crate::report::{self, Outcome};
use crate::session::{self, Machine, RunArgs, Size};

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    run: RunArgs,
    /// A config.json to run with random weights, instead of a model.
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    config: Option<PathBuf>,
    /// Sequences that are decoded together; several to tune for each.
    #[arg(long, value_name = "N", default_value = "1,8,16", value_delimiter = ',')]
    batch: Vec<usize>,
    /// Context rows of each.
    #[arg(long, value_name = "N", default_value_t = 512)]
    context: usize,
    /// Seconds after which no new variant is tried.
    #[arg(long, value_name = "S", default_value_t = 120)]
    seconds: u64,
}

/// Steps of one measurement, each a replayed graph over all weights: more than any cache holds.
const STEPS: usize = 24;

/// A variant must be this much faster to be chosen, or it is noise.
const GAIN: f64 = 0.003;

pub(crate) fn run(args: &Args) -> Outcome {
    let machine = args.run.machine()?;
    let Some(device) = machine.device() else {
        return Err("tune: there is no GPU; kernels of the CPU have no variants".into());
    };
    if args.batch.contains(&0) || args.batch.is_empty() || args.context == 0 {
        return Err("--batch and --context: expected at least 1".into());
    }
    let model = bench::model(args.config.as_deref(), &args.model)?;
    let mut tuner = Tuner::new(args, &model, machine, device)?;
    let end = Instant::now() + Duration::from_secs(args.seconds);
    for &batch in &args.batch {
        tuner.tune(batch, end)?;
    }
    let path = args.run.cache().choices_file(&tuner.device.arch);
    let path = path.ok_or("there is no folder to keep the choices in")?;
    tuner.choices.save(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    report::line(&format!("{}: {} choice(s)", path.display(), tuner.choices.len()))
}

struct Tuner<'a> {
    args: &'a Args,
    model: &'a Model,
    machine: Machine,
    device: Device,
    library: Library,
    kernels: Kernels,
    size: Size,
    choices: Choices,
    executor: CudaExecutor,
}

impl<'a> Tuner<'a> {
    fn new(
        args: &'a Args,
        model: &'a Model,
        machine: Machine,
        device: Device,
    ) -> Result<Tuner<'a>, Box<dyn Error>> {
        let Machine::Gpu(gpu) = &machine else { return Err("there is no GPU".into()) };
        let library = Library::new(args.model.data.as_deref());
        let size = Size {
            sequences: args.batch.iter().copied().max().unwrap_or(1) as u64,
            max_length: args.context as u64 + 1,
        };
        let choices = args.run.choices(&device.arch);
        let with = Some((&device, &library, &choices));
        let plan = session::plan_with(model, &args.model, &args.run, Sym::B, size, &machine, with)?;
        let cache = args.run.cache();
        let (cubins, _) = cache.cubins(&plan.kernels, &device.arch, &mut Compiler::find)?;
        let options = CudaOptions { kv_blocks: size.blocks(), ..CudaOptions::default() };
        let mut executor = if let Some(checkpoint) = &model.checkpoint {
            CudaExecutor::new(plan, &cubins, &CheckpointWeights::new(checkpoint), gpu, options)?
        } else {
            let random = RandomWeights::pooled(&plan, 1);
            CudaExecutor::new(plan, &cubins, &random, gpu, options)?
        };
        executor.set_logits(false);
        let kernels = args.model.kernels()?;
        Ok(Tuner { args, model, machine, device, library, kernels, size, choices, executor })
    }

    /// One pass over the sites of a decode step, each variant in the place of the one chosen so far.
    fn tune(&mut self, batch: usize, end: Instant) -> Outcome {
        let plan = self.executor.plan();
        let schedule = plan.schedule(batch as u64, true).ok_or("the plan has no such step")?;
        let sites = sites(plan, schedule, &self.kernels.ops, &self.library, &self.device)?;
        let mut best = self.measure(batch)?;
        report::line(&format!("{batch} sequence(s): {best:.4} ms a step"))?;
        for (site, variants) in sites.iter().filter(|(_, variants)| variants.len() > 1) {
            for variant in variants {
                if Instant::now() > end {
                    return report::line("out of time: what was found so far is kept");
                }
                let before = self.choices.choose(site, variant);
                if before.as_ref() == Some(variant) {
                    continue;
                }
                let time = self.retarget().and_then(|()| self.measure(batch));
                // A variant that cannot be launched here is none.
                if time.as_ref().is_ok_and(|ms| *ms < best * (1.0 - GAIN)) {
                    best = time.unwrap_or(best);
                    report::line(&format!("  {best:.4} ms with {variant} for {site}"))?;
                } else {
                    match before {
                        Some(before) => _ = self.choices.choose(site, &before),
                        None => self.choices.forget(site),
                    }
                }
            }
        }
        self.retarget()
    }

    fn plan(&self) -> Result<Plan, Box<dyn Error>> {
        let with = Some((&self.device, &self.library, &self.choices));
        let (args, machine) = (self.args, &self.machine);
        session::plan_with(self.model, &args.model, &args.run, Sym::B, self.size, machine, with)
    }

    fn retarget(&mut self) -> Outcome {
        let plan = self.plan()?;
        let cache = self.args.run.cache();
        let (cubins, _) = cache.cubins(&plan.kernels, &self.device.arch, &mut Compiler::find)?;
        Ok(self.executor.retarget(plan, &cubins)?)
    }

    /// Milliseconds of a step: the median.
    fn measure(&mut self, batch: usize) -> Result<f64, Box<dyn Error>> {
        let context = self.args.context + 1;
        let per_sequence = context.div_ceil(StepInputs::BLOCK_SIZE) as u32;
        let mut inputs = StepInputs::new(StepInputs::BLOCK_SIZE);
        for b in 0..batch as u32 {
            let blocks: Vec<u32> = (b * per_sequence..(b + 1) * per_sequence).collect();
            inputs.push(&[b], context, &blocks)?;
        }
        let mut times = Vec::new();
        for step in 0..STEPS + 4 {
            let start = Instant::now();
            let ticket = self.executor.submit(&inputs)?;
            self.executor.wait(ticket)?;
            if step >= 4 {
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
        Ok(bench::median(times.into_iter()))
    }
}
