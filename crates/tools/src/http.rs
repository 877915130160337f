//! The HTTP client of all commands: HTTP/1.1 over hyper, whose bodies are told as they come in.
//!
//! The tests of the server read its answers through another implementation, `ureq`, on purpose: what two
//! ends of one library agree on need not be right.

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper::{Method, Response, StatusCode, Uri};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

/// The most of an answer that is not a stream.
const LONGEST_ANSWER: usize = 64 << 20;

/// A server could not be asked, or its answer not be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HttpError {
    #[error("the server's address: expected http://HOST:PORT, found `{found}`")]
    Url { found: String },
    #[error("cannot connect")]
    Connect(#[source] legacy::Error),
    #[error("no valid request")]
    Request(#[source] hyper::http::Error),
    #[error("the answer broke off")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// A server.
pub(crate) struct Http {
    client: legacy::Client<HttpConnector, Full<Bytes>>,
    /// Scheme, host and port.
    base: String,
    key: Option<String>,
}

impl Http {
    /// The server at `url`, whose path is left out of account but for a last `/v1`.
    pub(crate) fn new(url: &str, key: Option<String>) -> Result<Http, HttpError> {
        let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let parsed: Result<Uri, _> = base.parse();
        if !parsed.is_ok_and(|uri| uri.scheme_str() == Some("http") && uri.host().is_some()) {
            return Err(HttpError::Url { found: url.to_owned() });
        }
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let client = legacy::Client::builder(TokioExecutor::new()).build(connector);
        Ok(Http { client, base, key })
    }

    /// Scheme, host and port.
    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// What a path answers.
    pub(crate) async fn get(&self, path: &str) -> Result<(StatusCode, Bytes), HttpError> {
        let response = self.request(Method::GET, path, Bytes::new()).await?;
        let status = response.status();
        Ok((status, whole(response).await?))
    }

    /// Sends a request, with a body of JSON unless that is empty. The body of the answer is still to come.
    pub(crate) async fn request(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<Incoming>, HttpError> {
        let mut request = hyper::Request::builder().method(method).uri(self.base.clone() + path);
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = request.body(Full::new(body)).map_err(HttpError::Request)?;
        self.client.request(request).await.map_err(HttpError::Connect)
    }
}

/// The body of an answer that is not a stream.
pub(crate) async fn whole(response: Response<Incoming>) -> Result<Bytes, HttpError> {
    let body = Limited::new(response.into_body(), LONGEST_ANSWER);
    Ok(body.collect().await.map_err(HttpError::Body)?.to_bytes())
}
