//! `infernum compile`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

use infernum::{CPU, CacheSize, ModelOptions};
use infernum_codegen::compile::{self, CompileError, Compiled, Options};
use infernum_codegen::cuda::{Cache, Compiler, Device, Library, TunedFile, TunedVariants};
use infernum_codegen::{Limits, Plan};
use infernum_frontend_hf::{Checkpoint, LowerOptions, Model};
use infernum_ir::{Attr, Dims, Module, NodeKind, Sym, Type, nearest, text};
use infernum_passes::fuse::{Bucket, Prices};

use crate::page;
use crate::report::{self, Outcome};

/// The command line.
#[derive(clap::Args)]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag")]
pub struct Args {
    /// Print the IR that the plan is made of.
    #[arg(long)]
    dump_ir: bool,
    /// Print the IR after this step or pass; may be given several times.
    #[arg(long, value_name = "NAME")]
    dump_after: Vec<String>,
    /// Print the graphs in Graphviz's language.
    #[arg(long)]
    dump_dot: bool,
    /// Say what each rule did: where it fired, where a condition refused it, where it nearly
    /// matched, where it lost on cost. For a GPU's target: which variant each launch runs, and who says so.
    #[arg(long)]
    explain: bool,
    /// Write the explanation as one page: the graphs before and after fusion, side by side.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Whose costs decide: cpu, or a GPU's architecture (sm_75, sm_80, sm_86, sm_89, sm_90a, sm_100a; one
    /// without a table of costs has that of the one before it). With --out, what is compiled for it.
    #[arg(long, default_value = CPU)]
    target: String,
    /// The GPU, as its driver names it (see `infernum doctor`): the variants of kernels are used that were found to be
    /// the fastest on such a one, where that is known.
    #[arg(long, value_name = "NAME")]
    gpu: Option<String>,
    /// Most tokens in a step.
    #[arg(long, default_value_t = 128)]
    chunk: u64,
    /// Most sequences in a step.
    #[arg(long, default_value_t = 1)]
    sequences: u64,
    /// For a GPU's target: compile the kernels too, and write them and the plan to this folder. Needs
    /// NVRTC, but no GPU.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print the plan as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelOptions,
}

/// Compiles, and shows what was asked for.
pub fn run(args: &Args) -> Outcome {
    let default = if args.target == CPU { "default" } else { "cuda" };
    let (pipeline, kernels) = (args.model.pipeline(default)?, args.model.kernels()?);
    let names = compile::step_names(&pipeline);
    if let Some(unknown) = args.dump_after.iter().find(|n| !names.contains(&n.as_str())) {
        let hint = nearest(unknown, names.iter().copied());
        let known = names.join(", ");
        return Err(
            format!("--dump-after: there is no step `{unknown}`{hint}; known: {known}").into()
        );
    }
    let model = args.model.open_with_progress(&report::progress())?;
    let max_length = args.model.length(&model)?;
    let known = Device::named(&args.target);
    let (target, costs) = match &known {
        Some(device) => args.model.device_costs(device)?,
        None => (args.target.clone(), args.model.cost_table(&args.target)?),
    };
    if target != args.target {
        report::notice(&format!("no costs are known of {}: those of {target} decide", args.target));
    }
    let templates = Library::new(args.model.data.as_deref());
    let device = match (&args.out, known) {
        (Some(_), None) => {
            let names = Device::KNOWN.map(|(name, ..)| name).join(", ");
            let message =
                format!("--out: expected a GPU's --target ({names}), found {}", args.target);
            return Err(message.into());
        }
        (out, device) => device.filter(|_| out.is_some() || args.explain),
    };
    let tuned = args.gpu.as_ref().map(|name| TunedFile::shipped(name, args.model.data.as_deref()));
    let tuned = tuned.transpose()?.map_or_else(TunedVariants::default, TunedVariants::of);
    let adapters = args.model.lora.adapters()?;
    let options = Options {
        model: &model,
        lower: LowerOptions { dtype: args.model.dtype, max_length: Some(max_length), rows: Sym::B },
        pipeline: &pipeline,
        kernels: &kernels,
        costs: (&target, &costs),
        rules: None,
        adapters: adapters.as_ref(),
        kv_dtype: args.model.kv_dtype,
        explain: args.explain || args.html.is_some(),
        limits: Limits { chunk: args.chunk, sequences: args.sequences, max_length },
        templates: &templates,
        device: device.as_ref().map(|d| (d, &tuned)),
    };
    let (seen, compiled) = observed(args, &options, names.len());
    // What was dumped on the way is of use above all when a later step fails.
    for dump in &seen.dumps {
        report::text(dump)?;
    }
    let compiled = compiled?;
    compiled.warnings.iter().for_each(report::warning);
    if let Some(path) = &args.html {
        return write_page(path, &options, &seen.fused, &compiled);
    }
    if let (Some(out), Some(device)) = (&args.out, &device) {
        return write(out, &compiled.plan, device);
    }
    show(args, &model, &compiled, seen.dumps.is_empty())
}

