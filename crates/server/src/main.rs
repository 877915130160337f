//! The `infernum` command.

mod args;
mod commands;
mod page;
mod report;
mod serve;
mod session;
mod svg;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// An LLM inference engine that works like a compiler.
#[derive(Parser)]
#[command(name = "infernum", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve models to OpenAI clients.
    Serve(Box<serve::Args>),
    /// Generate text, or chat.
    Generate(commands::generate::Args),
    /// Compile a model and show the IR and the plan.
    Compile(commands::compile::Args),
    /// Measure what each rewrite rule buys: all but one, and one alone.
    Ablate(commands::ablate::Args),
    /// Hold each fused op's kernel against the op's meaning.
    CheckKernels(commands::check_kernels::Args),
    /// Compile the CUDA kernels of all templates; needs NVRTC, but no GPU.
    CheckTemplates(commands::check_templates::Args),
    /// Try rewrite rules: both sides on random sizes, attributes and operands.
    CheckRules(commands::check_rules::Args),
    /// Write the logits of a token sequence to a file.
    Logits(commands::logits::Args),
    /// Measure prefill and decode speed.
    Bench(commands::bench::Args),
    /// Measure many requests together, without a server.
    BenchEngine(commands::bench_engine::Args),
    /// Find out which kernels are fastest on this GPU.
    Tune(commands::tune::Args),
    /// Ask a running server whether it is ready.
    Health(commands::health::Args),
    /// List the model families.
    Families(commands::families::Args),
    /// Show what this machine has.
    Doctor(commands::doctor::Args),
}

/// The command line; `serve` also reads the environment and a file. Exits where they are wrong.
fn parse() -> Cli {
    let variable = |name: &str| std::env::var(name).ok();
    let mut command = Cli::command();
    let matches = serve::layered(&command, "serve", std::env::args_os().collect(), &variable);
    let cli = matches.and_then(|m| Ok(Cli::from_arg_matches(&m)?));
    cli.unwrap_or_else(|error| match error.downcast::<clap::Error>() {
        Ok(error) => error.format(&mut command).exit(),
        Err(error) => {
            report::error(&*error);
            std::process::exit(2)
        }
    })
}

fn main() -> ExitCode {
    let result = match parse().command {
        Command::Serve(args) => serve::run(*args),
        Command::Generate(args) => commands::generate::run(&args),
        Command::Compile(args) => commands::compile::run(&args),
        Command::Ablate(args) => commands::ablate::run(&args),
        Command::CheckKernels(args) => commands::check_kernels::run(&args),
        Command::CheckTemplates(args) => commands::check_templates::run(&args),
        Command::CheckRules(args) => commands::check_rules::run(&args),
        Command::Logits(args) => commands::logits::run(&args),
        Command::Bench(args) => commands::bench::run(&args),
        Command::BenchEngine(args) => commands::bench_engine::run(&args),
        Command::Tune(args) => commands::tune::run(&args),
        Command::Health(args) => commands::health::run(&args),
        Command::Families(args) => commands::families::run(&args),
        Command::Doctor(args) => commands::doctor::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // A reader that went away (`| head`) is no failure.
        Err(e) if report::is_broken_pipe(&*e) => ExitCode::SUCCESS,
        Err(e) => {
            report::error(&*e);
            ExitCode::FAILURE
        }
    }
}
