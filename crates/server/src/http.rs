//! Connections: accepted, bounded, and drained when the server is told to stop.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use axum::extract::Request;
use axum::http::{HeaderValue, Version, header};
use axum::response::Response;
use hyper::body::{Body as _, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use infernum_link::Stream;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tower::ServiceExt;

use super::app::{self, App};
use super::connections::{Connection, Connections, RESERVE, Watched};
use super::error::{ApiError, ErrorShape};
use super::exchange::Exchange;
use super::lanes::Client;
use super::listen::{Address, Listener};
use super::load::load_all;
use super::routes;
use super::tls::Tls;
use super::{Args, Source};
use crate::Outcome;

/// Open files besides connections: models, libraries, pipes.
const OTHER_FILES: usize = 256;
/// How often connections that take too long are looked for.
const SWEEP: Duration = Duration::from_secs(1);
/// How often it is looked whether all requests have ended.
const DRAIN_LOOK: Duration = Duration::from_millis(20);
/// Requests that one connection may have at once, by HTTP/2.
const STREAMS: u32 = 100;
/// Bytes of one request's body that may come before they are read, and of all of a connection, by HTTP/2.
const WINDOW: u32 = 64 << 10;
const WINDOWS: u32 = 1 << 20;

/// How long engines may take for the step under way, and to give their memory back.
const END_TIMEOUT: Duration = Duration::from_secs(20);

type Loaded = Result<Vec<JoinHandle<()>>, String>;

/// Listens, loads the models beside that, and serves until a signal has drained it.
pub(crate) async fn serve(args: &Arc<Args>, app: &Arc<App>, source: Source) -> Outcome {
    let mut signals = Signals::new()?;
    let most = most_connections(args.limits.max_connections.get());
    let connections = Connections::new(most);
    let server = Arc::new(Server {
        app: app.clone(),
        max_header: usize::try_from(args.limits.max_header_bytes).unwrap_or(usize::MAX),
        graceful: Mutex::new(Some(GracefulShutdown::new())),
        connections: connections.clone(),
    });
    let listening = listen(args, &server).await?;
    let mut loading = load(args, app, source);
    tokio::spawn(sweep(app.clone(), connections.clone()));
    let mut upkeep = tokio::time::interval(Duration::from_secs(5));
    let mut threads: Option<Vec<JoinHandle<()>>> = None;
    let mut failed = None;
    loop {
        tokio::select! {
            loaded = &mut loading, if threads.is_none() => {
                threads = Some(loaded.unwrap_or_else(|_| Err("loading panicked".to_owned()))?);
            }
            _ = upkeep.tick() => app.metrics.upkeep(),
            told = signals.next() => match told {
                Told::Reload => app.reload(args),
                Told::End(name) => {
                    tracing::info!(signal = name, "draining: no new requests are taken");
                    break;
                }
            },
            model = app.failure.wait() => {
                tracing::error!(model, "its engine panicked: draining, to be started anew");
                failed = Some(model.to_owned());
                break;
            }
        }
    }
    app.drain();
    let start = Instant::now();
    let limit = Duration::from_secs(args.limits.drain_timeout);
    let drained = async {
        // Until what runs has ended, whoever comes is told to go elsewhere.
        while app.is_busy() {
            tokio::time::sleep(DRAIN_LOOK).await;
        }
        drop(listening);
        connections.end_unheard();
        let graceful = server.graceful().take();
        if let Some(graceful) = graceful {
            graceful.shutdown().await;
        }
    };
    tokio::select! {
        () = drained => {
            tracing::info!(ms = start.elapsed().as_millis() as u64, "drained");
        }
        () = tokio::time::sleep(limit) => {
            tracing::warn!("--drain-timeout is over: what still runs is cut off");
        }
        name = signals.end() => {
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
    app.models().iter().filter_map(|m| m.served()).for_each(|model| model.worker.stop());
    let ended = tokio::task::spawn_blocking(|| threads.into_iter().try_for_each(JoinHandle::join));
    if tokio::time::timeout(END_TIMEOUT, ended).await.is_err() {
        tracing::warn!("an engine does not end");
    }
    if let Some(traces) = app.traces.clone() {
        // A panic of its thread was told.
        let _ = tokio::task::spawn_blocking(move || traces.close()).await;
    }
    match failed {
        None => Ok(()),
        // A panic leaves a device and its memory in a state that nobody knows, so another process
        // takes over instead of another engine in this one.
        Some(model) => Err(format!(
            "the engine of `{model}` panicked, which is a bug; the log says where. The server has \
             ended so that whatever supervises it can start it anew"
        )
        .into()),
    }
}

/// Takes connections until it is dropped.
struct Listening(Vec<AbortHandle>);

impl Drop for Listening {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

/// Listens wherever the options say.
async fn listen(
    args: &Args,
    server: &Arc<Server>,
) -> Result<Listening, Box<dyn std::error::Error>> {
    let app = &server.app;
    let (api, operation) = (app::router(app), app::operation_router(app));
    let metrics = args.listen.metrics_listen.iter().map(|at| (at.clone(), operation.clone(), None));
    let main = args.listen.addresses().into_iter().map(|at| {
        // A socket in the file system needs no encryption.
        let tls = app.tls.clone().filter(|_| matches!(at, Address::Tcp(_)));
        (at, api.clone(), tls)
    });
    let mut listening = Listening(Vec::new());
    let mut port = None;
    for (at, service, tls) in main.chain(metrics) {
        let listener = Listener::bind(&at).await?;
        let at = listener.address()?;
        match &at {
            Address::Tcp(address) => {
                port.get_or_insert(address.port());
                let scheme = if tls.is_some() { "https" } else { "http" };
                tracing::info!("listening on {scheme}://{at}");
            }
            Address::Unix(_) => tracing::info!("listening on {at}"),
        }
        let server = server.clone();
        let accepting = async move {
            loop {
                let (stream, client) = listener.accept().await;
                server.serve(stream, client, service.clone(), tls.clone());
            }
        };
        listening.0.push(tokio::spawn(accepting).abort_handle());
    }
    if let Some(path) = &args.listen.port_file {
        // 0 where there are sockets in the file system alone.
        write_port(path, port.unwrap_or(0)).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(listening)
}

/// The most connections, as far as files may be open.
fn most_connections(asked: usize) -> usize {
    let needed = asked.saturating_add(RESERVE + OTHER_FILES);
    let files = raise_file_limit(needed as u64);
    if files >= needed as u64 {
        return asked;
    }
    let most = (files as usize).saturating_sub(RESERVE + OTHER_FILES).max(1);
    tracing::warn!(
        open_files = files,
        connections = most,
        "fewer connections than --max-connections are taken: raise the limit of open files \
         (ulimit -n, LimitNOFILE=)"
    );
    most
}

/// Lets this process open so many files, or as many as it may; gives how many that are.
#[cfg(unix)]
fn raise_file_limit(needed: u64) -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let (now, most) = (current.unwrap_or(u64::MAX), maximum.unwrap_or(u64::MAX));
    let wanted = needed.min(most);
    if now >= wanted
        || setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }).is_err()
    {
        return now;
    }
    wanted
}

#[cfg(not(unix))]
fn raise_file_limit(_: u64) -> u64 {
    u64::MAX
}

/// Ends connections that take too long, again and again.
async fn sweep(app: Arc<App>, connections: Arc<Connections>) {
    let mut tick = tokio::time::interval(SWEEP);
    loop {
        tick.tick().await;
        for (reason, count) in connections.sweep(Instant::now()) {
            app.metrics.connections_ended(reason, count);
        }
        app.metrics.connections(connections.count());
    }
}

/// Loads the models on a thread of their own.
fn load(args: &Arc<Args>, app: &Arc<App>, source: Source) -> oneshot::Receiver<Loaded> {
    let (sender, receiver) = oneshot::channel();
    let (args, app) = (args.clone(), app.clone());
    let tasks = tokio::runtime::Handle::current();
    std::thread::spawn(move || {
        let spawn = |task| drop(tasks.spawn(task));
        let _ = sender.send(match source {
            Source::Here(models) => load_all(&models, &app, &args, &spawn),
            Source::Elsewhere(remote) => {
                remote.serve(&app, &args, &spawn);
                Ok(Vec::new())
            }
        });
    });
    receiver
}

struct Server {
    app: Arc<App>,
    max_header: usize,
    /// Tells connections to end; gone once it has.
    graceful: Mutex<Option<GracefulShutdown>>,
    connections: Arc<Connections>,
}

impl Server {
    fn graceful(&self) -> MutexGuard<'_, Option<GracefulShutdown>> {
        self.graceful.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(
        self: &Arc<Server>,
        stream: Box<dyn Stream>,
        client: Client,
        service: axum::Router,
        tls: Option<Arc<Tls>>,
    ) {
        let (connection, room) = self.connections.open();
        if let Some(phase) = room {
            self.app.metrics.connections_ended("room", 1);
            tracing::debug!(was = phase.name(), "a connection made room for another");
        }
        let server = self.clone();
        let Some(watcher) = self.graceful().as_ref().map(GracefulShutdown::watcher) else { return };
        tokio::spawn(async move {
            let stream = Watched::new(stream, connection.clone());
            let of = (client, service, watcher);
            tokio::select! {
                ended = server.converse(stream, &connection, of, tls) => {
                    if let Err(error) = ended {
                        tracing::debug!(error, "a connection ended");
                    }
                }
                () = connection.ended() => {}
            }
        });
    }

    /// Answers what comes on a connection, by whichever version of HTTP its client speaks.
    async fn converse(
        &self,
        stream: Watched,
        connection: &Arc<Connection>,
        (client, service, watcher): (Client, axum::Router, Watcher),
        tls: Option<Arc<Tls>>,
    ) -> Result<(), String> {
        let stream: Box<dyn Stream> = match tls {
            None => Box::new(stream),
            Some(tls) => Box::new(tls.accept(stream).await.map_err(|e| e.to_string())?),
        };
        let (of, app) = (connection.clone(), self.app.clone());
        let answered = service_fn(move |request: hyper::Request<Incoming>| {
            answer(app.clone(), service.clone(), of.clone(), client, request)
        });
        let protocol = self.protocol(connection.reserved);
        let served = protocol.serve_connection(TokioIo::new(stream), answered);
        watcher.watch(served).await.map_err(|e| e.to_string())
    }

    /// What is spoken on a connection. Time limits are those of its phases.
    fn protocol(&self, reserved: bool) -> auto::Builder<TokioExecutor> {
        let mut protocol = auto::Builder::new(TokioExecutor::new());
        protocol
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(None)
            .keep_alive(!reserved)
            .max_buf_size(self.max_header);
        protocol
            .http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(if reserved { 1 } else { STREAMS })
            .max_header_list_size(u32::try_from(self.max_header).unwrap_or(u32::MAX))
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOWS)
            .max_send_buf_size(WINDOW as usize);
        protocol
    }
}

/// Answers a request of a connection; one beyond the limit is only told how the server is.
async fn answer(
    app: Arc<App>,
    service: axum::Router,
    connection: Arc<Connection>,
    client: Client,
    request: hyper::Request<Incoming>,
) -> Result<Response, std::convert::Infallible> {
    let multiplexed = request.version() == Version::HTTP_2;
    if multiplexed {
        connection.multiplex();
    }
    let exchange = Exchange::begin(connection.clone(), !request.body().is_end_stream());
    let refused = connection.reserved || connection.is_crowded();
    let mut response = if refused && !routes::is_open(request.uri().path()) {
        let message = "the server has as many connections as it takes";
        let shape = ErrorShape::of(request.uri().path());
        ApiError::unavailable("too_many_connections", message, 1).told(shape)
    } else {
        let mut request: Request = request.map(axum::body::Body::new);
        request.extensions_mut().insert(client);
        request.extensions_mut().insert(exchange.reading());
        service.oneshot(request).await?
    };
    // HTTP/2 says so by a frame of its own.
    if (connection.reserved || app.draining()) && !multiplexed {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response.map(|body| exchange.answer(body)))
}

/// The port, in a file that is there whole or not at all.
fn write_port(path: &Path, port: u16) -> std::io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    std::fs::write(&temporary, format!("{port}\n"))?;
    std::fs::rename(&temporary, path)
}