/// Writes a plan and its kernels.
fn write(out: &Path, plan: &Plan, device: &Device) -> Outcome {
    let fail = |e: &dyn std::fmt::Display| format!("{}: {e}", out.display());
    std::fs::create_dir_all(out).map_err(|e| fail(&e))?;
    let cache = Cache::new(&out.join("cubins"));
    let (cubins, compiled) = cache.cubins(&plan.kernels, &device.arch, &mut Compiler::find)?;
    std::fs::write(out.join("plan.json"), serde_json::to_vec(plan)?).map_err(|e| fail(&e))?;
    let bytes: usize = cubins.iter().map(|c| c.0.len()).sum();
    report::line(&format!(
        "{}: plan.json and {} kernel(s) for {} ({compiled} compiled, {} KiB)",
        out.display(),
        cubins.len(),
        device.arch,
        bytes >> 10
    ))
}

/// What was seen on the way.
#[derive(Default)]
struct Observed {
    dumps: Vec<String>,
    /// For each bucket, the module before fusion and after the last pass.
    fused: Vec<(Module, Module)>,
}

fn write_page(
    path: &Path,
    options: &Options<'_>,
    fused: &[(Module, Module)],
    compiled: &Compiled,
) -> Outcome {
    let (target, costs) = options.costs;
    let context = options.pipeline.context;
    let prices: Vec<_> = (compiled.buckets.iter())
        .map(|b| {
            let prices = Prices::new(costs, target, b.bucket, context);
            move |op, operands: &[Option<&Type>], attrs: &[Attr], results: &[Type]| {
                prices.price(op, operands, attrs, results).us
            }
        })
        .collect();
    let fusions: Vec<page::Fusion<'_>> = (compiled.buckets.iter().zip(fused).zip(&prices))
        .map(|((b, (before, after)), cost)| page::Fusion {
            steps: steps_of(b.bucket),
            before,
            after,
            report: &b.report,
            cost,
        })
        .collect();
    let html = page::html(options.model.files.name(), target, &fusions)?;
    std::fs::write(path, html).map_err(|e| format!("{}: {e}", path.display()))?;
    report::line(&format!("wrote {}", path.display()))
}

/// Compiles, keeping the dumps and modules that are wanted.
fn observed(
    args: &Args,
    options: &Options<'_>,
    steps: usize,
) -> (Observed, Result<Compiled, CompileError>) {
    let wanted: BTreeSet<&str> = args.dump_after.iter().map(String::as_str).collect();
    let (mut seen, mut last, mut before) = (Observed::default(), None, None);
    let bar = report::steps_bar("compiling", steps as u64);
    let compiled = compile::compile(options, &mut |name, bucket, module| {
        bar.inc(1);
        if wanted.contains(name) {
            let bucket = bucket.map(|b| format!(", {}", steps_of(b))).unwrap_or_default();
            seen.dumps.push(format!("// after {name}{bucket}\n{}", text::print(module)));
        }
        if args.html.is_some() {
            match name {
                "fuse" => before = last.take(),
                "passes" => {
                    let before = before.take().unwrap_or_else(|| module.clone());
                    seen.fused.push((before, module.clone()));
                }
                _ => {}
            }
            last = Some(module.clone());
        }
    });
    bar.finish_and_clear();
    (seen, compiled)
}

