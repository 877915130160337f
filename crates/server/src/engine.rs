//! `infernum engine`: an engine for front ends in other processes.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use infernum_link::host::{Host, Listener};
use infernum_link::{Address, Handle, Offer, Secret, handshake};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;

use super::adapters::AdapterArgs;
use super::load::{Loaded, start};
use super::model::NamedModel;
use super::remote::{RemoteError, digest};
use super::{HostArgs, Outcome, log};

/// Threads that wait for grammars.
const WAITING: usize = 8;
/// How often it is looked whether all requests have ended.
const DRAIN_LOOK: Duration = Duration::from_millis(20);
/// How long reports get to leave.
const LAST_WORDS: Duration = Duration::from_millis(100);
/// Bytes of a request beside its prompt: a grammar, and texts around it.
const REQUEST: usize = 2 << 20;
/// Bytes of a token at most, as messages have them.
const TOKEN: usize = 5;

/// An engine without a server: `infernum serve --engine ADDRESS` asks it, from one process or several. Every option can also be
/// given as INFERNUM_OPTION_NAME in the environment, or as `option-name` in the file that --config names; the command line goes
/// first, then the environment.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Model to run: a folder in Hugging Face format or a GGUF file, named as it is, or a model of the Hugging Face hub, as
    /// ORG/NAME, ORG/NAME@REVISION or ORG/NAME:Q4_K_M. NAME= before it names it. The built-in demo model when left out.
    #[arg(long, value_name = "[NAME=]DIR|ORG/NAME", value_parser = NamedModel::parse)]
    model: Option<NamedModel>,
    /// Where front ends find it: ipc:///PATH, a socket that its owner alone may use, or tcp://HOST:PORT. Others than this machine
    /// need --engine-secret.
    #[arg(long, value_name = "ADDRESS")]
    listen: Address,
    #[command(flatten)]
    link: LinkArgs,
    /// TOML file with options: `listen = "ipc:///run/infernum/engine"`, `model = "a=DIR"`, …
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Requests of one front end that may wait.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    queue: usize,
    /// Seconds that running requests get to end after SIGTERM.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    drain_timeout: u64,
    #[command(flatten)]
    host: HostArgs,
    #[command(flatten)]
    adapters: AdapterArgs,
    #[command(flatten)]
    log: log::LogArgs,
}

/// How engines and front ends of other processes meet.
#[derive(clap::Args, Debug)]
pub(crate) struct LinkArgs {
    /// File with a secret of at least 16 bytes that engine and front ends share; needed where others than this machine can
    /// connect. It proves who is there; what is said is not encrypted.
    #[arg(long, value_name = "FILE", env = "INFERNUM_ENGINE_SECRET")]
    engine_secret: Option<PathBuf>,
    /// Seconds after which a silent engine, or front end, counts as dead.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(3..))]
    engine_timeout: u64,
}

impl LinkArgs {
    /// The secret, if there is one.
    pub(crate) fn secret(&self) -> Result<Option<Secret>, RemoteError> {
        let Some(path) = &self.engine_secret else { return Ok(None) };
        let wrong =
            |message: String| RemoteError::Secret { path: path.display().to_string(), message };
        let text = std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
        let secret = Secret::new(&text);
        secret.map(Some).ok_or_else(|| {
            wrong("expected at least 16 bytes, such as `openssl rand -hex 32` writes".to_owned())
        })
    }

    pub(crate) fn silence(&self) -> Duration {
        Duration::from_secs(self.engine_timeout)
    }
}

/// Runs an engine until a signal ends it.
pub fn run(args: Args) -> Outcome {
    args.log.init()?;
    args.host.engine.options(1).check()?;
    let secret = args.link.secret()?;
    let named = args.model.unwrap_or_else(NamedModel::demo);
    args.adapters.check(std::slice::from_ref(&named))?;
    // One thread talks to all: what it does for a step is little, and another thread would be woken for it each time.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .max_blocking_threads(WAITING)
        .enable_all()
        .build()?;
    // Before the model loads: an address that cannot be had is told at once.
    let listener = runtime
        .block_on(Listener::bind(&args.listen, secret.as_ref()))
        .map_err(|e| format!("cannot listen on {}: {e}", args.listen))?;
    let panicked = Arc::new(Notify::new());
    let failed = panicked.clone();
    let how = (&args.host, &args.adapters);
    let (loaded, thread) = start(&named, how, args.queue, move || failed.notify_one())?;
    let Loaded { frontend, facts, handle } = loaded;
    let most_bytes = u32::try_from(facts.max_length * TOKEN + REQUEST).unwrap_or(u32::MAX);
    let host = Host {
        handle: handle.clone(),
        secret,
        silence: args.link.silence(),
        grammars: frontend.task().generates().then(|| frontend.grammars().clone()),
        offer: Offer {
            instance: handshake::instance()?,
            name: named.name.clone(),
            model: place(&named),
            digest: digest(&frontend)?,
            facts,
            most_bytes,
        },
    };
    drop(frontend);
    let drain = Duration::from_secs(args.drain_timeout);
    let ended = runtime.block_on(async {
        tracing::info!("listening on {}", listener.address()?);
        tokio::spawn(Arc::new(host).serve(listener));
        tokio::select! {
            ended = until_told(&handle, drain) => ended,
            () = panicked.notified() => Err(format!(
                "the engine of `{}` panicked, which is a bug; the log says where. It has ended so that whatever \
                 supervises it can start it anew",
                named.name
            )
            .into()),
        }
    });
    handle.stop();
    // A GPU is left in order: the engine ends before the process does.
    let _ = thread.join(); // what it panicked with was told
    runtime.shutdown_timeout(Duration::from_secs(1));
    ended
}

/// Waits for a signal, and then until no request is left, or for so long.
async fn until_told(handle: &Handle, drain: Duration) -> Outcome {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("draining: no new requests are taken");
    handle.drain();
    let idle = async {
        loop {
            tokio::time::sleep(DRAIN_LOOK).await;
            let stats = handle.standing().stats;
            if stats.running + stats.waiting == 0 {
                // What was told last is still on its way.
                return tokio::time::sleep(LAST_WORDS).await;
            }
        }
    };
    tokio::select! {
        () = idle => {}
        () = tokio::time::sleep(drain) => {
            tracing::warn!("--drain-timeout is over: what still runs is cut off");
        }
        _ = terminate.recv() => tracing::warn!("a second signal: what still runs is cut off"),
        _ = interrupt.recv() => tracing::warn!("a second signal: what still runs is cut off"),
    }
    Ok(())
}

/// Where a front end on this machine finds the model, from whatever folder it is started in.
fn place(named: &NamedModel) -> Option<String> {
    let folder = named.folder.as_ref()?;
    let full = folder.canonicalize().unwrap_or_else(|_| folder.clone());
    Some(full.to_string_lossy().into_owned())
}
