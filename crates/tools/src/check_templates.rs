//! `infernum check-templates`.

use std::collections::BTreeSet;
use std::path::PathBuf;

use infernum_codegen::cuda::{Compiler, Device, Library, TemplateError, Unreached, unreached};
use infernum_passes::data::Kernels;
use infernum_runtime::check::cuda;
use serde_json::json;

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
    /// Only ops whose names contain this.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    only: String,
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
        let options = (args.all, args.only.as_str());
        all.extend(cuda::compile(&kernels, &library, &device, &compiler, options));
    }
    let unreached = unreached_variants(&kernels, &library, &args.only)?;
    if all.is_empty() && unreached.is_empty() {
        let message = "no op with a template is named so; does the op's file name its `template`?";
        return Err(format!("`{}`: {message}", args.only).into());
    }
    let never = unreached.iter().filter(|(_, u)| u.never).count();
    let failed = all.iter().filter(|k| !k.passed()).count() + never;
    if args.json {
        report::json(&json!({ "kernels": all, "unreached": unreached }))?;
    } else {
        for (template, Unreached { variant, reason, never }) in &unreached {
            let mark =
                if *never { "FAIL never chosen:" } else { "note: only a measurement chooses" };
            if *never || args.verbose || !args.only.is_empty() {
                report::line(&format!("{mark} {template}.{variant}: {reason}"))?;
            }
        }
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

/// The variants that are never chosen, or not before something is measured, by template.
fn unreached_variants(
    kernels: &Kernels,
    library: &Library,
    only: &str,
) -> Result<Vec<(String, Unreached)>, TemplateError> {
    let named = kernels.ops.all().filter(|op| op.name.contains(only)).filter_map(|op| op.cuda);
    let templates: BTreeSet<&str> = named.collect();
    let mut found = Vec::new();
    for name in templates {
        match library.template(name) {
            Ok(template) => {
                found.extend(unreached(&template).into_iter().map(|u| (name.to_owned(), u)));
            }
            // An op may name a template that is for no kernel of ours: it runs as its body.
            Err(TemplateError::Missing { .. }) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(found)
}
