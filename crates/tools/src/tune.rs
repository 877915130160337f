//! `infernum tune`: finds out which kernels are fastest on this GPU.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use infernum::tune::{CONTEXT, Tuner};
use infernum::{Loader, Machine, RunOptions};
use infernum_passes::fuse::Measurements;
use ron::ser::PrettyConfig;

use crate::report::{self, Outcome};
use crate::subject::Subject;

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    subject: Subject,
    #[command(flatten)]
    run: RunOptions,
    /// Sequences that are decoded together; several to tune for each.
    #[arg(long, value_name = "N", default_value = "1,8,16", value_delimiter = ',')]
    batch: Vec<usize>,
    /// Context rows of each.
    #[arg(long, value_name = "N", default_value_t = CONTEXT)]
    context: usize,
    /// Write what each call takes, for --costs: by how much a step is shorter without it.
    #[arg(long, value_name = "FILE")]
    measure: Option<PathBuf>,
    /// Seconds after which no new variant is tried.
    #[arg(long, value_name = "S", default_value_t = 120)]
    seconds: u64,
}

/// Searches, and keeps what was found.
pub fn run(args: &Args) -> Outcome {
    if args.batch.contains(&0) || args.batch.is_empty() || args.context == 0 {
        return Err("--batch and --context: expected at least 1".into());
    }
    let machine = Machine::open(args.run.device)?;
    let model = args.subject.open()?;
    let progress = report::progress();
    let loader = Loader::new(&model, &args.subject, &args.run, &machine).with_progress(&progress);
    let most = args.batch.iter().copied().max().unwrap_or(1);
    let mut tuner = Tuner::new(loader, most, args.context)?;
    let end = Instant::now() + Duration::from_secs(args.seconds);
    let mut measured = Measurements {
        doc: format!("{}, {} rows of context", tuner.describe(), args.context),
        calls: Vec::new(),
    };
    for &batch in &args.batch {
        let mut printed = Ok(());
        tuner.tune(batch, end, &mut |found| {
            if printed.is_ok() {
                printed = report::line(&found.to_string());
            }
        })?;
        printed?;
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
    let path = tuner.save()?;
    report::line(&format!("{}: {} choice(s)", path.display(), tuner.tuned().len()))
}
