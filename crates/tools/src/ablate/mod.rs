//! `infernum ablate`: what each rule buys.

mod noise;
mod plot;

use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;

use infernum::{Capacity, Loader, Machine, RunOptions};
use infernum_codegen::Plan;
use infernum_codegen::compile::{Compiled, Options, compile};
use infernum_frontend_hf::{LowerOptions, Model};
use infernum_ir::Sym;
use infernum_passes::Pipeline;
use infernum_passes::data::Kernels;
use infernum_passes::fuse::CostTable;
use infernum_runtime::PlanExecutor;
use serde::Serialize;

use crate::report::{self, Outcome};
use crate::steps::{self, Lengths, after_prompt, median, once};
use crate::subject::Subject;
use noise::Difference;

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    /// Tokens of prompt.
    #[arg(long, value_name = "N", default_value_t = 64)]
    prompt: usize,
    /// Tokens to decode after the prompt.
    #[arg(long, value_name = "N", default_value_t = 16)]
    generate: usize,
    /// Measured pairs: each choice of rules is run in turn with what it is compared with.
    #[arg(long, value_name = "N", default_value_t = 7)]
    runs: usize,
    /// Write a plot.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    subject: Subject,
    #[command(flatten)]
    run: RunOptions,
}

/// What was measured.
#[derive(Serialize)]
struct Ablated {
    model: String,
    device: String,
    prompt: usize,
    generate: usize,
    runs: usize,
    /// The plan with all rules, measured beside itself: differences below this are noise.
    noise: Noise,
    rows: Vec<Row>,
}

/// How far a plan is from itself.
#[derive(Clone, Copy, Serialize)]
struct Noise {
    prefill: f64,
    decode: f64,
}

/// One choice of rules, and what it gives.
#[derive(Serialize)]
struct Row {
    rules: String,
    /// What it is compared with: `all` or `none`.
    reference: &'static str,
    /// Launches of a decode step, by op.
    launches: BTreeMap<String, usize>,
    launches_per_step: usize,
    /// Whether its plan is another one than the reference's: the proof that the choice toggled
    /// something. What has the same plan is not measured.
    plan_differs: bool,
    /// Time that a prompt takes, against the reference.
    prefill: Difference,
    /// Time that a decoded token takes, against the reference.
    decode: Difference,
    /// The same as speeds; medians.
    prefill_tokens_per_second: f64,
    decode_tokens_per_second: f64,
    /// Against the logits without any rule, after the prompt.
    max_logit_difference: f64,
}

impl Ablated {
    /// The rules that were left out one by one.
    fn rules(&self) -> Vec<&str> {
        self.rows.iter().filter_map(|r| r.rules.strip_prefix("all but ")).collect()
    }
}

struct Ablation<'a> {
    args: &'a Args,
    machine: Machine,
    /// The name of the cost table.
    target: String,
    model: &'a Model,
    kernels: &'a Kernels,
    costs: &'a CostTable,
    pipeline: Pipeline,
}

/// A plan that is loaded and warm.
struct Loaded {
    plan: Plan,
    executor: Box<dyn PlanExecutor>,
    logits: Vec<f32>,
}

