//! `infernum bench serve`: how a server fares under many clients.

mod client;
mod drive;
mod html;
mod load;
mod metrics;
mod plots;
mod record;
mod report;
mod rng;
mod server;
mod sse;
mod stats;
mod summary;
mod sweep;
mod wire;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::report as terminal;
use crate::report::Outcome;
use client::Client;
use load::{Load, LoadArgs};
use report::Report;
use summary::Run;
use wire::{Ask, Endpoint, PromptKind};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The server, as http://HOST:PORT.
    #[arg(long, value_name = "URL", conflicts_with_all = ["sweep", "matrix"])]
    url: Option<String>,
    /// Start a server for each configuration of a TOML file (see bench/README.md), one after the other.
    #[arg(long, value_name = "FILE", conflicts_with = "matrix")]
    sweep: Option<PathBuf>,
    /// Start `infernum serve` once with each way to batch, to keep the KV cache and to schedule.
    #[arg(long)]
    matrix: bool,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    ask: AskArgs,
    /// Measured repetitions; configurations take turns, and the median counts.
    #[arg(long, value_name = "N")]
    repeats: Option<u32>,
    /// Another build of `infernum` to start; this one when left out.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Only configurations whose names hold one of these texts.
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    only: Vec<String>,
    /// Write settings, figures and every request as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Keep the time between all pieces of text in the JSON.
    #[arg(long, requires = "json")]
    gaps: bool,
    /// Write a page with tables and plots.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// What the page is about.
    #[arg(long, value_name = "TEXT")]
    title: Option<String>,
    /// Flags for every `infernum serve` that is started.
    #[arg(last = true, value_name = "SERVE FLAGS")]
    serve: Vec<String>,
}

/// How requests are put.
#[derive(clap::Args, Clone)]
struct AskArgs {
    /// Name of the model; the first that the server lists when left out.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// The server's key.
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    #[arg(long, value_enum, default_value_t = Endpoint::Completions)]
    endpoint: Endpoint,
    /// How prompts are given; ids where the server takes them when left out.
    #[arg(long, value_enum)]
    prompt: Option<PromptKind>,
    /// Token ids are random below this.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    vocab: u32,
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f64,
    /// Ask for whole answers, not streams.
    #[arg(long)]
    no_stream: bool,
    /// Do not ask the server to go on after an end-of-text token.
    #[arg(long)]
    stop_at_eos: bool,
    /// Send a refused request again up to so often, when the server says (Retry-After).
    #[arg(long, value_name = "N", default_value_t = 0)]
    retry: u32,
    /// Longest time that a request may take.
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0)]
    timeout: f64,
}

/// Why a server could not be driven, or a request failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub(crate) enum Error {
    #[error("{name}: expected {expected}, found {found}")]
    Load { name: &'static str, expected: String, found: String },
    #[error("--url: expected http://HOST:PORT, found `{found}`")]
    Url { found: String },
    #[error("{url}/v1/models lists no model (status {status}): name one with --model")]
    NoModel { url: String, status: u16 },
    #[error(
        "{load} comes to {needed} tokens, and the model takes {limit}: make lengths shorter (--scale, \
         --input, --output)"
    )]
    TooLong { load: String, needed: u32, limit: u32 },
    #[error("the server refused a request of one token, before the measurement: {message}")]
    Probe { status: Option<u16>, message: String },
    #[error("cannot connect")]
    Connect(#[source] hyper_util::client::legacy::Error),
    #[error("no valid request")]
    Request(#[source] hyper::http::Error),
    #[error("the stream broke off")]
    Stream(#[source] hyper::Error),
    #[error("the answer broke off")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the stream ended after {pieces} pieces of text, without [DONE]")]
    Cut { pieces: u32 },
    #[error("an event of the stream is longer than {limit} bytes")]
    LongEvent { limit: usize },
    #[error("no JSON of a completion: `{found}`")]
    Json { found: String, source: serde_json::Error },
    #[error("{message}")]
    Status { message: String },
    #[error("error in the stream: {message}")]
    Failed { message: String },
    #[error("no end after {seconds} s")]
    Timeout { seconds: f64 },
}

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

fn drive_one(runtime: &tokio::runtime::Runtime, client: &Arc<Client>, load: &Load) -> Run {
    let bar = terminal::steps_bar("requests", u64::from(load.requests));
    let run = runtime.block_on(drive::measure(client, load, &bar));
    bar.finish_and_clear();
    run
}

/// A client of the server, and how it takes prompts.
async fn connect(args: &AskArgs, url: &str, loads: &[Load]) -> Result<Arc<Client>, Error> {
    let chat = args.endpoint == Endpoint::Chat;
    if chat && args.prompt == Some(PromptKind::Ids) {
        let (name, expected) = ("--prompt", "text, for chat".to_owned());
        return Err(Error::Load { name, expected, found: "ids".to_owned() });
    }
    let ask = Ask {
        model: args.model.clone().unwrap_or_default(),
        endpoint: args.endpoint,
        prompt: args.prompt.unwrap_or(if chat { PromptKind::Text } else { PromptKind::Ids }),
        vocab: args.vocab,
        stream: !args.no_stream,
        ignore_eos: !args.stop_at_eos,
        temperature: args.temperature,
    };
    let mut client = Client::new(url, args.api_key.clone(), ask)?;
    client.timeout = Duration::from_secs_f64(args.timeout);
    client.retries = args.retry;
    let model = client.model(args.model.as_deref()).await?;
    (client.ask.model, client.max_length) = (model.id, model.max_model_len);
    let too_long = |l: &&Load| client.max_length.is_some_and(|limit| l.longest() > limit);
    if let Some((load, limit)) = loads.iter().find(too_long).zip(client.max_length) {
        return Err(Error::TooLong { load: load.name(), needed: load.longest(), limit });
    }
    let mut told = drive::probe(&client).await;
    let refused = matches!(told, Err(Error::Probe { status: Some(400 | 422), .. }));
    if refused && args.prompt.is_none() && !chat {
        client.ask.prompt = PromptKind::Text;
        told = drive::probe(&client).await;
    }
    told.map(|()| Arc::new(client))
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
