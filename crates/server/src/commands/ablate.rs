//! `infernum ablate`: what each rule buys.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;

use infernum_codegen::compile::{Compiled, Options, compile};
use infernum_codegen::{Limits, Plan};
use infernum_frontend_hf::{LowerOptions, Model};
use infernum_ir::Sym;
use infernum_passes::Pipeline;
use infernum_passes::data::Kernels;
use infernum_passes::fuse::CostTable;
use infernum_runtime::{CheckpointWeights, PlanExecutor, RandomWeights, StepInputs};
use serde::Serialize;

use super::bench::{self, Lengths};
use crate::args::ModelArgs;
use crate::report::{self, Outcome};
use crate::session::{self, CPU, Machine, RunArgs, Size};

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    run: RunArgs,
    /// A config.json to run with random weights, instead of a model.
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    config: Option<PathBuf>,
    /// Tokens of prompt.
    #[arg(long, value_name = "N", default_value_t = 64)]
    prompt: usize,
    /// Tokens to decode after the prompt.
    #[arg(long, value_name = "N", default_value_t = 16)]
    generate: usize,
    /// Measured repetitions; the median counts.
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: usize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// One choice of rules, and what it gives.
#[derive(Serialize)]
struct Row {
    rules: String,
    /// Launches of a decode step, by op: the proof that the choice made a difference.
    launches: BTreeMap<String, usize>,
    launches_per_step: usize,
    /// Whether the decode step differs from that with all rules.
    differs_from_all: bool,
    prefill_tokens_per_second: f64,
    decode_tokens_per_second: f64,
    /// Against the logits without any rule, after the prompt.
    max_logit_difference: f64,
}

struct Ablation<'a> {
    args: &'a Args,
    model: &'a Model,
    kernels: &'a Kernels,
    costs: &'a CostTable,
    pipeline: Pipeline,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let model = bench::model(args.config.as_deref(), &args.model)?;
    let (kernels, pipeline) = (args.model.kernels()?, args.model.pipeline("default")?);
    let costs = args.model.cost_table(CPU)?;
    let ablation = Ablation { args, model: &model, kernels: &kernels, costs: &costs, pipeline };
    let rows = ablation.rows()?;
    if args.json {
        return report::json(&rows);
    }
    report::line(&format!(
        "{:<34} {:>8} {:>6} {:>10} {:>10} {:>12}",
        "rules", "launches", "toggled", "prefill/s", "decode/s", "max |Δlogit|"
    ))?;
    for r in &rows {
        report::line(&format!(
            "{:<34} {:>8} {:>6} {:>10.1} {:>10.1} {:>12.1e}",
            r.rules,
            r.launches_per_step,
            if r.differs_from_all { "yes" } else { "no" },
            r.prefill_tokens_per_second,
            r.decode_tokens_per_second,
            r.max_logit_difference
        ))?;
    }
    Ok(())
}