/// Measures each choice of rules.
pub fn run(args: &Args) -> Outcome {
    if args.prompt == 0 || args.generate == 0 {
        return Err("--prompt and --generate: expected at least 1".into());
    }
    let model = args.subject.open()?;
    let machine = Machine::open(args.run.device)?;
    let (kernels, pipeline) = (args.subject.kernels()?, args.subject.pipeline(machine.pipeline())?);
    let (target, costs) = machine.costs(&args.subject)?;
    let (model, kernels, costs) = (&model, &kernels, &costs);
    let ablation = Ablation { args, machine, target, model, kernels, costs, pipeline };
    let ablated = ablation.measure_all()?;
    if let Some(path) = &args.svg {
        let svg = plot::svg(&ablated)?;
        std::fs::write(path, svg).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    if args.json { report::json(&ablated) } else { print(&ablated) }
}

/// A table; differences that are within the noise are dim.
fn print(ablated: &Ablated) -> Outcome {
    report::line(&format!(
        "{:<32} {:>8} {:>17} {:>17} {:>11}",
        "rules", "launches", "prefill time", "decode time", "max |Δlogit|"
    ))?;
    for r in &ablated.rows {
        let shown = |d: Difference| match (r.plan_differs, d.significant) {
            (false, _) => format!("{:>17}", "same plan"),
            (true, significant) => {
                let (median, spread) = (d.median * 100.0, d.spread * 100.0);
                let text = format!("{:>17}", format!("{median:+.1} ±{spread:.1} %"));
                if significant { text } else { format!("\x1b[2m{text}\x1b[0m") }
            }
        };
        report::line(&format!(
            "{:<32} {:>8} {} {} {:>11.1e}",
            r.rules,
            r.launches_per_step,
            shown(r.prefill),
            shown(r.decode),
            r.max_logit_difference
        ))?;
    }
    let Noise { prefill, decode } = ablated.noise;
    report::line(&format!(
        "`all but` and `none` are against all rules, `only` against none. The plan with all rules, \
         measured\nbeside itself, differs by up to {:.1} % (prefill) and {:.1} % (decode): less is \
         noise.",
        prefill * 100.0,
        decode * 100.0
    ))
}

impl Ablation<'_> {
    fn loader(&self) -> Loader<'_> {
        Loader::new(self.model, &self.args.subject, &self.args.run, &self.machine)
    }

    fn capacity(&self) -> Capacity {
        Capacity::one(self.args.prompt.saturating_add(self.args.generate) as u64)
    }

    /// All rules, all but each one that fired, each of those alone, and none.
    fn measure_all(&self) -> Result<Ablated, Box<dyn Error>> {
        let compiled = self.compile(None, None)?;
        let fired = compiled.buckets.iter().flat_map(|b| &b.report.fired);
        let mut fired: Vec<String> = fired.map(|f| f.rule.clone()).collect();
        fired.sort();
        fired.dedup();
        let mut none = self.load(self.compile(Some(Vec::new()), None)?.plan)?;
        let logits = none.logits.clone();
        let mut again = self.load(compiled.plan.clone())?;
        let mut all = self.load(compiled.plan)?;
        let quiet = Noise { prefill: 0.0, decode: 0.0 };
        let itself = self.pairs("all", "all", &mut again, &mut all, quiet, &logits)?;
        let noise = Noise { prefill: itself.prefill.reach(), decode: itself.decode.reach() };
        drop(again);
        let none_row = self.pairs("none", "all", &mut none, &mut all, noise, &logits)?;
        let same = Row {
            plan_differs: false,
            prefill: Difference::NONE,
            decode: Difference::NONE,
            ..itself
        };
        let mut rows = vec![same];
        let bar = report::steps_bar("measuring", 2 * fired.len() as u64);
        for rule in &fired {
            let plan = self.compile(None, Some(rule))?.plan;
            rows.push(self.row(
                &format!("all but {rule}"),
                "all",
                plan,
                &mut all,
                noise,
                &logits,
            )?);
            bar.inc(1);
        }
        for rule in &fired {
            let plan = self.compile(Some(vec![rule.clone()]), None)?.plan;
            rows.push(self.row(
                &format!("only {rule}"),
                "none",
                plan,
                &mut none,
                noise,
                &logits,
            )?);
            bar.inc(1);
        }
        bar.finish_and_clear();
        rows.push(none_row);
        Ok(Ablated {
            model: self.args.subject.name(self.model),
            device: all.executor.describe(),
            prompt: self.args.prompt,
            generate: self.args.generate,
            runs: self.args.runs.max(1),
            noise,
            rows,
        })
    }

    fn compile(
        &self,
        only: Option<Vec<String>>,
        without: Option<&str>,
    ) -> Result<Compiled, Box<dyn Error>> {
        let mut pipeline = self.pipeline.clone();
        pipeline.disabled.extend(without.map(str::to_owned));
        let (loader, capacity) = (self.loader(), self.capacity());
        let (device, templates) = (self.machine.device(), loader.templates());
        let tuned = loader.tuned()?;
        let options = Options {
            model: self.model,
            lower: LowerOptions {
                dtype: self.args.subject.dtype,
                max_length: Some(capacity.max_length),
                rows: Sym::B,
            },
            pipeline: &pipeline,
            kernels: self.kernels,
            costs: (&self.target, self.costs),
            rules: only,
            adapters: None,
            kv_dtype: self.args.subject.kv_dtype,
            explain: false,
            limits: loader.limits(capacity),
            templates: &templates,
            device: device.as_ref().map(|d| (d, &tuned)),
        };
        Ok(compile(&options, &mut |_, _, _| {})?)
    }

    /// Measures a plan beside its reference, unless they are the same.
    fn row(
        &self,
        rules: &str,
        reference: &'static str,
        plan: Plan,
        beside: &mut Loaded,
        noise: Noise,
        logits: &[f32],
    ) -> Result<Row, Box<dyn Error>> {
        if plan != beside.plan {
            let mut loaded = self.load(plan)?;
            return self.pairs(rules, reference, &mut loaded, beside, noise, logits);
        }
        let launches = launches(&plan);
        Ok(Row {
            rules: rules.to_owned(),
            reference,
            launches_per_step: launches.values().sum(),
            launches,
            plan_differs: false,
            prefill: Difference::NONE,
            decode: Difference::NONE,
            prefill_tokens_per_second: f64::NAN,
            decode_tokens_per_second: f64::NAN,
            max_logit_difference: furthest(&beside.logits, logits),
        })
    }

    /// Runs two plans in turn, each first every other time, so that what else the machine does
    /// meets both.
    fn pairs(
        &self,
        rules: &str,
        reference: &'static str,
        loaded: &mut Loaded,
        beside: &mut Loaded,
        noise: Noise,
        logits: &[f32],
    ) -> Result<Row, Box<dyn Error>> {
        let lengths = self.lengths(&loaded.plan);
        let (mut mine, mut other) = (Vec::new(), Vec::new());
        for i in 0..self.args.runs.max(1) {
            if i % 2 == 0 {
                mine.push(once(&mut *loaded.executor, &lengths)?);
                other.push(once(&mut *beside.executor, &lengths)?);
            } else {
                other.push(once(&mut *beside.executor, &lengths)?);
                mine.push(once(&mut *loaded.executor, &lengths)?);
            }
        }
        let difference = |speed: fn(&steps::Run) -> f64, noise| {
            let times = |(a, b)| (1.0 / speed(a), 1.0 / speed(b));
            let pairs: Vec<(f64, f64)> = mine.iter().zip(&other).map(times).collect();
            Difference::of(&pairs, noise)
        };
        let launches = launches(&loaded.plan);
        Ok(Row {
            rules: rules.to_owned(),
            reference,
            launches_per_step: launches.values().sum(),
            launches,
            plan_differs: loaded.plan != beside.plan,
            prefill: difference(|r| r.prefill_tokens_per_second, noise.prefill),
            decode: difference(|r| r.decode_tokens_per_second, noise.decode),
            prefill_tokens_per_second: median(mine.iter().map(|r| r.prefill_tokens_per_second)),
            decode_tokens_per_second: median(mine.iter().map(|r| r.decode_tokens_per_second)),
            max_logit_difference: furthest(&loaded.logits, logits),
        })
    }

    fn lengths(&self, plan: &Plan) -> Lengths {
        Lengths {
            prompt: self.args.prompt,
            generate: self.args.generate,
            batch: 1,
            chunk: self.loader().chunk(),
            vocab: steps::vocab(plan),
        }
    }

    /// Loads a plan and runs it once.
    fn load(&self, plan: Plan) -> Result<Loaded, Box<dyn Error>> {
        let (kept, lengths) = (plan.clone(), self.lengths(&plan));
        let loader = self.loader();
        let weights = loader.weights(&plan);
        let mut executor = loader.load_with(plan, &*weights, self.capacity())?;
        let logits = after_prompt(&mut *executor, &lengths)?;
        once(&mut *executor, &lengths)?;
        Ok(Loaded { plan: kept, executor, logits })
    }
}

