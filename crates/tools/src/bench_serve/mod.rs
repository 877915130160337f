//! `infernum bench serve`: how a server fares under many clients.

mod args;
mod client;
mod configuration;
mod drive;
mod error;
mod html;
mod load;
mod metrics;
mod plots;
mod record;
mod report;
mod server;
mod sse;
mod stats;
mod summary;
mod sweep;
mod wire;

pub(crate) use args::Args;
use drive::{connect, drive_one};
use report::Report;

use crate::report::Outcome;

pub(crate) fn run(args: &Args) -> Outcome {
    if !(args.ask.timeout > 0.0 && args.ask.timeout <= 1e6) {
        return Err("--timeout: expected a number of seconds above 0".into());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    raise_file_limit();
    let mut report = match &args.url {
        Some(url) => one_server(args, url, &runtime)?,
        None if args.matrix || args.sweep.is_some() => sweep::run(args, &runtime)?,
        None => {
            return Err("which server? --url URL, or --matrix or --sweep FILE to start some".into());
        }
    };
    report.compare_texts();
    report.print()?;
    let failed = report.failed();
    if let Some(path) = &args.html {
        write(path, html::page(&report)?.as_bytes())?;
    }
    if let Some(path) = &args.json {
        if !args.gaps {
            report.runs.iter_mut().flat_map(|r| &mut r.records).for_each(|r| r.gaps.clear());
        }
        write(path, &serde_json::to_vec(&report)?)?;
    }
    if failed > 0 { Err(format!("{failed} requests or servers failed").into()) } else { Ok(()) }
}

fn write(path: &std::path::Path, bytes: &[u8]) -> Outcome {
    Ok(std::fs::write(path, bytes).map_err(|e| format!("{}: {e}", path.display()))?)
}

/// Drives a server that runs already.
fn one_server(
    args: &Args,
    url: &str,
    runtime: &tokio::runtime::Runtime,
) -> Result<Report, Box<dyn std::error::Error>> {
    let loads = args.load.loads()?;
    let client = runtime.block_on(connect(&args.ask, url, &loads))?;
    let mut report = Report::new(args.title.clone(), &client.ask);
    for repeat in 0..args.repeats.unwrap_or(1) {
        for load in &loads {
            let mut run = drive_one(runtime, &client, &load.again(repeat));
            (run.configuration, run.repeat) = (client.ask.model.clone(), repeat);
            report::print_run(&run)?;
            report.runs.push(run);
        }
    }
    Ok(report)
}

/// Every stream is an open file, and the usual limit of 1024 is fewer than a server's clients.
#[cfg(unix)]
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // Where this is not allowed, connections beyond the limit fail and are reported.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

#[cfg(not(unix))]
fn raise_file_limit() {}
