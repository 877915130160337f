//! `infernum tune`: finds out which kernels are fastest on this GPU.

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use infernum_codegen::Plan;
use infernum_codegen::cuda::{Choices, Compiler, Device, Library, site, sites};
use infernum_frontend_hf::Model;
use infernum_ir::Sym;
use infernum_passes::data::Kernels;
use infernum_passes::fuse::{Bucket, Measured, Measurements};
use infernum_runtime::cuda::{CudaExecutor, CudaOptions};
use infernum_runtime::{CheckpointWeights, Executor, PlanExecutor, RandomWeights, StepInputs};

use ron::ser::PrettyConfig;

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
    /// Write what each call takes, for --costs: by how much a step is shorter without it.
    #[arg(long, value_name = "FILE")]
    measure: Option<PathBuf>,
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
    let mut measured = Measurements {
        doc: format!("{}, {} rows of context", tuner.executor.describe(), args.context),
        calls: Vec::new(),
    };
    for &batch in &args.batch {
        tuner.tune(batch, end)?;
        if args.measure.is_some() {
            measured.calls.extend(tuner.price(batch)?);
        }
    }
    if let Some(path) = &args.measure {
        let pretty = PrettyConfig::new().struct_names(true).depth_limit(3);
        let text = ron::ser::to_string_pretty(&measured, pretty)?;
        std::fs::write(path, text + "\n").map_err(|e| format!("{}: {e}", path.display()))?;
        report::line(&format!("{}: {} call(s)", path.display(), measured.calls.len()))?;
    }
    let path = args.run.cache().choices_file(&tuner.device.arch);
    let path = path.ok_or("there is no folder to keep the choices in")?;
    tuner.choices.save(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    report::line(&format!("{}: {} choice(s)", path.display(), tuner.choices.len()))
}

/// Before a model is run for the first time on a GPU, if `--autotune` wants it: one sequence only.
pub(crate) fn lazily(
    model: &Model,
    model_args: &ModelArgs,
    run: &RunArgs,
    machine: &Machine,
) -> Outcome {
    let (Some(device), Some(seconds)) = (machine.device(), run.autotune) else { return Ok(()) };
    let Some(path) = run.cache().choices_file(&device.arch).filter(|p| !p.exists()) else {
        return Ok(());
    };
    let args = Args {
        model: model_args.clone(),
        run: run.clone(),
        config: None,
        batch: vec![1],
        context: 512,
        measure: None,
        seconds,
    };
    let mut tuner = Tuner::new(&args, model, machine.clone(), device)?;
    tuner.quiet = true;
    tuner.tune(1, Instant::now() + Duration::from_secs(seconds))?;
    tuner.choices.save(&path).map_err(|e| format!("{}: {e}", path.display()).into())
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
    /// The name of the cost table.
    target: String,
    /// Says nothing of what it finds.
    quiet: bool,
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
        let sequences = args.batch.iter().copied().max().unwrap_or(1) as u64;
        let size = Size::of(sequences, args.context as u64 + 1);
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
        let (target, _) = machine.costs(&args.model)?;
        Ok(Tuner {
            args,
            model,
            machine,
            device,
            library,
            kernels,
            size,
            choices,
            executor,
            target,
            quiet: false,
        })
    }

    fn say(&self, line: &str) -> Outcome {
        if self.quiet { Ok(()) } else { report::line(line) }
    }

    /// One pass over the sites of a decode step, each variant in the place of the one chosen so far.
    fn tune(&mut self, batch: usize, end: Instant) -> Outcome {
        let plan = self.executor.plan();
        let schedule = plan.schedule(batch as u64, true).ok_or("the plan has no such step")?;
        let sites = sites(plan, schedule, &self.kernels.ops, &self.library, &self.device)?;
        let mut best = self.measure(batch)?;
        self.say(&format!("{batch} sequence(s): {best:.4} ms a step"))?;
        for (site, variants) in sites.iter().filter(|(_, variants)| variants.len() > 1) {
            for variant in variants {
                if Instant::now() > end {
                    return self.say("out of time: what was found so far is kept");
                }
                let before = self.choices.choose(site, variant);
                if before.as_ref() == Some(variant) {
                    continue;
                }
                let time = self.retarget().and_then(|()| self.measure(batch));
                // A variant that cannot be launched here is none.
                if time.as_ref().is_ok_and(|ms| *ms < best * (1.0 - GAIN)) {
                    best = time.unwrap_or(best);
                    self.say(&format!("  {best:.4} ms with {variant} for {site}"))?;
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

    /// What each call of a decode step takes, inside the replayed step: all overlap with their
    /// neighbours is counted.
    fn price(&mut self, batch: usize) -> Result<Vec<Measured>, Box<dyn Error>> {
        let (plan, whole) = (self.plan()?, self.measure(batch)?);
        let schedule = plan.schedule(batch as u64, true).ok_or("the plan has no such step")?;
        let bucket = plan.schedules[schedule].bucket;
        let bucket = Bucket { max: bucket.max.min(plan.limits.b), ..bucket };
        let mut calls = Vec::new();
        for (key, _) in sites(&plan, schedule, &self.kernels.ops, &self.library, &self.device)? {
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
            self.load(without)?;
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

    fn plan(&self) -> Result<Plan, Box<dyn Error>> {
        let with = Some((&self.device, &self.library, &self.choices));
        let (args, machine) = (self.args, &self.machine);
        session::plan_with(self.model, &args.model, &args.run, Sym::B, self.size, machine, with)
    }

    fn retarget(&mut self) -> Outcome {
        let plan = self.plan()?;
        self.load(plan)
    }

    fn load(&mut self, plan: Plan) -> Outcome {
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
