//! `infernum check-rules`.

use std::path::PathBuf;
use std::time::Instant;

use infernum::CacheOptions;
use infernum_ir::nearest;
use infernum_passes::data::Kernels;

use crate::report::{self, Outcome};

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    /// Rule files to check beside the built-in ones.
    files: Vec<PathBuf>,
    /// Folder whose kernels/ overrides and adds to the built-in files.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Check only these rules: separated by commas, or one an option.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Random instances that each rule is tried on.
    #[arg(long, value_name = "N", default_value_t = 100)]
    trials: usize,
    /// Fixes the random choices.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    cache: CacheOptions,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Checks them; an error if one is wrong.
pub fn run(args: &Args) -> Outcome {
    infernum::check_data(args.data.as_deref())?;
    let kernels = Kernels::load(args.data.as_deref(), &args.files)?;
    let named = |name: &String| kernels.rules.iter().any(|r| r.name == *name);
    if let Some(unknown) = args.only.iter().find(|name| !named(name)) {
        let hint = nearest(unknown, kernels.rules.iter().map(|r| r.name.as_str()));
        return Err(format!("--only: no rule is named `{unknown}`{hint}").into());
    }
    let start = Instant::now();
    let wanted = |name: &String| args.only.is_empty() || args.only.contains(name);
    let rules = kernels.rules.iter().filter(|r| wanted(&r.name));
    let cache = args.cache.verdicts();
    let verdicts: Vec<_> = rules.map(|r| cache.check_rule(r, args.seed, args.trials)).collect();
    let failed = verdicts.iter().filter(|v| !v.passed()).count();
    if args.json {
        report::json(&verdicts)?;
    } else {
        for verdict in &verdicts {
            report::line(&verdict.to_string())?;
        }
        let (rules, time) = (verdicts.len(), start.elapsed().as_secs_f64());
        let cached = verdicts.iter().filter(|v| v.cached).count();
        report::line(&format!(
            "{rules} rule(s), {failed} failed, {cached} known from before, {time:.2} s"
        ))?;
    }
    if failed > 0 { Err(format!("{failed} rule(s) are wrong").into()) } else { Ok(()) }
}
