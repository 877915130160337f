//! `infernum embed`.

use std::io;

use infernum::{Embedder, Frontend, Loader, Machine, ModelOptions, RunOptions};
use infernum_tools::report::{self, Outcome};
use serde::Serialize;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The texts; the lines of standard input when left out.
    texts: Vec<String>,
    /// Take each text as an answer to this one: a cross-encoder scores the pairs.
    #[arg(long, value_name = "TEXT")]
    query: Option<String>,
    /// Print one JSON object for all texts instead of a line of numbers for each.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    run: RunOptions,
}

/// What was computed.
#[derive(Serialize)]
struct Answer {
    size: usize,
    vectors: Vec<Vec<f32>>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let (model, machine) = (args.model.open()?, Machine::open(args.run.device)?);
    let progress = report::progress();
    let loader = Loader::new(&model, &args.model, &args.run, &machine).with_progress(&progress);
    let mut embedder = Embedder::load(&loader, Frontend::open(&model)?)?;
    if model.checkpoint.is_none() {
        report::notice("the weights are random: the numbers mean nothing");
    }
    let texts: Vec<String> = if args.texts.is_empty() {
        io::stdin().lines().collect::<Result<_, _>>()?
    } else {
        args.texts.clone()
    };
    let vectors = match &args.query {
        None => embedder.embed(&texts)?,
        Some(query) => {
            let pairs: Vec<(&str, &str)> = texts.iter().map(|t| (&**query, &**t)).collect();
            embedder.embed_pairs(&pairs)?
        }
    };
    if args.json {
        let size = vectors.first().map_or(0, Vec::len);
        return report::json(&Answer { size, vectors });
    }
    for vector in vectors {
        let numbers: Vec<String> = vector.iter().map(ToString::to_string).collect();
        report::line(&numbers.join(" "))?;
    }
    Ok(())
}
