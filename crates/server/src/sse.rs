//! Server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use serde::Serialize;

use super::generation::{Generation, Piece, Used};
use super::lanes::aside;

/// Silence after which a comment says that the connection lives.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Bytes that are gathered from what is ready at once.
const GATHER: usize = 64 << 10;

/// How pieces are told.
pub(crate) trait Dialect: Send + 'static {
    /// Writes the frames of a piece.
    fn piece(&mut self, frames: &mut Frames, piece: Piece);

    /// Writes the frame that says what was used, if it is wanted.
    fn usage(&mut self, frames: &mut Frames, used: Used);
}

/// Frames on their way.
#[derive(Default)]
pub(crate) struct Frames(Vec<u8>);

impl Frames {
    /// Adds a frame of JSON.
    pub(crate) fn push(&mut self, value: &impl Serialize) {
        self.0.extend_from_slice(b"data: ");
        // Our own types, and a `Vec` takes all.
        let _ = serde_json::to_writer(&mut self.0, value);
        self.0.extend_from_slice(b"\n\n");
    }

    fn done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn comment(&mut self) {
        self.0.extend_from_slice(b": keep-alive\n\n");
    }
}

struct Stream<D> {
    generation: Option<Generation>,
    dialect: D,
}

/// An answer that streams. When its client goes away, it is dropped, and the generation with it.
pub(crate) fn stream(generation: Generation, dialect: impl Dialect) -> Response {
    let stream = Stream { generation: Some(generation), dialect };
    let body = futures_util::stream::unfold(stream, |mut stream| async move {
        let frames = stream.next().await?;
        Some((Ok::<_, Infallible>(frames), stream))
    });
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
    headers.insert(header::CONTENT_TYPE, kind);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies such as nginx would gather what should flow.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl<D: Dialect> Stream<D> {
    /// The next bytes; `None` after `[DONE]`.
    async fn next(&mut self) -> Option<Bytes> {
        let generation = self.generation.as_mut()?;
        let mut frames = Frames::default();
        let Ok(mut next) = tokio::time::timeout(KEEP_ALIVE, generation.next()).await else {
            frames.comment();
            return Some(frames.0.into());
        };
        loop {
            match next {
                Ok(Some(piece)) => {
                    aside(piece.logprob_count(), || self.dialect.piece(&mut frames, piece));
                }
                Ok(None) => break,
                Err(error) => {
                    frames.push(&error.response());
                    frames.done();
                    self.generation = None;
                    return Some(frames.0.into());
                }
            }
            if generation.ended() {
                break;
            }
            if frames.0.len() >= GATHER {
                return Some(frames.0.into());
            }
            next = generation.ready();
            if matches!(next, Ok(None)) && !generation.ended() {
                return Some(frames.0.into());
            }
        }
        self.dialect.usage(&mut frames, generation.used());
        frames.done();
        self.generation = None;
        Some(frames.0.into())
    }
}
