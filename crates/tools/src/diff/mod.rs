//! `infernum diff`: our own run against what another implementation computed, layer by layer.
//!
//! Ours is the graph as the spec wrote it, without passes, in f32 on the CPU. The values within a layer are seen by
//! asking its graph to give them.

mod compare;
mod dump;
mod inner;

use std::error::Error;
use std::path::PathBuf;

use infernum::{ModelOptions, PASS_OPTIONS};
use infernum_codegen::{Plan, TargetKind};
use infernum_frontend_hf::{Checkpoint, LowerOptions, Model};
use infernum_ir::{CallSite, DType, Dims, Module, Sym, Type, ValueId};
use infernum_runtime::cpu::{CpuExecutor, CpuOptions};
use infernum_runtime::{
    CheckpointWeights, Executor, GroupKind, Observer, PlanExecutor, SequenceSteps, StepInputs,
    most_blocks,
};
use serde::Serialize;

use crate::report::{self, Outcome};
use compare::{Figures, compare};
use dump::Dump;
use inner::{Found, Row};

type Fallible<T> = Result<T, Box<dyn Error>>;

/// What makes a dump.
const SCRIPT: &str = include_str!("dump_hidden.py");

/// Options that mean nothing here, beside those of passes: the graph runs on a CPU as the spec wrote it.
const WITHOUT_MEANING: [&str; 4] = ["kv_dtype", "max_loras", "max_lora_rank", "lora_targets"];

/// Shows and takes no option that means nothing here.
fn only_meant(arg: clap::Arg) -> clap::Arg {
    let id = arg.get_id().as_str();
    let is_meant = !WITHOUT_MEANING.contains(&id) && !PASS_OPTIONS.contains(&id);
    if is_meant { arg } else { arg.hide(true).conflicts_with("against") }
}

/// The command line.
#[derive(clap::Args)]
#[command(mut_args(only_meant))]
pub struct Args {
    /// What transformers computed, as `--script` writes it.
    #[arg(long, value_name = "FILE", required_unless_present = "script")]
    against: Option<PathBuf>,
    /// Print the Python script that makes such a file.
    #[arg(long, conflicts_with = "against")]
    script: bool,
    /// Mean squared error over mean square beyond which a value departs; by the file's element type when left out: 1e-8,
    /// for bf16 1e-3.
    #[arg(long, value_name = "NMSE")]
    tolerance: Option<f64>,
    /// Print all figures as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelOptions,
}

/// What a layer gives, against theirs.
#[derive(Debug, Serialize)]
struct Compared {
    stage: String,
    kind: String,
    figures: Figures,
    departs: bool,
}

/// What was found.
#[derive(Debug, Serialize)]
struct Report {
    tokens: usize,
    tolerance: f64,
    stages: Vec<Compared>,
    /// The first stage that departs, by its place among them.
    first: Option<usize>,
    /// What is known of its ops.
    within: Option<Found>,
}

/// Runs the model on the file's tokens and compares. What departs is a failure.
pub fn run(args: &Args) -> Outcome {
    let Some(path) = &args.against else { return report::text(SCRIPT) };
    let mut options = args.model.clone();
    let dtype = *options.compile.dtype.get_or_insert(DType::F32);
    let dump = Dump::open(path)?;
    let model = options.open_with_progress(&report::progress())?;
    let default = (64.0 * dump.rounding().powi(2)).max(1e-8);
    let tolerance = args.tolerance.unwrap_or(default);
    let ours = Ours::of(&model, &options, &dump, dtype)?;
    let found = ours.report(&dump, tolerance)?;
    if args.json {
        report::json(&found)?;
    } else {
        show(&found)?;
    }
    match found.first {
        None => Ok(()),
        Some(first) => Err(found.verdict(first).into()),
    }
}

/// Our side.
struct Ours<'a> {
    checkpoint: &'a Checkpoint,
    module: Module,
}

