//! `infernum logits`.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Mutex;

use infernum::{Capacity, Loader, Machine, ModelOptions, RunOptions};
use infernum_frontend_hf::safetensors::{TensorData, TensorOut, write_safetensors};
use infernum_ir::Sym;
use infernum_runtime::{Observed, PlanExecutor, SequenceSteps, StepInputs};

use crate::report::{self, Outcome};

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    /// Token ids, separated by commas.
    #[arg(long, value_delimiter = ',', required = true)]
    tokens: Vec<u32>,
    /// File to write: tensor `logits`, f32 [tokens, vocabulary].
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Write what each layer gives as well: `embed`, `layers.0`, .. as f32 [tokens, hidden].
    #[arg(long)]
    dump_layers: bool,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    run: RunOptions,
}

/// Rows of one tensor, gathered over the chunks.
struct Rows {
    name: String,
    width: usize,
    data: Vec<f32>,
}

/// Computes and writes them.
pub fn run(args: &Args) -> Outcome {
    let model = args.model.open_with_progress(&report::progress())?;
    // As when a model is run on just these tokens: length-dependent RoPE kinds pick their factor
    // for this length.
    let max_length = args.model.max_length.unwrap_or(args.tokens.len() as u64);
    let (capacity, machine) = (Capacity::one(max_length), Machine::open(args.run.device)?);
    let progress = report::progress();
    let loader = Loader::new(&model, &args.model, &args.run, &machine).with_progress(&progress);
    let plan = loader.plan(Sym::T, capacity)?;
    let mut executor = loader.load(plan, capacity)?;
    let chunk = loader.chunk();
    let tensors = compute(&mut *executor, args, chunk)?;
    let shapes: Vec<[u64; 2]> =
        tensors.iter().map(|t| [(t.data.len() / t.width.max(1)) as u64, t.width as u64]).collect();
    let out: Vec<TensorOut<'_>> = tensors
        .iter()
        .zip(&shapes)
        .map(|(t, shape)| TensorOut { name: &t.name, shape, data: TensorData::F32(&t.data) })
        .collect();
    write_safetensors(&args.out, &out)?;
    let rows = args.tokens.len();
    report::line(&format!("{}: {} tensor(s), {rows} row(s) each", args.out.display(), out.len()))
}

fn compute(
    executor: &mut dyn PlanExecutor,
    args: &Args,
    chunk: usize,
) -> Result<Vec<Rows>, Box<dyn Error>> {
    if executor.plan().yields_tokens() {
        return Err(
            "--passes: the plan yields tokens instead of logits; leave out the pass `greedy`"
                .into(),
        );
    }
    let vocab = executor.plan().vocabulary();
    if let Some(token) = args.tokens.iter().find(|t| u64::from(**t) >= vocab) {
        return Err(format!("--tokens: {token} is outside the vocabulary of {vocab}").into());
    }
    // Of a model that does not generate, vectors or scores of what comes before each token.
    let width = executor.plan().width() as usize;
    let mut logits = Rows { name: "logits".to_owned(), width, data: Vec::new() };
    let layers = Mutex::new(Vec::<Rows>::new());
    let mut sequence = SequenceSteps::for_tokens(&executor.groups(), args.tokens.len(), chunk);
    for chunk in chunks(executor, args, chunk) {
        let done = sequence.context();
        let inputs = sequence.next(&args.tokens[done..done + chunk])?;
        let output = if args.dump_layers {
            let names = call_names(executor, inputs);
            let ticket = executor.submit_observed(inputs, &mut |call, values| {
                if let (Some(name), Ok(mut layers)) = (&names[call], layers.lock()) {
                    add_rows(&mut layers, name, values);
                }
            })?;
            executor.wait(ticket)?
        } else {
            executor.run(inputs)?
        };
        logits.data.extend_from_slice(&output.logits);
    }
    let mut tensors = layers.into_inner().map_err(|e| e.to_string())?;
    tensors.push(logits);
    Ok(tensors)
}

/// A name for what each call of a step gives, but for the last, whose result is the logits.
fn call_names(executor: &dyn PlanExecutor, inputs: &StepInputs) -> Vec<Option<String>> {
    let plan = executor.plan();
    let schedule = plan.schedule(inputs.tokens().len() as u64, inputs.is_decode_only());
    let calls = schedule.map_or(&[][..], |s| &plan.schedules[s].calls);
    let last = calls.len().saturating_sub(1);
    let name = |(i, call): (usize, &infernum_codegen::ProgramCall)| {
        let program = &plan.programs[call.program as usize].name;
        let name = call.layer.map_or_else(|| program.clone(), |l| format!("layers.{l}"));
        (i != last).then_some(name)
    };
    calls.iter().enumerate().map(name).collect()
}

/// Sizes of the steps: as many tokens as the plan's buffers take.
fn chunks(executor: &dyn PlanExecutor, args: &Args, chunk: usize) -> Vec<usize> {
    let limits = executor.plan().limits;
    let (mut sizes, mut done) = (Vec::new(), 0);
    while done < args.tokens.len() {
        let most = (args.tokens.len() - done).min(limits.t as usize).min(chunk);
        let fits = |n: &usize| (n * (done + n)) as u64 <= limits.pairs;
        let size = (1..=most).rev().find(fits).unwrap_or(1);
        sizes.push(size);
        done += size;
    }
    sizes
}

/// A call that gives one value gives it its own name.
fn add_rows(layers: &mut Vec<Rows>, call: &str, values: Vec<Observed>) {
    let single = values.len() == 1;
    for (i, value) in values.into_iter().enumerate() {
        let name = if single { call.to_owned() } else { format!("{call}.{i}") };
        let width = value.shape.iter().skip(1).product();
        let data = value.data.into_iter().map(|v| v as f32);
        match layers.iter_mut().find(|l| l.name == name) {
            Some(rows) => rows.data.extend(data),
            None => layers.push(Rows { name, width, data: data.collect() }),
        }
    }
}
