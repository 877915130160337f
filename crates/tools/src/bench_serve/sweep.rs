//! Drives one server after another, each configured in its own way.

use std::error::Error;
use std::path::Path;

use serde::Deserialize;
use tokio::runtime::Runtime;

use super::args::Args;
use super::configuration::{Configuration, Failure};
use super::drive::{connect, drive_one};
use super::load::{Load, LoadArgs};
use super::report::Report;
use super::server::Server;
use super::summary::Run;
use super::wire::Ask;
use crate::report as terminal;

/// Servers to hold against each other.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Sweep {
    /// Flags of every `infernum serve`.
    #[serde(default)]
    serve: Vec<String>,
    /// Measured repetitions.
    repeats: Option<u32>,
    configuration: Vec<Configuration>,
    /// Loads; the command line's when there are none.
    #[serde(default)]
    load: Vec<LoadArgs>,
}

/// What each way to batch, to keep the KV cache and to schedule is called, and its flags.
const MATRIX: [(&str, &str); 11] = [
    ("no KV cache", "--batching none --kv off --no-prefix-cache --no-ahead"),
    ("one at a time", "--batching none --kv contiguous --no-prefix-cache"),
    ("static contiguous", "--batching static --kv contiguous --no-prefix-cache"),
    ("static paged", "--batching static --no-prefix-cache"),
    ("continuous contiguous", "--kv contiguous --no-prefix-cache"),
    ("continuous paged", "--no-prefix-cache"),
    ("paged + prefix cache", ""),
    ("prefill first", "--policy prefill_first"),
    ("decode round robin", "--policy decode_round_robin"),
    ("priority", "--policy priority"),
    ("not ahead", "--no-ahead"),
];

impl Sweep {
    fn read(path: &Path) -> Result<Sweep, Box<dyn Error>> {
        let shown = path.display();
        let text = std::fs::read_to_string(path).map_err(|e| format!("{shown}: {e}"))?;
        Ok(toml::from_str(&text).map_err(|e| format!("{shown}: {e}"))?)
    }

    fn matrix() -> Sweep {
        let configuration = |(name, flags): (&str, &str)| Configuration {
            name: name.to_owned(),
            serve: flags.split_whitespace().map(str::to_owned).collect(),
            command: Vec::new(),
        };
        let configuration = MATRIX.map(configuration).to_vec();
        Sweep { serve: Vec::new(), repeats: None, configuration, load: Vec::new() }
    }
}

/// The configurations that are wanted, and what they are driven with.
fn prepare(args: &Args) -> Result<(Sweep, Vec<Load>), Box<dyn Error>> {
    let mut sweep = args.sweep.as_deref().map_or_else(|| Ok(Sweep::matrix()), Sweep::read)?;
    let wanted = |c: &Configuration| {
        args.only.is_empty() || args.only.iter().any(|text| c.name.contains(text))
    };
    sweep.configuration.retain(wanted);
    if sweep.configuration.is_empty() {
        return Err("--only: no configuration has such a name".into());
    }
    if sweep.load.is_empty() {
        sweep.load.push(args.load.clone());
    }
    let mut loads = Vec::new();
    for load in &sweep.load {
        loads.extend(load.loads()?);
    }
    Ok((sweep, loads))
}

/// Starts and drives each configuration in turn, as often as asked for.
pub(super) fn run(args: &Args, runtime: &Runtime) -> Result<Report, Box<dyn Error>> {
    let (sweep, loads) = prepare(args)?;
    let program = args.program.clone().map_or_else(std::env::current_exe, Ok)?;
    let mut report: Option<Report> = None;
    let mut failures = Vec::new();
    for repeat in 0..args.repeats.or(sweep.repeats).unwrap_or(1) {
        for configuration in &sweep.configuration {
            let command = configuration.command(&program, &[&sweep.serve, &args.serve]);
            let name = &configuration.name;
            let mut fail = |reason: String| {
                terminal::error(&*Box::<dyn Error>::from(format!("{name}: {reason}")));
                failures.push(Failure { configuration: name.clone(), reason });
            };
            let driven = match drive(args, runtime, &command, &loads, repeat) {
                Ok(driven) => driven,
                Err(reason) => {
                    fail(reason.to_string());
                    continue;
                }
            };
            driven.ended.unwrap_or_else(fail);
            let report = report.get_or_insert_with(|| Report::new(args.title.clone(), &driven.ask));
            for mut run in driven.runs {
                run.configuration.clone_from(name);
                progress(&run);
                report.runs.push(run);
            }
        }
    }
    let mut report = report.ok_or("no server could be driven")?;
    (report.failures, report.configurations) = (failures, sweep.configuration);
    report.serve = [sweep.serve, args.serve.clone()].concat();
    Ok(report)
}

/// What became of a server.
struct Driven {
    runs: Vec<Run>,
    ask: Ask,
    /// Whether it ended well, when asked to.
    ended: Result<(), String>,
}

/// Starts a server, drives it with every load, and stops it.
fn drive(
    args: &Args,
    runtime: &Runtime,
    command: &[String],
    loads: &[Load],
    repeat: u32,
) -> Result<Driven, Box<dyn Error>> {
    let server = Server::start(command, runtime)?;
    let client = runtime.block_on(connect(&args.ask, &server.url, loads))?;
    let mut runs = Vec::with_capacity(loads.len());
    for load in loads {
        let mut run = drive_one(runtime, &client, &load.again(repeat));
        run.repeat = repeat;
        run.figures.server_peak_bytes = server.peak_memory();
        runs.push(run);
    }
    let ask = client.ask.clone();
    // Its connections would keep a draining server up; the runtime drops them with their tasks.
    drop(client);
    runtime.block_on(tokio::task::yield_now());
    Ok(Driven { runs, ask, ended: server.stop() })
}

/// A line for each run, on standard error: a sweep takes long.
fn progress(run: &Run) {
    let f = &run.figures;
    anstream::eprintln!(
        "{} · {} · {} ok in {:.1} s, {:.1} output tok/s",
        run.configuration,
        run.load.name(),
        f.ok,
        f.seconds,
        f.output_tokens_per_second
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_names_servers_and_loads() {
        let text = r#"
            serve = ["--max-sequences", "32"]
            repeats = 3
            [[configuration]]
            name = "paged"
            serve = ["--kv", "paged"]
            [[configuration]]
            name = "another"
            command = ["vllm", "serve", "--port", "{port}"]
            [[load]]
            workload = "w3"
            concurrency = [16, 32]
            output = "8-16"
            input = 4
        "#;
        let sweep: Sweep = toml::from_str(text).expect("a sweep");
        let command = sweep.configuration[0].command(Path::new("infernum"), &[&sweep.serve]);
        assert_eq!(
            command,
            ["infernum", "serve", "--port", "{port}", "--max-sequences", "32", "--kv", "paged"]
        );
        assert_eq!(sweep.configuration[1].command(Path::new("infernum"), &[])[0], "vllm");
        let loads = sweep.load[0].loads().expect("loads");
        assert_eq!(loads[1].name(), "w3, 32 at a time");
        assert_eq!(
            (loads[0].input.to_string(), loads[0].output.to_string()),
            ("4".into(), "8–16".into())
        );
        let error =
            toml::from_str::<Sweep>(&text.replace("workload", "worklaod")).expect_err("a typo");
        assert!(error.to_string().contains("worklaod"), "{error}");
    }
}