fn show(args: &Args, model: &Model, compiled: &Compiled, nothing_dumped: bool) -> Outcome {
    let several = compiled.buckets.len() > 1;
    for b in &compiled.buckets {
        if several && (args.dump_ir || args.dump_dot || (args.explain && !args.json)) {
            report::line(&format!("// {}", steps_of(b.bucket)))?;
        }
        if args.dump_ir {
            report::text(&text::print(&b.module))?;
        }
        if args.dump_dot {
            report::text(&dot(&b.module)?)?;
        }
        if args.explain && !args.json {
            report::line(&b.report.coloured().to_string())?;
        }
    }
    if args.explain && !args.json && !compiled.choices.made.is_empty() {
        report::line("// kernels")?;
        compiled.choices.made.iter().try_for_each(|made| report::line(&made.to_string()))?;
        compiled.choices.dropped.iter().for_each(|dropped| report::notice(&dropped.to_string()));
    }
    if args.explain && args.json {
        let reports: Vec<_> = compiled.buckets.iter().map(|b| (b.bucket, &b.report)).collect();
        return report::json(&reports);
    }
    if args.json {
        return report::json(&compiled.plan);
    }
    if nothing_dumped && !args.dump_ir && !args.dump_dot && !args.explain {
        report::line(&compiled.plan.summary().to_string())?;
        if let Some(checkpoint) = &model.checkpoint {
            report::line(&container(checkpoint, &compiled.plan))?;
        }
        report::line(&CacheSize::of(&compiled.plan, args.chunk as usize).to_string())?;
    }
    Ok(())
}

/// Bytes of a unit of sizes.
const MIB: f64 = (1 << 20) as f64;

/// What the weights lie in, and how they are stored.
fn container(checkpoint: &Checkpoint, plan: &Plan) -> String {
    let format = checkpoint
        .gguf()
        .map_or("safetensors".to_owned(), |(gguf, _)| format!("GGUF version {}", gguf.version()));
    let mut kinds = BTreeMap::<String, (usize, u64)>::new();
    for ty in plan.tensors().into_values() {
        let kind = ty.encoding.as_ref().map_or(ty.dtype.to_string(), ToString::to_string);
        let (tensors, bytes) = kinds.entry(kind).or_default();
        (*tensors, *bytes) = (*tensors + 1, *bytes + ty.bytes(&Dims::default()));
    }
    let kinds: Vec<String> = kinds
        .into_iter()
        .map(|(kind, (tensors, bytes))| format!("{kind} {tensors} ({:.1} MiB)", bytes as f64 / MIB))
        .collect();
    format!("stored in {format}, {} file(s): {}", checkpoint.file_count(), kinds.join(", "))
}

/// The steps of a bucket, for people.
fn steps_of(bucket: Bucket) -> String {
    let Bucket { min, max, decode } = bucket;
    let kind = if decode { "decode, " } else { "" };
    if min == max {
        format!("{kind}{min} {}", if min == 1 { "token" } else { "tokens" })
    } else {
        format!("{kind}{min} to {max} tokens")
    }
}

/// Every graph of a module as one Graphviz digraph with a cluster each.
fn dot(module: &Module) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    writeln!(out, "digraph {:?} {{\n  node [shape=box, fontname=monospace];", module.name)?;
    for (g, graph) in module.graphs.iter().enumerate() {
        writeln!(out, "  subgraph cluster_{g} {{\n    label={:?};", graph.name)?;
        for (i, node) in graph.nodes() {
            let what = match &node.kind {
                NodeKind::Op { op, .. } => op.name,
                NodeKind::Param(_) => "param",
            };
            let types: Vec<String> = node.types.iter().map(ToString::to_string).collect();
            let label = format!("{what}\n%{}\n{}", node.names.join(", %"), types.join(", "));
            writeln!(out, "    g{g}n{i} [label={label:?}];")?;
            for from in graph.operands(i).into_iter().flatten() {
                writeln!(out, "    g{g}n{} -> g{g}n{i};", from.node)?;
            }
        }
        out.push_str("  }\n");
    }
    out.push_str("}\n");
    Ok(out)
}
