//! `infernum check-templates`.

use std::collections::BTreeSet;
use std::path::PathBuf;

use infernum_codegen::cuda::{Compiler, Device, Library, Template, Unreached, unreached};
use infernum_passes::data::Kernels;
use infernum_runtime::check::cuda::{self, CompiledKernel, Extent};
use serde_json::json;

use crate::report::{self, Outcome};

/// The command line.
#[derive(clap::Args)]
#[allow(clippy::struct_excessive_bools, reason = "each is an option of the command line")]
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
    /// Each variant once in each template, and in one template alone with each kind, width, group size and type of scales that codes have.
    #[arg(long, conflicts_with = "all")]
    pairs: bool,
    /// Show the kernels that are fine too.
    #[arg(long)]
    verbose: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Compiles them; an error if one cannot be.
pub fn run(args: &Args) -> Outcome {
    infernum::check_data(args.data.as_deref())?;
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
        let extent = match (args.all, args.pairs) {
            (true, _) => Extent::All,
            (false, true) => Extent::Pairs,
            (false, false) => Extent::Once,
        };
        let options = (extent, args.only.as_str());
        all.extend(cuda::compile(&kernels, &library, &device, &compiler, options));
    }
    let templates = templates(&kernels, &library, &args.only);
    if all.is_empty() && templates.is_empty() {
        let message = "no op with a template is named so; does the op's file name its `template`?";
        return Err(format!("`{}`: {message}", args.only).into());
    }
    let unreached = unreached_variants(&templates);
    let untried = untried_variants(&templates, &all, &unreached);
    let never = unreached.iter().filter(|(_, u)| u.never).count();
    let failed = all.iter().filter(|k| !k.passed()).count() + never;
    if args.json {
        report::json(&json!({ "kernels": all, "unreached": unreached, "untried": untried }))?;
    } else {
        for (template, variant, when) in untried.iter().filter(|_| !args.only.is_empty()) {
            report::line(&format!(
                "note: not compiled {template}.{variant}: no call that is tried meets {when}"
            ))?;
        }
        for (template, Unreached { variant, reason, never }) in &unreached {
            let mark =
                if *never { "FAIL never chosen:" } else { "note: only a measurement chooses" };
            if *never || args.verbose || !args.only.is_empty() {
                report::line(&format!("{mark} {template}.{variant}: {reason}"))?;
            }
        }
        for (archs, k, found) in findings(&all, args.verbose) {
            let mark = if k.passed() { "ok  " } else { "FAIL" };
            let (archs, template) = (archs.join(", "), &k.template);
            let dot = if k.variant.is_empty() { "" } else { "." };
            report::line(&format!("{mark} {archs} {template}{dot}{}: {found}", k.variant))?;
        }
        let archs = wanted.len();
        report::line(&format!(
            "{} kernel(s) for {archs} architecture(s) compiled by {compiler:?}, {failed} failed",
            all.len()
        ))?;
    }
    if all.is_empty() && failed == 0 {
        return Err("no kernel was compiled: no call that is tried meets the conditions".into());
    }
    if failed > 0 { Err(format!("{failed} kernel(s) are wrong").into()) } else { Ok(()) }
}

/// What is to be said of each kernel, and of which architectures it is true; all kernels if `verbose`, else those
/// that failed.
fn findings(all: &[CompiledKernel], verbose: bool) -> Vec<(Vec<&str>, &CompiledKernel, String)> {
    let mut found: Vec<(Vec<&str>, &CompiledKernel, String)> = Vec::new();
    for k in all.iter().filter(|k| verbose || !k.passed()) {
        // The line above the compiler's own words names the architecture.
        let problem = k.problem.as_ref();
        let problem = problem.map(|p| p.replace(&format!(" for {}:\n", k.arch), ":\n"));
        let CompiledKernel { registers, spills, shared, .. } = k;
        let said = problem.unwrap_or_else(|| {
            format!("{registers} registers, {spills} bytes spilled, {shared} bytes shared")
        });
        let same = |(_, other, text): &&mut (Vec<&str>, &CompiledKernel, String)| {
            (&other.template, &other.variant, &**text) == (&k.template, &k.variant, said.as_str())
        };
        match found.iter_mut().find(same) {
            Some((archs, ..)) => archs.push(&k.arch),
            None => found.push((vec![&k.arch], k, said)),
        }
    }
    found
}

/// The templates of ops whose names contain `only`. That one is missing or malformed is a problem of its
/// kernels.
fn templates(kernels: &Kernels, library: &Library, only: &str) -> Vec<Template> {
    let named = kernels.ops.all().filter(|op| op.name.contains(only)).filter_map(|op| op.cuda);
    let names: BTreeSet<&str> = named.collect();
    names.into_iter().filter_map(|name| library.template(name).ok()).collect()
}

/// The variants that are never chosen, or not before something is measured, by template.
fn unreached_variants(templates: &[Template]) -> Vec<(String, Unreached)> {
    let all = templates.iter().flat_map(|t| unreached(t).into_iter().map(|u| (t.name.clone(), u)));
    all.collect()
}

/// The variants that might be chosen, and were for no call that was tried: template, variant and conditions.
fn untried_variants(
    templates: &[Template],
    compiled: &[CompiledKernel],
    unreached: &[(String, Unreached)],
) -> Vec<(String, String, String)> {
    let mut found = Vec::new();
    for template in templates {
        for variant in template.variants.iter().filter(|v| v.is_text()) {
            let is = |name: &str, other: &str| name == template.name && other == variant.name;
            let tried = compiled.iter().any(|k| is(&k.template, &k.variant))
                || unreached.iter().any(|(name, u)| u.never && is(name, &u.variant));
            // Another problem of the template is why.
            let broken = compiled.iter().any(|k| k.variant.is_empty());
            if !tried && !broken {
                let when: Vec<String> = variant.when.iter().map(|e| format!("`{e}`")).collect();
                found.push((template.name.clone(), variant.name.clone(), when.join(", ")));
            }
        }
    }
    found
}