impl<'a> Ours<'a> {
    fn of(model: &'a Model, options: &ModelOptions, dump: &Dump, dtype: DType) -> Fallible<Self> {
        // As long as it is: what depends on the length, as some rotations do, is what it is in the dump.
        let length = options.max_length.unwrap_or(0).max(dump.tokens.len() as u64);
        let lower = LowerOptions { dtype: Some(dtype), max_length: Some(length), rows: Sym::T };
        let lowered = model.lower(lower, options.kernels()?.ops.encodings())?;
        lowered.warnings.iter().for_each(report::warning);
        let checkpoint = model.checkpoint.as_ref();
        let checkpoint = checkpoint.ok_or("--random-weights: diff needs the checkpoint")?;
        Ok(Ours { checkpoint, module: lowered.module })
    }

    /// Compares all layers, and the values within the first that departs.
    fn report(&self, dump: &Dump, tolerance: f64) -> Fallible<Report> {
        let (mut stages, mut failure) = (Vec::new(), None);
        let schedule = &self.module.schedule;
        self.run(&self.module, dump, &mut |call, values| {
            let (Some(site), Some(ours)) = (schedule.get(call), values.first()) else { return };
            let stage = stage(schedule, call);
            let shape: Vec<u64> = ours.shape.iter().map(|d| *d as u64).collect();
            match dump.expect(&stage, &shape) {
                Err(e) => failure = failure.take().or(Some(e)),
                Ok(theirs) => {
                    let figures = compare((&shape, &ours.data), &theirs);
                    let kind = self.module.graphs[site.graph].name.clone();
                    let departs = figures.departs(tolerance);
                    stages.push(Compared { stage, kind, figures, departs });
                }
            }
        })?;
        if let Some(error) = failure {
            return Err(error.into());
        }
        let first = stages.iter().position(|s: &Compared| s.departs);
        let within = first.map(|call| self.within(call, dump, tolerance)).transpose()?;
        Ok(Report { tokens: dump.tokens.len(), tolerance, stages, first, within })
    }

    /// Runs again, with a graph for this call that gives everything it computes.
    fn within(&self, call: usize, dump: &Dump, tolerance: f64) -> Fallible<Found> {
        let site = self.module.schedule[call];
        let graph = &self.module.graphs[site.graph];
        let mut open = graph.clone();
        open.name = format!("{}.open", graph.name);
        let given = graph.results().to_vec();
        let more = inner::computed(graph).into_iter().filter(|v| !given.contains(v));
        open.set_results(given.iter().copied().chain(more).collect());
        let mut module = self.module.clone();
        module.schedule[call] = CallSite { graph: module.graphs.len(), ..site };
        module.graphs.push(open);
        let mut seen = Vec::new();
        self.run(&module, dump, &mut |i, values| {
            if i == call {
                seen = values;
            }
        })?;
        let tensor = |v: &&ValueId| matches!(graph.ty(**v), Type::Tensor(_));
        let result = *given.iter().find(tensor).ok_or("a graph that gives nothing")?;
        let name = &stage(&self.module.schedule, call);
        let stage = inner::Stage { name, graph, values: &seen, result };
        Ok(inner::locate(&stage, dump, tolerance))
    }

    /// One step of all tokens, showing what each call carries on.
    fn run(&self, module: &Module, dump: &Dump, observe: &mut Observer<'_>) -> Fallible<()> {
        let t = dump.tokens.len() as u64;
        let dims = Dims { t, b: t, s: t, pairs: t * t, seqs: 1 };
        let plan: Plan = infernum_codegen::plan(module, TargetKind::Cpu, dims)?;
        let vocab = plan.vocabulary();
        if let Some(token) = dump.tokens.iter().find(|t| u64::from(**t) >= vocab) {
            let expected = format!("`tokens` of this model's vocabulary of {vocab}");
            return Err(dump.content(&expected, format!("the id {token}")).into());
        }
        let (count, groups) = (dump.tokens.len(), GroupKind::of_plan(&plan));
        let kv_blocks = most_blocks(&groups, count, StepInputs::BLOCK_SIZE, count);
        let options = CpuOptions { kv_blocks, ..CpuOptions::default() };
        let weights = CheckpointWeights::new(self.checkpoint);
        let mut executor = CpuExecutor::new(plan, &weights, options)?;
        let mut sequence = SequenceSteps::for_tokens(&groups, count, count);
        let ticket = executor.submit_observed(sequence.next(&dump.tokens)?, observe)?;
        executor.wait(ticket)?;
        Ok(())
    }
}

