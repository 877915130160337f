//! A client of an OpenAI server that keeps the time.

use std::error::Error as _;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER};
use hyper::{Method, Response, StatusCode, Uri};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

use super::Error;
use super::load::Request;
use super::record::{Outcome, Record};
use super::sse::Events;
use super::wire::{self, Ask, Chunk, Model};

/// The most of an answer that is not a stream.
const LONGEST_ANSWER: usize = 64 << 20;

/// A server, and how it is asked.
pub(super) struct Client {
    http: legacy::Client<HttpConnector, Full<Bytes>>,
    /// Scheme, host and port.
    base: String,
    key: Option<String>,
    pub(super) ask: Ask,
    /// The longest sequence that the model takes, where that is known.
    pub(super) max_length: Option<u32>,
    /// How long a request may take.
    pub(super) timeout: Duration,
    /// How often a refused request is sent again.
    pub(super) retries: u32,
}

/// How an attempt ended.
enum End {
    Done,
    HungUp,
    Refused { after: Option<Duration> },
}

impl Client {
    /// A client of the server at `url`, whose path is left out of account but for a last `/v1`.
    pub(super) fn new(url: &str, key: Option<String>, ask: Ask) -> Result<Client, Error> {
        let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let parsed: Result<Uri, _> = base.parse();
        if !parsed.is_ok_and(|uri| uri.scheme_str() == Some("http") && uri.host().is_some()) {
            return Err(Error::Url { found: url.to_owned() });
        }
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let http = legacy::Client::builder(TokioExecutor::new()).build(connector);
        let timeout = Duration::from_secs(600);
        Ok(Client { http, base, key, ask, max_length: None, timeout, retries: 0 })
    }

    /// What a path answers.
    pub(super) async fn get(&self, path: &str) -> Result<(StatusCode, Bytes), Error> {
        let response = self.request(Method::GET, path, Bytes::new()).await?;
        let status = response.status();
        Ok((status, whole(response).await?))
    }

    /// The model of a name, or the first that the server lists.
    pub(super) async fn model(&self, name: Option<&str>) -> Result<Model, Error> {
        let (status, body) = self.get("/v1/models").await?;
        let models = if status.is_success() { wire::models(&body) } else { Vec::new() };
        let named = |m: &Model| name.is_none_or(|name| m.id == name);
        match (models.into_iter().find(named), name) {
            (Some(model), _) => Ok(model),
            // It need not be listed.
            (None, Some(name)) => Ok(Model { id: name.to_owned(), max_model_len: None }),
            (None, None) => Err(Error::NoModel { url: self.base.clone(), status: status.as_u16() }),
        }
    }

    /// Sends a request until it is answered, or refused for good; `record` says how it went.
    pub(super) async fn send(&self, request: &Request, mut record: Record) -> Record {
        let body = Bytes::from(self.ask.body(request));
        record.start();
        loop {
            let attempt = self.attempt(body.clone(), request, &mut record);
            let end = match tokio::time::timeout(self.timeout, attempt).await {
                Ok(end) => end,
                Err(_) => Err(Error::Timeout { seconds: self.timeout.as_secs_f64() }),
            };
            let outcome = match end {
                Ok(End::Refused { after }) if record.retries < self.retries => {
                    record.retries += 1;
                    record.error = None;
                    tokio::time::sleep(after.unwrap_or(Duration::from_secs(1))).await;
                    continue;
                }
                Ok(End::Done) => Outcome::Ok,
                Ok(End::HungUp) => Outcome::Disconnected,
                Ok(End::Refused { .. }) => Outcome::Refused,
                Err(e) => {
                    record.error = Some(chain(&e));
                    Outcome::Failed
                }
            };
            record.finish(outcome);
            return record;
        }
    }

    async fn attempt(
        &self,
        body: Bytes,
        request: &Request,
        record: &mut Record,
    ) -> Result<End, Error> {
        let response = self.request(Method::POST, self.ask.endpoint.path(), body).await?;
        let status = response.status();
        record.status = Some(status.as_u16());
        if !status.is_success() {
            return refused(response, record).await;
        }
        let kind = response.headers().get(CONTENT_TYPE).map_or(&b""[..], |v| v.as_bytes());
        if kind.starts_with(b"text/event-stream") {
            return stream(response.into_body(), request, record).await;
        }
        let answer = whole(response).await?;
        Chunk::parse(&answer)?.record(record)?;
        record.at_once();
        Ok(End::Done)
    }

    async fn request(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<Incoming>, Error> {
        let mut request = hyper::Request::builder().method(method).uri(self.base.clone() + path);
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = request.body(Full::new(body)).map_err(Error::Request)?;
        self.http.request(request).await.map_err(Error::Connect)
    }
}

/// Reads a stream of chunks to its end, or to the piece of text at which this client hangs up.
/// Dropping the body closes the connection.
async fn stream(mut body: Incoming, request: &Request, record: &mut Record) -> Result<End, Error> {
    let hangs_up = |record: &Record| request.hang_up.is_some_and(|at| record.pieces >= at);
    if hangs_up(record) {
        return Ok(End::HungUp);
    }
    let (mut events, mut done) = (Events::default(), false);
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(Error::Stream)?.into_data() else { continue };
        let now = Instant::now();
        events.read(&data, |event| {
            if event == b"[DONE]" {
                done = true;
                record.end(now);
                return Ok(());
            }
            record.at(now);
            Chunk::parse(event)?.record(record)
        })?;
        if !done && hangs_up(record) {
            return Ok(End::HungUp);
        }
    }
    if done || record.finished { Ok(End::Done) } else { Err(Error::Cut { pieces: record.pieces }) }
}

/// What a status other than success means: 429 and 503 refuse, others fail.
async fn refused(response: Response<Incoming>, record: &mut Record) -> Result<End, Error> {
    let status = response.status();
    let after = response.headers().get(RETRY_AFTER).and_then(|v| v.to_str().ok()?.parse().ok());
    let message = wire::refusal(status, &whole(response).await?);
    if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
        record.error = Some(message);
        record.retry_after = after;
        // A server that asks for an hour is not waited for: the timeout of a request is the bound.
        return Ok(End::Refused { after: after.map(|s| Duration::from_secs(s.min(60))) });
    }
    Err(Error::Status { message })
}

async fn whole(response: Response<Incoming>) -> Result<Bytes, Error> {
    let body = Limited::new(response.into_body(), LONGEST_ANSWER);
    Ok(body.collect().await.map_err(Error::Body)?.to_bytes())
}

/// An error and its causes, on one line.
fn chain(e: &Error) -> String {
    let mut text = e.to_string();
    let mut cause = e.source();
    while let Some(e) = cause {
        text = format!("{text}: {e}");
        cause = e.source();
    }
    text
}
