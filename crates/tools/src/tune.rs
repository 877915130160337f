//! `infernum tune`: finds out which kernels are fastest on this GPU.

use std::path::PathBuf;
use std::time::Duration;

use infernum::tune::{CONTEXT, Tuner, Tuning};
use infernum::{Loader, Machine, RunOptions};
use infernum_passes::fuse::Measurements;
use ron::ser::PrettyConfig;

use crate::report::{self, Outcome};
use crate::subject::Subject;

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    /// Most sequences that are decoded together; as many as --batch names where that is given.
    #[arg(long, value_name = "N", default_value_t = 256)]
    sequences: usize,
    /// Tune decode steps of so many sequences alone, separated by commas; steps of every kind when left out.
    #[arg(long, value_name = "N", value_delimiter = ',')]
    batch: Vec<usize>,
    /// Tune steps with prompts; with --batch, those beside them.
    #[arg(long)]
    prompts: bool,
    /// Tune calls of these ops alone, separated by commas.
    #[arg(long, value_name = "OP", value_delimiter = ',')]
    only: Vec<String>,
    /// Context rows of each sequence.
    #[arg(long, value_name = "N", default_value_t = CONTEXT)]
    context: usize,
    /// Write what is fastest on this GPU as a file of kernels/tuned, or add it to the one that is there, instead of
    /// keeping it for this user.
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// Write what each call of decode steps takes, for --costs: by how much a step is shorter without it.
    #[arg(long, value_name = "FILE")]
    measure: Option<PathBuf>,
    /// Seconds of measuring after which no new variant is tried.
    #[arg(long, value_name = "S", default_value_t = 75)]
    seconds: u64,
    #[command(flatten)]
    subject: Subject,
    #[command(flatten)]
    run: RunOptions,
}

/// Sequences of the decode steps that are priced where --batch says nothing.
const PRICED: [usize; 3] = [1, 8, 16];

/// Searches, and keeps what was found.
pub fn run(args: &Args) -> Outcome {
    if args.batch.contains(&0) || args.context == 0 || args.sequences == 0 {
        return Err("--batch, --sequences and --context: expected at least 1".into());
    }
    let known = args.subject.kernels()?.ops;
    args.only.iter().try_for_each(|op| known.find(op).map(drop))?;
    let machine = Machine::open(args.run.device)?;
    let model = args.subject.open()?;
    let progress = report::progress();
    let loader = Loader::new(&model, &args.subject, &args.run, &machine).with_progress(&progress);
    let tuning = Tuning {
        sequences: args.batch.iter().copied().max().unwrap_or(args.sequences),
        context: args.context,
        batches: args.batch.clone(),
        prompts: args.prompts,
        only: args.only.clone(),
    };
    let most = tuning.sequences;
    let mut tuner = Tuner::new(loader, tuning)?;
    let mut printed = Ok(());
    tuner.tune(Duration::from_secs(args.seconds), &mut |found| {
        if printed.is_ok() {
            printed = report::line(&found.to_string());
        }
    })?;
    printed?;
    if let Some(path) = &args.measure {
        let mut measured = Measurements {
            doc: format!("{}, {} rows of context", tuner.describe(), args.context),
            calls: Vec::new(),
        };
        let priced = if args.batch.is_empty() { &PRICED[..] } else { &args.batch };
        for batch in priced.iter().filter(|n| **n <= most) {
            measured.calls.extend(tuner.price(*batch)?);
        }
        let pretty = PrettyConfig::new().struct_names(true).depth_limit(3);
        let text = ron::ser::to_string_pretty(&measured, pretty)?;
        std::fs::write(path, text + "\n").map_err(|e| format!("{}: {e}", path.display()))?;
        report::line(&format!("{}: {} call(s)", path.display(), measured.calls.len()))?;
    }
    let (path, choices) = match &args.write {
        Some(path) => (path.clone(), tuner.write(path)?),
        None => tuner.save()?,
    };
    report::line(&format!("{}: {choices} choice(s)", path.display()))
}