impl Ablation<'_> {
    /// All rules, none, all but each one that fired, and each of those alone.
    fn rows(&self) -> Result<Vec<Row>, Box<dyn Error>> {
        let all = self.compile(None, None)?;
        let mut fired: Vec<String> =
            all.buckets.iter().flat_map(|b| &b.report.fired).map(|f| f.rule.clone()).collect();
        fired.sort();
        fired.dedup();
        let none = self.measure("none", self.compile(Some(Vec::new()), None)?.plan, None, None)?;
        let base = launches(&all.plan);
        let logits = Some(none.1.as_slice());
        let mut rows = vec![self.measure("all", all.plan, Some(&base), logits)?.0];
        for rule in &fired {
            let plan = self.compile(None, Some(rule))?.plan;
            rows.push(self.measure(&format!("all but {rule}"), plan, Some(&base), logits)?.0);
        }
        for rule in &fired {
            let plan = self.compile(Some(vec![rule.clone()]), None)?.plan;
            rows.push(self.measure(&format!("only {rule}"), plan, Some(&base), logits)?.0);
        }
        rows.push(none.0);
        Ok(rows)
    }

    fn compile(
        &self,
        only: Option<Vec<String>>,
        without: Option<&str>,
    ) -> Result<Compiled, Box<dyn Error>> {
        let mut pipeline = self.pipeline.clone();
        pipeline.disabled.extend(without.map(str::to_owned));
        let max_length = (self.args.prompt + self.args.generate) as u64;
        let options = Options {
            model: self.model,
            lower: LowerOptions {
                dtype: self.args.model.dtype,
                max_length: Some(max_length),
                rows: Sym::B,
            },
            pipeline: &pipeline,
            kernels: self.kernels,
            costs: (CPU, self.costs),
            rules: only,
            explain: false,
            limits: Limits {
                chunk: self.args.run.chunk(&Machine::Cpu) as u64,
                sequences: 1,
                max_length,
            },
            device: None,
        };
        Ok(compile(&options, &mut |_, _, _| {})?)
    }

    fn measure(
        &self,
        rules: &str,
        plan: Plan,
        all: Option<&BTreeMap<String, usize>>,
        reference: Option<&[f32]>,
    ) -> Result<(Row, Vec<f32>), Box<dyn Error>> {
        let launches = launches(&plan);
        let lengths = Lengths {
            prompt: self.args.prompt,
            generate: self.args.generate,
            batch: 1,
            chunk: self.args.run.chunk(&Machine::Cpu),
            vocab: bench::vocab(&plan),
        };
        let mut executor = self.load(plan)?;
        let mut runs = Vec::new();
        for i in 0..=self.args.runs.max(1) {
            let run = bench::once(&mut *executor, &lengths)?;
            if i > 0 {
                runs.push(run); // the first one warms up
            }
        }
        let logits = after_prompt(&mut *executor, &lengths)?;
        let difference = reference.unwrap_or(&logits).iter().zip(&logits);
        let row = Row {
            rules: rules.to_owned(),
            launches_per_step: launches.values().sum(),
            differs_from_all: all.is_none_or(|all| *all != launches),
            launches,
            prefill_tokens_per_second: bench::median(
                runs.iter().map(|r| r.prefill_tokens_per_second),
            ),
            decode_tokens_per_second: bench::median(
                runs.iter().map(|r| r.decode_tokens_per_second),
            ),
            max_logit_difference: difference
                .map(|(a, b)| f64::from((a - b).abs()))
                .fold(0.0, f64::max),
        };
        Ok((row, logits))
    }

    fn load(&self, plan: Plan) -> Result<Box<dyn PlanExecutor>, Box<dyn Error>> {
        let (run, length) =
            (&self.args.run, Size::one((self.args.prompt + self.args.generate) as u64));
        if let Some(checkpoint) = &self.model.checkpoint {
            let weights = CheckpointWeights::new(checkpoint);
            return session::executor(plan, &weights, run, length, false, &Machine::Cpu);
        }
        let random = RandomWeights::of(&plan, 1);
        session::executor(plan, &random, run, length, false, &Machine::Cpu)
    }
}

/// Launches of a decode step of one token, by op.
fn launches(plan: &Plan) -> BTreeMap<String, usize> {
    let mut ops = BTreeMap::new();
    let schedule = plan.schedule(1, true).map(|i| &plan.schedules[i]);
    for call in schedule.iter().flat_map(|s| &s.calls) {
        for launch in &plan.programs[call.program as usize].launches {
            *ops.entry(launch.op.clone()).or_default() += 1;
        }
    }
    ops
}

/// The logits after the prompt of [`bench::once`].
fn after_prompt(
    executor: &mut dyn PlanExecutor,
    lengths: &Lengths,
) -> Result<Vec<f32>, Box<dyn Error>> {
    let mut inputs = StepInputs::new(StepInputs::BLOCK_SIZE);
    let blocks: Vec<u32> = (0..lengths.prompt.div_ceil(StepInputs::BLOCK_SIZE) as u32).collect();
    let mut done = 0;
    loop {
        let next = (done + lengths.chunk).min(lengths.prompt);
        let tokens: Vec<u32> = (done..next).map(|i| lengths.token(i)).collect();
        inputs.clear();
        inputs.push(&tokens, next, &blocks)?;
        let ticket = executor.submit(&inputs)?;
        let output = executor.wait(ticket)?;
        if next == lengths.prompt {
            return Ok(output.logits.clone());
        }
        done = next;
    }
}
