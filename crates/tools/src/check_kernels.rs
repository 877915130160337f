//! `infernum check-kernels`.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;

use infernum::DeviceId;
use infernum_codegen::cuda::{Cache, Library};
use infernum_passes::data::Kernels;
use infernum_runtime::check::cuda::Wanted;
use infernum_runtime::check::{self, KernelVerdict};
use infernum_runtime::cuda::Gpu;
use serde_json::json;

use crate::report::{self, Outcome};

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    /// Folder whose kernels/ overrides and adds to the built-in files.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Fixes the random choices.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Whose kernels: cpu, cuda, or cuda:N for GPU N.
    #[arg(long, value_name = "NAME", default_value = "cpu")]
    device: DeviceId,
    /// Only ops whose names contain this.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    only: String,
    /// Only variants of CUDA kernels whose names contain this.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    variant: String,
    /// Show every case, and not only those that fail and the worst of each op.
    #[arg(long)]
    verbose: bool,
    /// Write all verdicts to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Folder of compiled kernels; a folder of the user's own when left out.
    #[arg(long, value_name = "DIR")]
    kernel_cache: Option<PathBuf>,
}

/// Checks them; an error if one is wrong.
pub fn run(args: &Args) -> Outcome {
    infernum::check_data(args.data.as_deref())?;
    let kernels = Kernels::load(args.data.as_deref(), &[])?;
    let (verdicts, of) = match args.device {
        DeviceId::Cpu => {
            if !args.variant.is_empty() {
                return Err("--variant: the CPU's kernels have none; expected --device cuda".into());
            }
            let verdicts = check::cpu::check(&kernels, args.seed, &args.only);
            for verdict in &verdicts {
                report::line(&verdict.to_string())?;
            }
            (verdicts, "the CPU".to_owned())
        }
        DeviceId::Cuda(ordinal) => {
            let gpu = Gpu::open(ordinal)?;
            (on_gpu(args, &kernels, &gpu)?, gpu.name.clone())
        }
    };
    if let Some(path) = &args.json {
        let all: Vec<_> = verdicts.iter().map(as_json).collect();
        std::fs::write(path, serde_json::to_vec(&all)?)
            .map_err(|e| format!("{}: {e}", path.display()))?;
    }
    if verdicts.is_empty() {
        let op = kernels.ops.find(&args.only).map(|_| "it runs as the calls of its body").ok();
        let why = match op {
            _ if !args.variant.is_empty() => "no such variant is for it",
            Some(why) => why,
            None => "no op is named so",
        };
        return Err(format!("no kernel of `{}` for {of} was checked: {why}", args.only).into());
    }
    let failed = verdicts.iter().filter(|v| !v.passed()).count();
    report::line(&format!("{} kernel(s) of {of}, {failed} failed", verdicts.len()))?;
    if failed > 0 { Err(format!("{failed} kernel(s) are wrong").into()) } else { Ok(()) }
}

fn on_gpu(
    args: &Args,
    kernels: &Kernels,
    gpu: &std::sync::Arc<Gpu>,
) -> Result<Vec<KernelVerdict>, Box<dyn Error>> {
    let library = Library::new(args.data.as_deref());
    let cache = args.kernel_cache.as_deref().map_or_else(Cache::user, Cache::new);
    let (mut verdicts, mut printed) = (Vec::new(), Ok(()));
    let mut take = |verdict: KernelVerdict| {
        if printed.is_ok() && (args.verbose || !verdict.passed()) {
            printed = report::line(&verdict.to_string());
        }
        verdicts.push(verdict);
    };
    let wanted = Wanted { seed: args.seed, op: &args.only, variant: &args.variant };
    // Nothing stops a kernel that runs for ever but the end of its process.
    let stuck = |message: &str| {
        eprintln!("FAIL {message}");
        std::process::exit(1);
    };
    check::cuda::check(kernels, &library, gpu, &cache, wanted, &mut take, &stuck);
    printed?;
    summary(&verdicts)?;
    Ok(verdicts)
}

/// A line an op and element type: how many variants and cases, and the largest part of the allowed
/// error that one took.
fn summary(verdicts: &[KernelVerdict]) -> Outcome {
    let mut groups: BTreeMap<(&str, String), Vec<&KernelVerdict>> = BTreeMap::new();
    for verdict in verdicts {
        groups.entry((&verdict.op, verdict.dtype.to_string())).or_default().push(verdict);
    }
    for ((op, dtype), group) in groups {
        let variants: std::collections::BTreeSet<_> = group.iter().map(|v| &v.variant).collect();
        let compared = || group.iter().filter_map(|v| v.outcome.as_ref().ok());
        let worst = compared().map(|c| c.error).fold(0.0, f64::max);
        let of_bound = compared().map(|c| c.of_bound).fold(0.0, f64::max);
        let elements: u64 = compared().map(|c| c.elements).sum();
        let (cases, variants) = (group.len(), variants.len());
        let allowed = group[0].allowed;
        let failed = group.iter().filter(|v| !v.passed()).count();
        report::line(&format!(
            "{op} {dtype}: {variants} variant(s), {cases} case(s), {failed} failed, worst error \
             {worst:.2e} of {allowed:.2e}, of each of {elements} element(s) at most {of_bound:.2} of its \
             bound"
        ))?;
    }
    Ok(())
}

fn as_json(v: &KernelVerdict) -> serde_json::Value {
    let compared = v.outcome.as_ref().ok();
    json!({
        "op": v.op,
        "variant": v.variant,
        "dtype": v.dtype.name(),
        "case": v.case,
        "elements": compared.map_or(0, |c| c.elements),
        "error": compared.map(|c| c.error),
        "allowed": v.allowed,
        "element_error_of_bound": compared.map(|c| c.of_bound),
        "problem": v.outcome.as_ref().err(),
        "passed": v.passed(),
    })
}
