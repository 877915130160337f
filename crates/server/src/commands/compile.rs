//! `infernum compile`.

use std::collections::BTreeSet;
use std::fmt::Write;

use infernum_codegen::compile::{self, Options};
use infernum_codegen::{Limits, TargetKind};
use infernum_frontend_hf::{LowerOptions, Model};
use infernum_ir::{Module, NodeKind, Sym, nearest, text};

use crate::args::ModelArgs;
use crate::report::{self, Outcome};

#[derive(clap::Args)]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag")]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Print the IR that the plan is made of.
    #[arg(long)]
    dump_ir: bool,
    /// Print the IR after this step or pass; may be given several times.
    #[arg(long, value_name = "NAME")]
    dump_after: Vec<String>,
    /// Print the graphs in Graphviz's language.
    #[arg(long)]
    dump_dot: bool,
    /// Need no checkpoint: weights take the element type of the activations.
    #[arg(long)]
    config_only: bool,
    /// Most tokens in a step.
    #[arg(long, default_value_t = 128)]
    chunk: u64,
    /// Most sequences in a step.
    #[arg(long, default_value_t = 1)]
    sequences: u64,
    /// Print the plan as JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let pipeline = args.model.pipeline()?;
    let names = compile::step_names(&pipeline);
    if let Some(unknown) = args.dump_after.iter().find(|n| !names.contains(&n.as_str())) {
        let hint = nearest(unknown, names.iter().copied());
        let known = names.join(", ");
        return Err(
            format!("--dump-after: there is no step `{unknown}`{hint}; known: {known}").into()
        );
    }
    let model = if args.config_only {
        let (files, library) = (args.model.files()?, args.model.library());
        Model::without_weights(files, args.model.spec.as_deref(), &library)?
    } else {
        args.model.open()?
    };
    let max_length = args.model.length(&model)?;
    let options = Options {
        model: &model,
        lower: LowerOptions { dtype: args.model.dtype, max_length: Some(max_length), rows: Sym::B },
        pipeline: &pipeline,
        target: TargetKind::Cpu,
        limits: Limits { chunk: args.chunk, sequences: args.sequences, max_length },
    };
    let wanted: BTreeSet<&str> = args.dump_after.iter().map(String::as_str).collect();
    let mut dumps = Vec::new();
    let bar = report::steps_bar("compiling", names.len() as u64);
    let compiled = compile::compile(&options, &mut |name, module| {
        bar.inc(1);
        if wanted.contains(name) {
            dumps.push(format!("// after {name}\n{}", text::print(module)));
        }
    });
    bar.finish_and_clear();
    // What was dumped on the way is of use above all when a later step fails.
    for dump in &dumps {
        report::text(dump)?;
    }
    let compiled = compiled?;
    if args.dump_ir {
        report::text(&text::print(&compiled.module))?;
    }
    if args.dump_dot {
        report::text(&dot(&compiled.module)?)?;
    }
    if args.json {
        return report::json(&compiled.plan);
    }
    if dumps.is_empty() && !args.dump_ir && !args.dump_dot {
        report::line(&compiled.plan.summary().to_string())?;
    }
    Ok(())
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
