//! What can go wrong between a client and a server.

use crate::http::HttpError;

/// Why a server could not be driven, or a request failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub(crate) enum Error {
    #[error("{name}: expected {expected}, found {found}")]
    Load { name: &'static str, expected: String, found: String },
    #[error("{url}/v1/models lists no model (status {status}): name one with --model")]
    NoModel { url: String, status: u16 },
    #[error(
        "{load} comes to {needed} tokens, and the model takes {limit}: make lengths shorter (--scale, \
         --input, --output)"
    )]
    TooLong { load: String, needed: u32, limit: u32 },
    #[error("the server refused a request of one token, before the measurement: {message}")]
    Probe { status: Option<u16>, message: String },
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("the stream broke off")]
    Stream(#[source] hyper::Error),
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
