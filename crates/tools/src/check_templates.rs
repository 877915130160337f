//! `infernum check-templates`.

use std::path::PathBuf;

use infernum_codegen::cuda::{Compiler, Device, Library};
use infernum_passes::data::Kernels;
use infernum_runtime::check::cuda;

use crate::report::{self, Outcome};

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    /// Folder whose kernels/ overrides and adds to the built-in files.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Architectures to compile for; all that are known when left out.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    arch: Vec<String>,
    /// In every element type and size that is tried, and not each variant once.
    #[arg(long)]
    all: bool,
    /// Show the kernels that are fine too.
    #[arg(long)]
    verbose: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Compiles them; an error if one cannot be.
pub fn run(args: &Args) -> Outcome {
    let kernels = Kernels::load(args.data.as_deref(), &[])?;
    let library = Library::new(args.data.as_deref());
    let known = Device::KNOWN.map(|(name, ..)| name.to_owned());
    let wanted = if args.arch.is_empty() { &known[..] } else { &args.arch };
    let compiler = Compiler::find()?;
    let mut all = Vec::new();
    for arch in wanted {
        let device = Device::named(arch).ok_or_else(|| {
            format!("--arch: expected one of {}, found `{arch}`", known.join(", "))
        })?;
        all.extend(cuda::compile(&kernels.ops, &library, &device, &compiler, args.all));
    }
    let failed = all.iter().filter(|k| !k.passed()).count();
    if args.json {
        report::json(&all)?;
    } else {
        for k in all.iter().filter(|k| args.verbose || !k.passed()) {
            let mark = if k.passed() { "ok  " } else { "FAIL" };
            let (arch, template, variant) = (&k.arch, &k.template, &k.variant);
            let found = k.problem.clone().unwrap_or_else(|| {
                format!(
                    "{} registers, {} bytes spilled, {} bytes shared",
                    k.registers, k.spills, k.shared
                )
            });
            report::line(&format!("{mark} {arch} {template}.{variant}: {found}"))?;
        }
        report::line(&format!(
            "{} kernel(s) compiled by {compiler:?}, {failed} failed",
            all.len()
        ))?;
    }
    if failed > 0 { Err(format!("{failed} kernel(s) are wrong").into()) } else { Ok(()) }
}
