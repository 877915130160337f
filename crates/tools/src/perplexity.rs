//! `infernum perplexity`.

use std::error::Error;
use std::path::PathBuf;

use infernum::{Capacity, Loader, Machine, ModelOptions, RunOptions};
use infernum_frontend_hf::tokenizer::Tokenizer;
use infernum_ir::Sym;
use infernum_runtime::{PlanExecutor, SequenceSteps};
use serde_json::json;

use crate::report::{self, Outcome};

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    /// The text, UTF-8.
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Tokens of a window. Windows do not overlap, and each begins anew; of its tokens all but the first count.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(2..=1 << 20))]
    window: u64,
    /// Windows at most; all when left out.
    #[arg(long)]
    windows: Option<usize>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    run: RunOptions,
}

/// What the tokens of a text cost.
#[derive(Default)]
struct Sum {
    /// Negative logarithms of probabilities, and their squares.
    nats: f64,
    squares: f64,
    tokens: u64,
}

/// Computes and prints it.
pub fn run(args: &Args) -> Outcome {
    let text = std::fs::read_to_string(&args.text)
        .map_err(|e| format!("--text: {}: {e}", args.text.display()))?;
    let model = args.model.open_with_progress(&report::progress())?;
    if !model.task.generates() {
        let place = model.files.name();
        return Err(
            format!("{place}: gives vectors or scores; expected a model that generates").into()
        );
    }
    let tokens = Tokenizer::open(&model.files)?.encode(&text, false)?;
    if tokens.len() < 2 {
        return Err(format!("--text: {}: fewer than two tokens", args.text.display()).into());
    }
    let longest = args.window.min(tokens.len() as u64);
    let capacity = Capacity::one(args.model.max_length.unwrap_or(longest).max(longest));
    let machine = Machine::open(args.run.device)?;
    let progress = report::progress();
    let loader = Loader::new(&model, &args.model, &args.run, &machine).with_progress(&progress);
    let plan = loader.plan(Sym::T, capacity)?;
    let mut executor = loader.load(plan, capacity)?;
    let mut sum = Sum::default();
    let windows = tokens.chunks(longest as usize).filter(|w| w.len() > 1);
    for window in windows.take(args.windows.unwrap_or(usize::MAX)) {
        add(&mut *executor, window, loader.chunk(), &mut sum)?;
    }
    let mean = sum.nats / sum.tokens as f64;
    // Of the mean, as if tokens were independent.
    let spread = (sum.squares / sum.tokens as f64 - mean * mean).max(0.0) / sum.tokens as f64;
    let (perplexity, error) = (mean.exp(), mean.exp() * spread.sqrt());
    if args.json {
        return report::json(&json!({
            "perplexity": perplexity, "standard_error": error, "nats_per_token": mean, "tokens": sum.tokens,
        }));
    }
    report::line(&format!(
        "perplexity {perplexity:.4} ± {error:.4} ({mean:.5} nats a token, {} tokens)",
        sum.tokens
    ))
}

/// Adds a window of its own.
fn add(
    executor: &mut dyn PlanExecutor,
    window: &[u32],
    chunk: usize,
    sum: &mut Sum,
) -> Result<(), Box<dyn Error>> {
    let width = executor.plan().vocabulary() as usize;
    let sequence = SequenceSteps::for_tokens(&executor.groups(), window.len(), chunk);
    let mut next = 1;
    let mut missing = None;
    infernum::prefill(executor, sequence, window, chunk, |output| {
        for logits in output.logits.chunks_exact(width.max(1)) {
            // The last token's logits are of what comes after the window.
            let Some(token) = window.get(next) else { break };
            next += 1;
            let Some(wanted) = logits.get(*token as usize) else {
                missing = Some(*token);
                break;
            };
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let all: f64 = logits.iter().map(|x| f64::from(x - largest).exp()).sum();
            let nats = all.ln() - f64::from(wanted - largest);
            sum.nats += nats;
            sum.squares += nats * nats;
            sum.tokens += 1;
        }
    })?;
    match missing {
        Some(token) => Err(format!("token {token} is outside the vocabulary of {width}").into()),
        None if next < window.len() => Err("the plan yields no logits for every token".into()),
        None => Ok(()),
    }
}
