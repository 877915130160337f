//! The `infernum` command.

mod commands;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use infernum_server as server;
use infernum_tools::{self as tools, report};

/// The C library's allocator keeps what a crowd of connections took; this one gives most of it back,
/// without huge pages, which stay as long as any part of them is in use.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// An LLM inference engine that works like a compiler.
#[derive(Parser)]
#[command(name = "infernum", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Commands whose options may stand in the environment and in a file, too.
const LAYERED: [&str; 2] = ["serve", "engine"];

#[derive(Subcommand)]
enum Command {
    /// Serve models to OpenAI clients.
    Serve(Box<server::Args>),
    /// Run an engine that front ends of other processes ask.
    Engine(Box<server::engine::Args>),
    /// Generate text, or chat.
    Generate(commands::generate::Args),
    /// Turn texts into vectors, or score them.
    Embed(commands::embed::Args),
    /// Compile a model and show the IR and the plan.
    Compile(tools::compile::Args),
    /// Measure what each rewrite rule buys: all but one, and one alone.
    Ablate(tools::ablate::Args),
    /// Hold each fused op's kernel against the op's meaning.
    CheckKernels(tools::check_kernels::Args),
    /// Hold encodings of weights against their files, and what the CPU decodes against both, on random bytes.
    CheckEncodings(tools::check_encodings::Args),
    /// Compile the CUDA kernels of all templates; needs NVRTC, but no GPU.
    CheckTemplates(tools::check_templates::Args),
    /// Run requests alone and in crowds, and compare what they get bit by bit.
    CheckReproducible(tools::check_reproducible::Args),
    /// Try rewrite rules: both sides on random sizes, attributes and operands.
    CheckRules(tools::check_rules::Args),
    /// List how weights may be stored: number formats of checkpoints, and where they come from.
    Encodings(tools::encodings::Args),
    /// Show what specs, fused ops, rules and kernels may say: ops, expressions, fields, blocks.
    Ops(tools::ops::Args),
    /// Find the first layer, and the op in it, that departs from what transformers computed.
    Diff(tools::diff::Args),
    /// Write the logits of a token sequence to a file.
    Logits(tools::logits::Args),
    /// Measure how well a model predicts a text.
    Perplexity(tools::perplexity::Args),
    /// Store the matrices of a model's layers in an encoding.
    Quantise(tools::quantise::Args),
    /// Texts to token ids, and back.
    Tokenize(tools::tokenize::Args),
    /// Measure prefill and decode speed.
    Bench(tools::bench::Args),
    /// Measure many requests together, without a server.
    BenchEngine(tools::bench_engine::Args),
    /// Find out which kernels are fastest on this GPU.
    Tune(tools::tune::Args),
    /// Ask a running server whether it is ready.
    Health(tools::health::Args),
    /// List the model families.
    Families(commands::families::Args),
    /// Show what this machine has.
    Doctor(commands::doctor::Args),
}

/// The command line; `serve` and `engine` also read the environment and a file. Exits where they are wrong.
fn parse() -> Cli {
    let variable = |name: &str| std::env::var(name).ok();
    let mut command = Cli::command();
    let matches = server::layered(&command, &LAYERED, std::env::args_os().collect(), &variable);
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
        Command::Serve(args) => server::run(*args),
        Command::Engine(args) => server::engine::run(*args),
        Command::Generate(args) => commands::generate::run(&args),
        Command::Embed(args) => commands::embed::run(&args),
        Command::Compile(args) => tools::compile::run(&args),
        Command::Ablate(args) => tools::ablate::run(&args),
        Command::CheckKernels(args) => tools::check_kernels::run(&args),
        Command::CheckEncodings(args) => tools::check_encodings::run(&args),
        Command::CheckTemplates(args) => tools::check_templates::run(&args),
        Command::CheckReproducible(args) => tools::check_reproducible::run(&args),
        Command::CheckRules(args) => tools::check_rules::run(&args),
        Command::Encodings(args) => tools::encodings::run(&args),
        Command::Ops(args) => tools::ops::run(&args),
        Command::Diff(args) => tools::diff::run(&args),
        Command::Logits(args) => tools::logits::run(&args),
        Command::Perplexity(args) => tools::perplexity::run(&args),
        Command::Quantise(args) => tools::quantise::run(&args),
        Command::Tokenize(args) => tools::tokenize::run(&args),
        Command::Bench(args) => tools::bench::run(&args),
        Command::BenchEngine(args) => tools::bench_engine::run(&args),
        Command::Tune(args) => tools::tune::run(&args),
        Command::Health(args) => tools::health::run(&args),
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