/// What the server is told from outside.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    reload: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            reload: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Told {
        tokio::select! {
            _ = self.terminate.recv() => Told::End("SIGTERM"),
            _ = self.interrupt.recv() => Told::End("SIGINT"),
            _ = self.reload.recv() => Told::Reload,
        }
    }

    /// The next that tells it to stop.
    async fn end(&mut self) -> &'static str {
        loop {
            if let Told::End(name) = self.next().await {
                return name;
            }
        }
    }
}

enum Told {
    /// To stop, by the signal of this name.
    End(&'static str),
    /// To read keys and certificates again.
    Reload,
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::metrics::Metrics;

    #[tokio::test]
    async fn a_panicked_engine_ends_the_server_with_an_error() {
        let args = Arc::new(Args::given(&["--port", "0"]).expect("options"));
        let metrics = Metrics::new("infernum").expect("buckets");
        let app = Arc::new(App::new(&args, Vec::new(), metrics).expect("an app"));
        app.failure.tell("ember");
        let served = serve(&args, &app, Source::Here(Vec::new()));
        let ended = tokio::time::timeout(Duration::from_secs(60), served).await.expect("it ends");
        let message = ended.expect_err("not as if all were well").to_string();
        assert!(message.contains("`ember` panicked"), "{message}");
        assert!(app.draining());
    }
}
