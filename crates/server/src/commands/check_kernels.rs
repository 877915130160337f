//! `infernum check-kernels`.

use std::path::PathBuf;

use infernum_passes::data::Kernels;
use infernum_runtime::cpu;

use crate::report::{self, Outcome};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder whose kernels/ overrides and adds to the built-in files.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Fixes the random choices.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let kernels = Kernels::load(args.data.as_deref(), &[])?;
    let verdicts = cpu::check(&kernels.ops, args.seed);
    for verdict in &verdicts {
        report::line(&verdict.to_string())?;
    }
    let failed = verdicts.iter().filter(|v| !v.passed()).count();
    report::line(&format!("{} kernel(s) of the CPU, {failed} failed", verdicts.len()))?;
    if failed > 0 { Err(format!("{failed} kernel(s) are wrong").into()) } else { Ok(()) }
}
