//! Traces: for each request a span, with children for its time in the queue, its prompt and its tokens, for a collector of
//! OpenTelemetry. Spans are made when a request has ended, of what was measured anyway, and sent by a thread of their own.

mod context;
#[cfg(feature = "otlp")]
mod otlp;

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use axum::http::HeaderMap;
use metrics::Counter;

use context::Parent;

/// Requests whose spans may wait to be sent; of more, none are made.
const QUEUE: usize = 2048;
/// Requests that are sent together, and how long the first of them waits for others.
const BATCH: usize = 256;
const PAUSE: Duration = Duration::from_secs(1);
/// How long what is left may take to be sent when the server ends.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Where traces go.
#[derive(clap::Args, Debug, Default)]
#[command(next_help_heading = "Traces")]
pub(crate) struct TraceArgs {
    /// Collector of OpenTelemetry that spans of requests are sent to, by OTLP over HTTP (`http://localhost:4318`); also
    /// OTEL_EXPORTER_OTLP_ENDPOINT. OTEL_SERVICE_NAME and OTEL_EXPORTER_OTLP_HEADERS say what goes with them. Needs a build with the feature `otlp`.
    #[arg(long, value_name = "URL")]
    #[cfg_attr(feature = "otlp", arg(env = "OTEL_EXPORTER_OTLP_ENDPOINT"))]
    otlp_endpoint: Option<String>,
}

/// Why there are no traces.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TraceError {
    #[cfg(not(feature = "otlp"))]
    #[error(
        "--otlp-endpoint: this build sends no traces: build it with `--features infernum-cli/otlp`"
    )]
    NotBuilt,
    #[cfg(feature = "otlp")]
    #[error(
        "--otlp-endpoint: expected the URL of a collector, such as http://localhost:4318, found `{url}`: {message}"
    )]
    Endpoint { url: String, message: String },
    #[error("cannot start a thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// Sends what is known of requests.
trait Export: Send {
    /// Sends a batch, and waits for it; an error says why it is lost.
    fn export(&mut self, batch: &[Record]) -> Result<(), String>;
}

/// What is known of a request that has ended.
#[derive(Default)]
#[cfg_attr(not(feature = "otlp"), allow(dead_code, reason = "what reads it is not built"))]
pub(crate) struct Ended {
    pub(crate) request_id: String,
    pub(crate) model: String,
    pub(crate) prompt: usize,
    pub(crate) cached: usize,
    pub(crate) completion: usize,
    /// How long it took from its arrival on, until its first step, its first token, and its end.
    pub(crate) queued: Option<Duration>,
    pub(crate) to_first: Option<Duration>,
    pub(crate) in_all: Duration,
    /// Why each choice ended.
    pub(crate) finish: Vec<&'static str>,
    pub(crate) error: Option<String>,
}

/// The same, with its place in a trace.
#[cfg_attr(not(feature = "otlp"), allow(dead_code, reason = "what reads it is not built"))]
struct Record {
    parent: Option<Parent>,
    operation: &'static str,
    end: SystemTime,
    ended: Ended,
}

/// Takes what is known of requests, without waiting.
pub(crate) struct Traces {
    queue: Mutex<Option<SyncSender<Record>>>,
    /// Ends with the thread.
    done: Mutex<Receiver<()>>,
    dropped: Counter,
}

tokio::task_local! {
    /// The trace that the request is part of which this task answers.
    static CURRENT: Span;
}

/// The trace of a request under way.
#[derive(Clone)]
pub(crate) struct Span {
    traces: Arc<Traces>,
    parent: Option<Parent>,
    operation: &'static str,
}

/// The trace of what this task answers; none where there are none.
pub(crate) fn current() -> Option<Span> {
    CURRENT.try_with(Clone::clone).ok()
}

impl Span {
    /// The request has ended, now.
    pub(crate) fn end(self, ended: Ended) {
        let Span { traces, parent, operation } = self;
        traces.take(Record { parent, operation, end: SystemTime::now(), ended });
    }
}

impl Traces {
    /// Traces to where the options say; none where they say nothing. `dropped` counts requests whose spans are lost.
    pub(crate) fn start(
        args: &TraceArgs,
        dropped: Counter,
    ) -> Result<Option<Arc<Traces>>, TraceError> {
        let Some(endpoint) = args.otlp_endpoint.as_deref().filter(|url| !url.is_empty()) else {
            return Ok(None);
        };
        let exporter = exporter(endpoint)?;
        tracing::info!(endpoint, "requests are traced");
        Ok(Some(Traces::through(exporter, dropped)?))
    }

    fn through(exporter: Box<dyn Export>, dropped: Counter) -> Result<Arc<Traces>, TraceError> {
        let (queue, ended) = sync_channel(QUEUE);
        let (running, done) = sync_channel(0);
        let lost = dropped.clone();
        let thread = std::thread::Builder::new().name("traces".to_owned());
        thread.spawn(move || {
            send(&ended, exporter, &lost);
            drop(running);
        })?;
        let (queue, done) = (Mutex::new(Some(queue)), Mutex::new(done));
        Ok(Arc::new(Traces { queue, done, dropped }))
    }

