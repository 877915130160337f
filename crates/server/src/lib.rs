//! `infernum serve`: a server with the APIs of OpenAI, Anthropic and Ollama over [`infernum`].
//!
//! A request's way: `app` (limits, keys) → `api` (JSON, checks, tokens, on threads of `lanes`) → `worker` (which
//! engine) → `infernum-link` (its thread, here or in another process) → `generation` (tokens to text) → JSON, or `sse` where it streams.

mod adapters;
mod api;
mod app;
mod auth;
mod budget;
mod commands;
mod config;
mod connections;
pub mod engine;
mod error;
mod exchange;
mod generation;
mod guard;
mod http;
mod lanes;
mod limits;
mod listen;
mod load;
mod log;
mod maker;
mod metrics;
mod model;
mod outbox;
mod rehearsal;
mod remote;
mod routes;
mod sse;
mod status;
mod text;
mod tls;
mod traces;
mod vectors;
mod worker;

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args as _, FromArgMatches as _};
use infernum::{CompileOptions, RunOptions, named};
use infernum_link::Address as EngineAddress;
use infernum_runtime::{Batching, EngineOptions, KvMode, Policy};

use app::App;
use listen::Address;
use model::{Entry, NamedModel};

pub use config::layered;
#[doc(hidden)]
pub use rehearsal::Rehearsal;

/// What serving ends with.
pub type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Options of how an engine is made, beside those of passes. With one of another process they would change nothing.
const MADE_ELSEWHERE: [&str; 9] = [
    "EngineArgs",
    "AdapterArgs",
    "LoraOptions",
    "RunOptions",
    "CacheOptions",
    "random_weights",
    "no_tune_products",
    "dtype",
    "max_length",
];

/// Every option can also be given as INFERNUM_OPTION_NAME in the environment, or as `option-name`
/// in the file that --config names; the command line goes first, then the environment.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Model to serve: a folder in Hugging Face format or a GGUF file, named as it is, or a model of the Hugging Face hub, as
    /// ORG/NAME, ORG/NAME@REVISION or ORG/NAME:Q4_K_M. NAME= before it names it.
    /// Repeat for several; the built-in demo model, `ember`, when left out.
    #[arg(long = "model", value_name = "[NAME=]DIR|ORG/NAME", value_parser = NamedModel::parse)]
    models: Vec<NamedModel>,
    /// Ask an engine of another process, which `infernum engine` runs, instead of running one: ipc:///PATH or tcp://HOST:PORT.
    /// Repeat for several, of one model or of different ones. A model's files are opened where its engine did, or at --model: a
    /// single one is that of all engines, of several each is that of the engines that have its name.
    #[arg(long = "engine", value_name = "ADDRESS", conflicts_with_all = MADE_ELSEWHERE, conflicts_with_all = infernum::PASS_OPTIONS)]
    engines: Vec<EngineAddress>,
    #[command(flatten)]
    link: engine::LinkArgs,
    /// TOML file with options: `port = 8000`, `model = ["a=DIR", "b=DIR"]`, …
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    listen: ListenArgs,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    host: HostArgs,
    #[command(flatten)]
    adapters: adapters::AdapterArgs,
    #[command(flatten)]
    traces: traces::TraceArgs,
    #[command(flatten)]
    log: log::LogArgs,
    /// Names of metrics: infernum:… or, for tools made for it, vllm:….
    #[arg(long, value_name = "NAMES", default_value = "infernum",
          value_parser = ["infernum", "vllm"])]
    metrics_compat: String,
}

impl Args {
    /// Options as the command line has them, and nothing from elsewhere.
    pub(crate) fn given(words: &[&str]) -> Result<Args, clap::Error> {
        let command = Args::augment_args(clap::Command::new("serve")).no_binary_name(true);
        Args::from_arg_matches(&command.try_get_matches_from(words)?)
    }
}

/// How an engine is made, wherever it is asked from.
#[derive(clap::Args, Clone, Debug)]
struct HostArgs {
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    compile: CompileOptions,
    #[command(flatten)]
    run: RunOptions,
    /// Fill the weights with random numbers, to measure speed where there is only a config.json and a
    /// tokenizer.
    #[arg(long)]
    random_weights: bool,
    /// Run the first algorithm that cuBLASLt names for each product of matrices: the same in every
    /// process, where the fastest may differ.
    #[arg(long)]
    no_tune_products: bool,
}

/// Where it listens, and to whom.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Listening")]
struct ListenArgs {
    /// Address to listen on; 0.0.0.0 for all.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: std::net::IpAddr,
    /// Port to listen on; 0 for any that is free.
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Where to listen instead of --host and --port: ADDRESS:PORT, or unix:PATH for a socket in the file system. Repeat for several.
    #[arg(long, value_name = "ADDRESS")]
    listen: Vec<Address>,
    /// Address with a port, or unix:PATH, where /metrics, /health, /livez and /readyz are answered as well, without a key.
    #[arg(long, value_name = "ADDRESS")]
    metrics_listen: Option<Address>,
    /// PEM file of the certificate, and of those that vouch for it: encrypts all connections but those of --metrics-listen
    /// and of sockets in the file system. Read again at SIGHUP.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// PEM file of the certificate's private key.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// File that the port is written to once it listens.
    #[arg(long, value_name = "FILE")]
    port_file: Option<PathBuf>,
    /// Key that requests must bring, as `Authorization: Bearer KEY` or `x-api-key: KEY`. Repeat for
    /// several; each has a prefix cache of its own.
    #[arg(long, value_name = "KEY")]
    api_key: Vec<String>,
    /// File with one key a line, behind which may stand what it may use in a minute: `KEY requests=60 tokens=100000`. Lines that
    /// begin with # are comments. Read again at SIGHUP.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Name that the server may be called by, beside localhost and its address, where it listens to
    /// this machine alone and asks for no key. Repeat for several.
    #[arg(long, value_name = "NAME")]
    allowed_host: Vec<String>,
    /// Origin whose pages may call the server from a browser, or * for all. Repeat for several.
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<String>,
}

