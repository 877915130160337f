//! A request of a connection, from its head to the end of its answer.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes, HttpBody};
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};

use super::connections::Connection;

/// Bytes of an answer that are handed over at once to a connection that has others beside it: what was handed over waits
/// where nobody counts it.
const PIECE: usize = 16 << 10;

/// Tells that a request's body is there.
#[derive(Clone)]
pub(crate) struct Reading {
    connection: Arc<Connection>,
    done: Arc<AtomicBool>,
}

impl Reading {
    /// It is, or it is no longer waited for.
    pub(crate) fn done(&self) {
        if !self.done.swap(true, Ordering::AcqRel) {
            self.connection.read();
        }
    }
}

/// A request that has not been answered; whoever drops it has.
pub(crate) struct Exchange {
    connection: Arc<Connection>,
    reading: Reading,
    id: u64,
    /// Whether all of the answer was taken.
    whole: bool,
}

impl Exchange {
    /// Begins with a head that is there.
    pub(crate) fn begin(connection: Arc<Connection>, has_body: bool) -> Exchange {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        connection.asked(has_body);
        let done = Arc::new(AtomicBool::new(!has_body));
        let reading = Reading { connection: connection.clone(), done };
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Exchange { connection, reading, id, whole: false }
    }

    /// For whoever reads the body.
    pub(crate) fn reading(&self) -> Reading {
        self.reading.clone()
    }

    /// An answer's body that ends this with its own end.
    pub(crate) fn answer(self, body: Body) -> Body {
        Body::new(Answer { body, exchange: self, rest: Bytes::new() })
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.reading.done();
        self.connection.answered(self.id, self.whole);
    }
}

struct Answer {
    body: Body,
    exchange: Exchange,
    /// What of a part was not handed over yet.
    rest: Bytes,
}

impl Answer {
    /// The next part, in pieces where they have to be small.
    fn next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            let frame = match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                Some(Ok(frame)) if self.exchange.connection.is_multiplexed() => frame,
                other => return Poll::Ready(other),
            };
            match frame.into_data() {
                Ok(data) => self.rest = data,
                Err(other) => return Poll::Ready(Some(Ok(other))),
            }
        }
        let piece = self.rest.split_to(self.rest.len().min(PIECE));
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let next = self.next(context);
        let exchange = &mut self.exchange;
        if exchange.connection.is_multiplexed() {
            // Asked for the next part, it has taken the one before.
            exchange.connection.offers(exchange.id, matches!(next, Poll::Ready(Some(_))));
        }
        exchange.whole |= matches!(next, Poll::Ready(None));
        next
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (body, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let mut hint = SizeHint::new();
        hint.set_lower(body.lower() + rest);
        if let Some(upper) = body.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.exchange.whole |= self.is_end_stream();
    }
}

/// The next data of a body; `None` at its end.
pub(crate) async fn next_data(body: &mut Body) -> Option<Result<Bytes, axum::Error>> {
    loop {
        match body.frame().await? {
            Ok(frame) => {
                if let Ok(data) = frame.into_data() {
                    return Some(Ok(data));
                }
            }
            Err(error) => return Some(Err(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connections::Connections;

    #[tokio::test]
    async fn an_answer_is_handed_over_in_pieces_where_others_share_its_connection() {
        for multiplexed in [false, true] {
            let connection = Connections::new(1).open().0;
            if multiplexed {
                connection.multiplex();
            }
            let exchange = Exchange::begin(connection, false);
            let mut body = exchange.answer(Body::from(vec![7; 3 * PIECE + 1]));
            let mut pieces = Vec::new();
            while let Some(data) = next_data(&mut body).await {
                let left = body.size_hint().exact().expect("it is known");
                pieces.push(data.expect("bytes").len());
                assert_eq!(pieces.iter().sum::<usize>() as u64 + left, 3 * PIECE as u64 + 1);
            }
            let expected =
                if multiplexed { vec![PIECE, PIECE, PIECE, 1] } else { vec![3 * PIECE + 1] };
            assert_eq!(pieces, expected);
        }
    }
}
