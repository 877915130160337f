//! Answers that stream: server-sent events, or JSON a line.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use serde::Serialize;

use super::error::ApiError;
use super::generation::{Generation, Piece, Used};
use super::lanes::aside;

/// Silence after which a comment says that the connection lives.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Bytes that are gathered from what is ready at once.
const GATHER: usize = 64 << 10;

/// How an API tells the pieces of an answer.
pub(crate) trait StreamFormat: Send + 'static {
    const MEDIA_TYPE: &'static str = "text/event-stream; charset=utf-8";

    /// Writes what comes before all pieces.
    fn begin(&mut self, _frames: &mut Frames, _used: Used) {}

    /// Writes the frames of a piece.
    fn piece(&mut self, frames: &mut Frames, piece: Piece);

    /// Writes what comes after all pieces.
    fn end(&mut self, frames: &mut Frames, used: Used);

    /// Writes that no more comes, and why.
    fn fail(&mut self, frames: &mut Frames, error: &ApiError) {
        frames.push(&error.response());
        frames.done();
    }

    /// Writes that the connection lives.
    fn idle(&mut self, frames: &mut Frames) {
        frames.comment();
    }
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

    /// Adds a frame of JSON that has a name.
    pub(crate) fn event(&mut self, name: &str, value: &impl Serialize) {
        self.0.extend_from_slice(b"event: ");
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(b'\n');
        self.push(value);
    }

    /// Names and JSON of all events.
    #[cfg(test)]
    pub(crate) fn events(&self) -> Vec<(String, serde_json::Value)> {
        let text = std::str::from_utf8(&self.0).expect("text");
        let event = |frame: &str| {
            let (name, data) = frame.split_once("\ndata: ").expect(frame);
            let name = name.strip_prefix("event: ").expect(frame);
            (name.to_owned(), serde_json::from_str(data).expect(data))
        };
        text.split_terminator("\n\n").map(event).collect()
    }

    /// Adds a line of JSON.
    pub(crate) fn line(&mut self, value: &impl Serialize) {
        let _ = serde_json::to_writer(&mut self.0, value); // as in `push`
        self.0.push(b'\n');
    }

    /// Says that nothing more comes, as OpenAI has it.
    pub(crate) fn done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn comment(&mut self) {
        self.0.extend_from_slice(b": keep-alive\n\n");
    }
}

struct Stream<F> {
    generation: Option<Generation>,
    format: F,
    begun: bool,
}

/// An answer that streams. When its client goes away, it is dropped, and the generation with it.
pub(crate) fn stream<F: StreamFormat>(generation: Generation, format: F) -> Response {
    let stream = Stream { generation: Some(generation), format, begun: false };
    let body = futures_util::stream::unfold(stream, |mut stream| async move {
        let frames = stream.next().await?;
        Some((Ok::<_, Infallible>(frames), stream))
    });
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(F::MEDIA_TYPE));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies such as nginx would gather what should flow.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl<F: StreamFormat> Stream<F> {
    /// The next bytes; `None` after the last.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            let frames = self.gather().await?;
            if !frames.0.is_empty() {
                return Some(frames.0.into());
            }
        }
    }

    /// The next frames, if any: not all that comes is told.
    async fn gather(&mut self) -> Option<Frames> {
        let generation = self.generation.as_mut()?;
        let mut frames = Frames::default();
        if !std::mem::replace(&mut self.begun, true) {
            self.format.begin(&mut frames, generation.used());
            return Some(frames);
        }
        let Ok(mut next) = tokio::time::timeout(KEEP_ALIVE, generation.next()).await else {
            self.format.idle(&mut frames);
            return Some(frames);
        };
        loop {
            match next {
                Ok(Some(piece)) => {
                    aside(piece.logprob_count(), || self.format.piece(&mut frames, piece));
                }
                Ok(None) => break,
                Err(error) => {
                    self.format.fail(&mut frames, &error);
                    self.generation = None;
                    return Some(frames);
                }
            }
            if generation.ended() {
                break;
            }
            if frames.0.len() >= GATHER {
                return Some(frames);
            }
            next = generation.ready();
            if matches!(next, Ok(None)) && !generation.ended() {
                return Some(frames);
            }
        }
        self.format.end(&mut frames, generation.used());
        self.generation = None;
        Some(frames)
    }
}
