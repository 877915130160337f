//! Connections: accepted, bounded, and drained when the server is told to stop.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use axum::extract::Request;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tower::ServiceExt;

use super::Args;
use super::app::{self, App};
use super::connections::{Answer, Connection, Connections, RESERVE, Watched};
use super::error::{ApiError, ErrorShape};
use super::lanes::Client;
use super::model::{Entry, NamedModel, load_all};
use super::routes;
use crate::Outcome;

/// Open files besides connections: models, libraries, pipes.
const OTHER_FILES: usize = 256;
/// Bytes of answers that wait in the kernel for each connection beyond what is on its way.
const UNSENT: u32 = 64 << 10;
/// How often connections that take too long are looked for.
const SWEEP: Duration = Duration::from_secs(1);

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
    let server = Server {
        app: app.clone(),
        service: app::router(app),
        max_header: usize::try_from(args.limits.max_header_bytes).unwrap_or(usize::MAX),
        graceful: GracefulShutdown::new(),
        connections: Connections::new(most_connections(args.limits.max_connections.get())),
    };
    tokio::spawn(sweep(app.clone(), server.connections.clone()));
    let mut upkeep = tokio::time::interval(Duration::from_secs(5));
    let mut threads: Option<Vec<JoinHandle<()>>> = None;
    let mut failed = None;
    loop {
        tokio::select! {
            (stream, address) = accept(&listener) => server.serve(stream, address),
            loaded = &mut loading, if threads.is_none() => {
                threads = Some(loaded.unwrap_or_else(|_| Err("loading panicked".to_owned()))?);
            }
            _ = upkeep.tick() => app.metrics.upkeep(),
            name = signals.next() => {
                tracing::info!(signal = name, "draining: no new requests are taken");
                break;
            }
            model = app.failure.wait() => {
                tracing::error!(model, "its engine panicked: draining, to be started anew");
                failed = Some(model.to_owned());
                break;
            }
        }
    }
    drop(listener);
    app.drain();
    server.connections.end_unheard();
    let start = Instant::now();
    let limit = Duration::from_secs(args.limits.drain_timeout);
    tokio::select! {
        () = server.graceful.shutdown() => {
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
        for (phase, count) in connections.sweep(Instant::now()) {
            app.metrics.connections_ended(phase.name(), count);
        }
        app.metrics.connections(connections.count());
    }
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
        let _ = sender.send(load_all(&models, &app, &args, &deliver));
    });
    receiver
}

/// The next connection.
async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) => {
                // Most often too many open files: wait for some to close.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

struct Server {
    app: Arc<App>,
    service: axum::Router,
    max_header: usize,
    graceful: GracefulShutdown,
    connections: Arc<Connections>,
}

impl Server {
    fn serve(&self, stream: TcpStream, address: SocketAddr) {
        let (connection, room) = self.connections.open();
        if let Some(phase) = room {
            self.app.metrics.connections_ended("room", 1);
            tracing::debug!(was = phase.name(), "a connection made room for another");
        }
        let socket = socket2::SockRef::from(&stream);
        // Tokens are small and must not wait for each other.
        let _ = socket.set_tcp_nodelay(true);
        // What a client does not read waits where it is counted, not in the kernel.
        #[cfg(target_os = "linux")]
        let _ = socket.set_tcp_notsent_lowat(UNSENT);
        let client = Client::at(address.ip());
        let (service, of) = (self.service.clone(), connection.clone());
        let answered = service_fn(move |request: hyper::Request<Incoming>| {
            answer(service.clone(), of.clone(), client, request)
        });
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(None) // connections have a time for each phase
            .keep_alive(!connection.reserved)
            .max_buf_size(self.max_header)
            .serve_connection(TokioIo::new(Watched::new(stream, connection.clone())), answered);
        let served = self.graceful.watch(served);
        tokio::spawn(async move {
            tokio::select! {
                ended = served => if let Err(error) = ended {
                    tracing::debug!(%error, "a connection ended");
                },
                () = connection.ended() => {}
            }
        });
    }
}

/// Answers a request of a connection; one beyond the limit is only told how the server is.
async fn answer(
    service: axum::Router,
    connection: Arc<Connection>,
    client: Client,
    request: hyper::Request<Incoming>,
) -> Result<Response, std::convert::Infallible> {
    connection.asked(!request.body().is_end_stream());
    let response = if connection.reserved && !routes::is_open(request.uri().path()) {
        let message = "the server has as many connections as it takes";
        let shape = ErrorShape::of(request.uri().path());
        let mut response = ApiError::unavailable("too_many_connections", message, 1).told(shape);
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        response
    } else {
        let mut request: Request = request.map(axum::body::Body::new);
        request.extensions_mut().insert(client);
        request.extensions_mut().insert(connection.clone());
        service.oneshot(request).await?
    };
    Ok(response.map(|body| Answer::body(body, connection)))
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

#[cfg(test)]
mod tests {

    use super::*;
    use crate::metrics::Metrics;

    #[tokio::test]
    async fn a_panicked_engine_ends_the_server_with_an_error() {
        let args = Arc::new(Args::given(&[]).expect("options"));
        let metrics = Metrics::new("infernum").expect("buckets");
        let app = Arc::new(App::new(&args, Vec::new(), metrics).expect("an app"));
        app.failure.tell("ember");
        let served = serve(&args, &app, Vec::new(), ([127, 0, 0, 1], 0).into());
        let ended = tokio::time::timeout(Duration::from_secs(60), served).await.expect("it ends");
        let message = ended.expect_err("not as if all were well").to_string();
        assert!(message.contains("`ember` panicked"), "{message}");
        assert!(app.draining());
    }
}
