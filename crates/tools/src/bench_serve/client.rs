//! A client of an OpenAI server that keeps the time.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, RETRY_AFTER};
use hyper::{Method, Response, StatusCode};

use super::error::Error;
use super::load::Request;
use super::record::{Outcome, Record};
use super::sse::Events;
use super::wire::{self, Ask, Chunk, Model};
use crate::http::{Http, whole};
use crate::report::chain;

/// A server, and how it is asked.
pub(super) struct Client {
    pub(super) http: Http,
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
    /// A client of the server at `url`.
    pub(super) fn new(url: &str, key: Option<String>, ask: Ask) -> Result<Client, Error> {
        let (http, timeout) = (Http::new(url, key)?, Duration::from_secs(600));
        Ok(Client { http, ask, max_length: None, timeout, retries: 0 })
    }

    /// The model of a name, or the first that the server lists.
    pub(super) async fn model(&self, name: Option<&str>) -> Result<Model, Error> {
        let (status, body) = self.http.get("/v1/models").await?;
        let models = if status.is_success() { wire::models(&body) } else { Vec::new() };
        let named = |m: &Model| name.is_none_or(|name| m.id == name);
        match (models.into_iter().find(named), name) {
            (Some(model), _) => Ok(model),
            // It need not be listed.
            (None, Some(name)) => Ok(Model { id: name.to_owned(), max_model_len: None }),
            (None, None) => {
                Err(Error::NoModel { url: self.http.base().to_owned(), status: status.as_u16() })
            }
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
        let response = self.http.request(Method::POST, self.ask.endpoint.path(), body).await?;
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