    /// Answers a request as part of the trace that its headers name; without one where they say that it is not recorded.
    pub(crate) async fn follow<F: Future>(
        self: &Arc<Traces>,
        headers: &HeaderMap,
        path: &str,
        answer: F,
    ) -> F::Output {
        let parent = Parent::of(headers);
        if parent.as_ref().is_some_and(|parent| !parent.sampled) {
            return answer.await;
        }
        let span = Span { traces: self.clone(), parent, operation: operation(path) };
        CURRENT.scope(span, answer).await
    }

    fn take(&self, record: Record) {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        // A collector that is slow or away holds nobody up.
        if queue.as_ref().is_none_or(|queue| queue.try_send(record).is_err()) {
            self.dropped.increment(1);
        }
    }

    /// Takes no more, and waits a moment for what is left to be sent.
    pub(crate) fn close(&self) {
        *self.queue.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        if done.recv_timeout(LAST_WORDS) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the collector takes too long: the last traces are lost");
        }
    }
}

/// What a route does, by the semantic conventions' names.
fn operation(path: &str) -> &'static str {
    match path {
        "/v1/completions" | "/api/generate" => "text_completion",
        "/v1/embeddings" => "embeddings",
        "/v1/rerank" | "/rerank" | "/score" => "rerank",
        _ => "chat",
    }
}

/// Sends what comes, together with what comes soon after it.
fn send(queue: &Receiver<Record>, mut exporter: Box<dyn Export>, lost: &Counter) {
    let mut failed = false;
    while let Ok(first) = queue.recv() {
        let mut batch = vec![first];
        let until = Instant::now() + PAUSE;
        while batch.len() < BATCH
            && let Ok(next) = queue.recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            batch.push(next);
        }
        let sent = exporter.export(&batch);
        if let Err(error) = &sent {
            lost.increment(batch.len() as u64);
            if !failed {
                tracing::warn!(error, "traces are lost: the collector does not take them");
            }
        }
        failed = sent.is_err();
    }
}

#[cfg(not(feature = "otlp"))]
fn exporter(_: &str) -> Result<Box<dyn Export>, TraceError> {
    Err(TraceError::NotBuilt)
}

#[cfg(feature = "otlp")]
fn exporter(endpoint: &str) -> Result<Box<dyn Export>, TraceError> {
    let wrong = |message: String| TraceError::Endpoint { url: endpoint.to_owned(), message };
    Ok(Box::new(otlp::Exporter::new(endpoint).map_err(wrong)?))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// Tells what it is to send, and waits until it may.
    struct Slow(Sender<Vec<String>>, Receiver<()>);

    impl Export for Slow {
        fn export(&mut self, batch: &[Record]) -> Result<(), String> {
            let _ = self.0.send(batch.iter().map(|record| record.ended.model.clone()).collect());
            self.1.recv().map_err(|e| e.to_string())
        }
    }

    fn counted() -> (Counter, Arc<std::sync::atomic::AtomicU64>) {
        let count = Arc::new(std::sync::atomic::AtomicU64::new(0));
        (Counter::from_arc(count.clone()), count)
    }

    #[tokio::test]
    async fn a_slow_collector_holds_nobody_up_and_what_is_lost_is_counted() {
        let ((sent, batches), (may, wait)) = (channel(), channel());
        let (counter, lost) = counted();
        let traces = Traces::through(Box::new(Slow(sent, wait)), counter).expect("a thread");
        let ask = async || {
            let headers = HeaderMap::new();
            let end = async {
                let span = current().expect("a trace");
                span.end(Ended { model: "m".to_owned(), ..Ended::default() });
            };
            traces.follow(&headers, "/v1/completions", end).await;
        };
        for _ in 0..BATCH {
            ask().await;
        }
        assert_eq!(batches.recv_timeout(Duration::from_secs(20)).map(|b| b.len()), Ok(BATCH));
        for _ in 0..QUEUE + 10 {
            ask().await;
        }
        assert_eq!(lost.load(std::sync::atomic::Ordering::Acquire), 10);
        drop(may); // what is sent from now on fails
        traces.close();
        let all = (BATCH + QUEUE + 10) as u64;
        assert_eq!(lost.load(std::sync::atomic::Ordering::Acquire), all);
        ask().await;
        assert_eq!(lost.load(std::sync::atomic::Ordering::Acquire), all + 1, "it is closed");
    }

    #[tokio::test]
    async fn what_the_caller_does_not_record_is_not_recorded() {
        let ((sent, _batches), (_may, wait)) = (channel(), channel());
        let traces = Traces::through(Box::new(Slow(sent, wait)), counted().0).expect("a thread");
        assert!(current().is_none());
        for (flags, recorded) in [("00", false), ("01", true)] {
            let mut headers = HeaderMap::new();
            let text = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-{flags}");
            headers.insert("traceparent", text.parse().expect("a header"));
            let found = traces.follow(&headers, "/", async { current().is_some() }).await;
            assert_eq!(found, recorded);
        }
    }

    #[cfg(not(feature = "otlp"))]
    #[test]
    fn a_build_without_it_says_so() {
        let args = TraceArgs { otlp_endpoint: Some("http://localhost:4318".to_owned()) };
        let found = Traces::start(&args, counted().0).map(|_| ());
        assert!(found.is_err_and(|error| error.to_string().contains("infernum-cli/otlp")));
        assert!(Traces::start(&TraceArgs::default(), counted().0).is_ok_and(|t| t.is_none()));
    }
}
