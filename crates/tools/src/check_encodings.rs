//! `infernum check-encodings`.

use std::path::PathBuf;

use infernum_passes::data::Kernels;
use infernum_runtime::check::encodings;
use serde_json::json;

use crate::report::{self, Outcome};

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    /// Folder whose kernels/ overrides and adds to the built-in files.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Only encodings whose names contain this.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    only: String,
    /// Fixes the random bytes.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Checks them; an error if one is wrong.
pub fn run(args: &Args) -> Outcome {
    infernum::check_data(args.data.as_deref())?;
    let kernels = Kernels::load(args.data.as_deref(), &[])?;
    let named = kernels.ops.encodings().filter(|e| e.name().contains(&args.only));
    let mut lines = Vec::new();
    let mut failed = 0;
    for encoding in named {
        let mut problems = Vec::new();
        let values = encodings::check(encoding, args.seed).unwrap_or_else(|problem| {
            problems.push(problem);
            0
        });
        let decoded = encodings::check_cpu(&kernels.ops, args.seed, encoding);
        problems.extend(decoded.iter().filter(|v| !v.passed()).map(ToString::to_string));
        failed += usize::from(!problems.is_empty());
        lines.push((encoding.name().to_owned(), values, problems));
    }
    if lines.is_empty() {
        return Err(format!("`{}`: no encoding is named so", args.only).into());
    }
    if args.json {
        let line = |(name, values, problems): &(String, u64, Vec<String>)| json!({ "encoding": name, "values": values, "problems": problems });
        report::json(&lines.iter().map(line).collect::<Vec<_>>())?;
    } else {
        for (name, values, problems) in &lines {
            report::line(&if problems.is_empty() {
                format!("ok   {name}: {values} values, and as the CPU decodes it")
            } else {
                format!("FAIL {name}: {}", problems.join("; "))
            })?;
        }
        report::line(&format!("{} encoding(s), {failed} failed", lines.len()))?;
    }
    if failed > 0 { Err(format!("{failed} encoding(s) are wrong").into()) } else { Ok(()) }
}