/// The largest difference of two logits; infinite where one is NaN or missing.
fn furthest(a: &[f32], b: &[f32]) -> f64 {
    let difference = |(a, b): (&f32, &f32)| match f64::from((a - b).abs()) {
        _ if a == b => 0.0, // both may be infinite
        d if d.is_nan() => f64::INFINITY,
        d => d,
    };
    let least = if a.len() == b.len() { 0.0 } else { f64::INFINITY };
    a.iter().zip(b).map(difference).fold(least, f64::max)
}

/// Launches of a decode step of one token, by op.
fn launches(plan: &Plan) -> BTreeMap<String, usize> {
    let mut ops = BTreeMap::new();
    let schedule = plan.greedy_schedule(1, true).map(|i| &plan.schedules[i]);
    for call in schedule.iter().flat_map(|s| &s.calls) {
        for launch in &plan.programs[call.program as usize].launches {
            *ops.entry(launch.op.clone()).or_default() += 1;
        }
    }
    ops
}

#[cfg(test)]
mod tests {
    #[test]
    fn nan_is_as_far_as_can_be() {
        let far = f64::INFINITY;
        let cases: [(&[f32], &[f32], f64); 5] = [
            (&[1.0, 2.0], &[1.0, 2.5], 0.5),
            (&[f32::NAN, 2.0], &[1.0, 2.0], far),
            (&[f32::NAN], &[f32::NAN], far),
            (&[f32::NEG_INFINITY], &[f32::NEG_INFINITY], 0.0),
            (&[1.0], &[1.0, 2.0], far),
        ];
        for (a, b, expected) in cases {
            assert_eq!(super::furthest(a, b), expected, "{a:?} {b:?}");
        }
    }
}
