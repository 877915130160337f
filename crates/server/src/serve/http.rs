//! Connections: accepted, bounded, and drained when the server is told to stop.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::Args;
use super::app::{self, App};
use super::model::{Entry, NamedModel, load_all};
use crate::Outcome;

/// How long a client may take for the head of a request, and stay idle between requests.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);

/// How long engines may take for the step under way, and to give their memory back.
const END_TIMEOUT: Duration = Duration::from_secs(20);

type Loaded = Result<Vec<JoinHandle<()>>, String>;

/// Listens, loads the models beside that, and serves until a signal has drained it.
pub(crate) async fn serve(
    args: &Arc<Args>,
    app: &Arc<App>,
    models: Vec<NamedModel>,
    address: SocketAddr,
) -> Outcome {
    let listener = TcpListener::bind(address)
        .await
        .map_err(|e| format!("cannot listen on {address}: {e}; choose another --port or --host"))?;
    let address = listener.local_addr()?;
    if let Some(path) = &args.listen.port_file {
        write_port(path, address.port()).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    tracing::info!("listening on http://{address}");
    let mut signals = Signals::new()?;
    let mut loading = load(args, app, models);
    let graceful = GracefulShutdown::new();
    let permits =
        Arc::new(Semaphore::new(args.limits.max_connections.get().min(Semaphore::MAX_PERMITS)));
    let connections = Connections {
        service: app::router(app),
        max_header: usize::try_from(args.limits.max_header_bytes).unwrap_or(usize::MAX),
        graceful,
    };
    let mut upkeep = tokio::time::interval(Duration::from_secs(5));
    let mut threads: Option<Vec<JoinHandle<()>>> = None;
    loop {
        tokio::select! {
            accepted = accept(&listener, &permits) => connections.serve(accepted),
            loaded = &mut loading, if threads.is_none() => {
                threads = Some(loaded.unwrap_or_else(|_| Err("loading panicked".to_owned()))?);
            }
            _ = upkeep.tick() => app.metrics.upkeep(),
            name = signals.next() => {
                tracing::info!(signal = name, "draining: no new requests are taken");
                break;
            }
        }
    }
    drop(listener);
    app.drain();
    let start = Instant::now();
    let limit = Duration::from_secs(args.limits.drain_timeout);
    tokio::select! {
        () = connections.graceful.shutdown() => {
            tracing::info!(ms = start.elapsed().as_millis() as u64, "drained");
        }
        () = tokio::time::sleep(limit) => {
            tracing::warn!("--drain-timeout is over: what still runs is cut off");
        }
        name = signals.next() => {
            tracing::warn!(signal = name, "a second signal: what still runs is cut off");
            std::process::exit(1);
        }
    }
    // A GPU is left in order: engines end before the process does.
    let threads = match threads {
        Some(threads) => threads,
        None => match tokio::time::timeout(limit, loading).await {
            Ok(Ok(Ok(threads))) => threads,
            _ => Vec::new(), // it is on its way out anyway
        },
    };
    app.models.iter().filter_map(Entry::served).for_each(|model| model.worker.stop());
    let ended = tokio::task::spawn_blocking(|| threads.into_iter().try_for_each(JoinHandle::join));
    if tokio::time::timeout(END_TIMEOUT, ended).await.is_err() {
        tracing::warn!("an engine does not end");
    }
    Ok(())
}

/// Loads the models on a thread of their own.
fn load(args: &Arc<Args>, app: &Arc<App>, models: Vec<NamedModel>) -> oneshot::Receiver<Loaded> {
    let (sender, receiver) = oneshot::channel();
    let (args, app) = (args.clone(), app.clone());
    let tasks = tokio::runtime::Handle::current();
    std::thread::spawn(move || {
        let deliver = |outbox: super::outbox::Outbox, metrics| {
            tasks.spawn(outbox.deliver(metrics));
        };
        let _ = sender.send(load_all(&models, &app.models, &args, &app.metrics, &deliver));
    });
    receiver
}

/// The next connection, when there is room for one.
async fn accept(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
) -> (TcpStream, OwnedSemaphorePermit) {
    loop {
        let Ok(permit) = permits.clone().acquire_owned().await else {
            std::future::pending().await // never closed
        };
        match listener.accept().await {
            Ok((stream, _)) => return (stream, permit),
            Err(error) => {
                // Most often too many open files: wait for some to close.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

struct Connections {
    service: axum::Router,
    max_header: usize,
    graceful: GracefulShutdown,
}

impl Connections {
    fn serve(&self, (stream, permit): (TcpStream, OwnedSemaphorePermit)) {
        // Tokens are small and must not wait for each other.
        let _ = stream.set_nodelay(true);
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(self.max_header)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(self.service.clone()));
        let connection = self.graceful.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection ended");
            }
            drop(permit);
        });
    }
}

/// The port, in a file that is there whole or not at all.
fn write_port(path: &Path, port: u16) -> std::io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    std::fs::write(&temporary, format!("{port}\n"))?;
    std::fs::rename(&temporary, path)
}

/// What tells the server to stop.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