impl ListenArgs {
    /// Where the API is.
    fn addresses(&self) -> Vec<Address> {
        if self.listen.is_empty() {
            return vec![Address::Tcp(SocketAddr::new(self.host, self.port))];
        }
        self.listen.clone()
    }
}

/// What one client, or all of them, may take.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Limits")]
struct LimitArgs {
    /// Requests that may wait; more are answered 429.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    queue: usize,
    /// Largest body of a request.
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20)]
    max_body_bytes: usize,
    /// Largest head of a request; at most twice that is read.
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 10,
          value_parser = clap::value_parser!(u64).range(8192..))]
    max_header_bytes: u64,
    /// Connections open at once. For one more, the one that has been idle longest makes room.
    #[arg(long, value_name = "N", default_value_t = NonZeroUsize::new(8192).unwrap_or(NonZeroUsize::MIN))]
    max_connections: NonZeroUsize,
    /// Bytes of a request's output that may wait to be read; a request with more is ended.
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 20,
          value_parser = clap::value_parser!(u64).range(4096..))]
    max_unread_bytes: u64,
    /// Responses of `/v1/responses` that are kept for each API key; the oldest make room.
    #[arg(long, value_name = "N", default_value_t = 4096)]
    max_responses: usize,
    /// Bytes of them, with the conversations that they end.
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20)]
    max_response_bytes: usize,
    /// Seconds that a request may take; 0 for no limit.
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    request_timeout: u64,
    /// Seconds that running requests get to end after SIGTERM.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    drain_timeout: u64,
}

impl LimitArgs {
    fn unread(&self) -> usize {
        usize::try_from(self.max_unread_bytes).unwrap_or(usize::MAX)
    }
}

/// How requests share the machine.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Scheduling")]
struct EngineArgs {
    /// Who goes first: fcfs, prefill_first, decode_round_robin or priority.
    #[arg(long, default_value = "fcfs", value_parser = named::<Policy>)]
    policy: Policy,
    /// Which requests run together: continuous, static or none.
    #[arg(long, default_value = "continuous", value_parser = named::<Batching>)]
    batching: Batching,
    /// How the KV cache is handed out: paged, contiguous or off.
    #[arg(long, default_value = "paged", value_parser = named::<KvMode>)]
    kv: KvMode,
    /// Compute every prompt anew, even if one before it began the same.
    #[arg(long)]
    no_prefix_cache: bool,
    /// Schedule a step only when the one before it has ended.
    #[arg(long)]
    no_ahead: bool,
    /// Most requests that run together; 256 on a GPU and 32 on the CPU when left out.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    max_sequences: Option<usize>,
    /// Blocks of the KV cache; what fits a GPU, or up to 1 GiB on the CPU, when left out.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    kv_blocks: Option<usize>,
    /// Tokens that the KV cache holds, instead of blocks.
    #[arg(long, value_name = "N", value_parser = at_least_one, conflicts_with = "kv_blocks")]
    kv_tokens: Option<usize>,
}

impl EngineArgs {
    fn options(&self, sequences: usize) -> EngineOptions {
        EngineOptions {
            policy: self.policy,
            batching: self.batching,
            kv: self.kv,
            prefix_cache: !self.no_prefix_cache,
            ahead: !self.no_ahead,
            max_running: sequences,
            ..EngineOptions::default()
        }
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("expected at least 1".to_owned()),
        Ok(n) => Ok(n),
        Err(e) => Err(format!("expected a whole number: {e}")),
    }
}

/// Serves until a signal ends it.
pub fn run(args: Args) -> Outcome {
    args.log.init()?;
    args.host.engine.options(1).check()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        // Threads that take tasks over while one is busy: more of them than cores only fight.
        .max_blocking_threads(std::thread::available_parallelism().map_or(4, NonZeroUsize::get))
        .build()?;
    let source = source(&args, &runtime)?;
    let args = Arc::new(args);
    let prefix = if args.metrics_compat == "vllm" { "vllm" } else { "infernum" };
    let entries = source.entries().collect();
    let app = Arc::new(App::new(&args, entries, metrics::Metrics::new(prefix)?)?);
    let outcome = runtime.block_on(http::serve(&args, &app, source));
    // Tasks that are left are dropped, and their requests cancelled with them.
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome
}

/// Where the engines are.
enum Source {
    /// Here, of these models.
    Here(Vec<NamedModel>),
    /// In other processes.
    Elsewhere(Box<remote::Remote>),
}

impl Source {
    fn entries(&self) -> Box<dyn Iterator<Item = Entry> + '_> {
        match self {
            Source::Here(models) => Box::new(models.iter().map(|model| Entry::new(&model.name))),
            Source::Elsewhere(remote) => Box::new(remote.entries()),
        }
    }
}

fn source(
    args: &Args,
    runtime: &tokio::runtime::Runtime,
) -> Result<Source, Box<dyn std::error::Error>> {
    if !args.engines.is_empty() {
        return Ok(Source::Elsewhere(Box::new(runtime.block_on(remote::Remote::find(args))?)));
    }
    let models =
        if args.models.is_empty() { vec![NamedModel::demo()] } else { args.models.clone() };
    for (i, model) in models.iter().enumerate() {
        if models[..i].iter().any(|m| m.name == model.name) {
            return Err(
                format!("two models are named `{}`: use --model NAME=DIR", model.name).into()
            );
        }
    }
    args.adapters.check(&models)?;
    Ok(Source::Here(models))
}