/// What the dump calls what a call gives.
fn stage(schedule: &[CallSite], call: usize) -> String {
    match schedule[call].layer {
        Some(layer) => format!("layers.{layer}"),
        None if call + 1 == schedule.len() => "logits".to_owned(),
        None => "embed".to_owned(),
    }
}

impl Report {
    /// In a sentence: which layer, and which op.
    fn verdict(&self, first: usize) -> String {
        let Compared { stage, kind, figures, .. } = &self.stages[first];
        let layer = match stage.strip_prefix("layers.") {
            Some(layer) => format!("layer {layer} ({kind})"),
            None => format!("`{stage}`"),
        };
        let head = format!("{layer} is the first that departs: NMSE {:.1e}", figures.nmse);
        let Some(found) = &self.within else { return head };
        let Some(row) = found.rows.get(found.first) else { return head };
        let at = |row: &Row| row.at.as_ref().map(|at| format!(" at {at}")).unwrap_or_default();
        let named = |row: &Row| format!("{} (`%{}`{})", row.op, row.value, at(row));
        let (theirs, shown) = (row.theirs.as_deref().unwrap_or(stage), named(row));
        let op = if found.suspects.len() <= 1 {
            format!("in it {shown}, which is given what agrees, departs from {theirs}")
        } else {
            let all = found.suspects.iter().map(|i| named(&found.rows[*i]));
            let all = all.collect::<Vec<_>>().join("\n  ");
            format!(
                "in it {shown} is the first that departs, from {theirs}. What led to it from values that agree:\n  {all}"
            )
        };
        let mut lines = vec![format!("{head}; {op}")];
        if let Some(Figures { zeros: [ours, theirs], .. }) = row.figures
            && row.op == "softmax"
            && (ours, theirs) != (0, 0)
        {
            lines.push(format!(
                "probabilities that are 0 in one alone: {ours} in ours, {theirs} in theirs: a mask"
            ));
        }
        if let Some(broken) = found.rows.iter().find(|r| r.spread.nans > 0) {
            lines.push(format!("the first that yields NaN: {}", named(broken)));
        }
        lines.join("\n")
    }
}

/// Prints tables.
fn show(found: &Report) -> Outcome {
    let Report { tokens, tolerance, .. } = found;
    report::line(&format!("{tokens} token(s); a value departs beyond an NMSE of {tolerance:.1e}"))?;
    report::line(&format!(
        "{:<12} {:<20} {:>9} {:>9} {:>12}",
        "", "kind", "NMSE", "max abs", "cosine"
    ))?;
    for Compared { stage, kind, figures: f, departs } in &found.stages {
        let mark = if *departs { "  departs" } else { "" };
        report::line(&format!(
            "{stage:<12} {kind:<20} {:>9.1e} {:>9.1e} {:>12.9}{mark}",
            f.nmse, f.max_abs, f.cosine
        ))?;
    }
    let (Some(within), Some(first)) = (&found.within, found.first) else { return Ok(()) };
    report::line(&format!("\nwithin {}:", found.stages[first].stage))?;
    report::line(&format!(
        "{:<36} {:<10} {:<14} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "value", "op", "shape", "rms", "least", "most", "NMSE", "max abs"
    ))?;
    for row in &within.rows {
        let Row { value, op, shape, spread: s, figures, theirs, departs, .. } = row;
        let shape: Vec<String> = shape.iter().map(ToString::to_string).collect();
        let nmse = figures.map_or_else(String::new, |f| format!("{:.1e}", f.nmse));
        let most = figures.map_or_else(String::new, |f| format!("{:.1e}", f.max_abs));
        let nans = if s.nans > 0 { format!("  {} NaN", s.nans) } else { String::new() };
        let mark = match (departs, theirs) {
            (Some(true), Some(theirs)) => format!("  departs from {theirs}"),
            (_, Some(theirs)) => format!("  {theirs}"),
            _ => String::new(),
        };
        report::line(&format!(
            "{value:<36} {op:<10} {:<14} {:>9.2e} {:>9.1e} {:>9.1e} {nmse:>9} {most:>9}{mark}{nans}",
            format!("[{}]", shape.join(", ")),
            s.rms,
            s.min,
            s.max
        ))?;
    }
    report::line("")
}
