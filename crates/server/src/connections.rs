//! What each connection waits for, how long it may, and which one makes room for another.
//!
//! A client costs the server something by being slow in one of four ways: it sends nothing, it
//! sends a request bit by bit, it stays when it has been answered, or it does not read its answer.
//! So each connection is in a [`Phase`]; a table keeps those of each phase in the order in which
//! they entered it, a sweep ends those that have been in it for too long, and when there are too
//! many, the one that has been idle longest goes.

use std::collections::{BTreeMap, HashMap};
use std::io::{IoSlice, Result};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, HttpBody};
use http_body_util::BodyExt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;

/// What a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum Phase {
    /// The first byte of its first request.
    New,
    /// The first byte of another request.
    Idle,
    /// The rest of a request's head.
    Head,
    /// The rest of a request's body, whose time is taken where it is read.
    Body,
    /// The server.
    Answer,
    /// The client to read.
    Unread,
}

const PHASES: [Phase; 6] =
    [Phase::New, Phase::Idle, Phase::Head, Phase::Body, Phase::Answer, Phase::Unread];

impl Phase {
    /// How long a connection may be in it.
    fn limit(self) -> Option<Duration> {
        match self {
            Phase::New | Phase::Head => Some(Duration::from_secs(10)),
            Phase::Idle => Some(Duration::from_secs(60)),
            Phase::Unread => Some(Duration::from_secs(30)),
            Phase::Body | Phase::Answer => None,
        }
    }

    /// After how long it makes room for others.
    fn patience(self) -> Option<Duration> {
        match self {
            Phase::Unread => Some(Duration::from_secs(1)),
            Phase::Answer => None,
            _ => Some(Duration::ZERO),
        }
    }

    /// As metrics name the reason of an end in this phase.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Phase::New => "no_request",
            Phase::Idle => "idle",
            Phase::Head => "head",
            Phase::Body => "body",
            Phase::Answer => "answer",
            Phase::Unread => "unread",
        }
    }
}

/// Who makes room first. New connections are as idle as those that had their answer.
const ROOM: [&[Phase]; 3] =
    [&[Phase::New, Phase::Idle], &[Phase::Head, Phase::Body], &[Phase::Unread]];

struct Waiting {
    id: u64,
    since: Instant,
    end: Arc<Notify>,
}

/// All connections of a kind.
#[derive(Default)]
struct Table {
    /// Where each stands in `phases`.
    places: HashMap<u64, (Phase, u64)>,
    /// Those in each phase in the order in which they entered it.
    phases: [BTreeMap<u64, Waiting>; PHASES.len()],
    entered: u64,
}

impl Table {
    fn enter(&mut self, phase: Phase, waiting: Waiting) {
        self.entered += 1;
        self.places.insert(waiting.id, (phase, self.entered));
        self.phases[phase as usize].insert(self.entered, waiting);
    }

    fn leave(&mut self, id: u64) -> Option<Waiting> {
        let (phase, place) = self.places.remove(&id)?;
        self.phases[phase as usize].remove(&place)
    }

    /// Ends the first connection of a phase that has been in it for `least`.
    fn end_first(&mut self, phase: Phase, least: Duration, now: Instant) -> bool {
        let first = self.phases[phase as usize].first_key_value();
        let old = first.filter(|(_, w)| now.saturating_duration_since(w.since) >= least);
        let Some(id) = old.map(|(_, w)| w.id) else { return false };
        // It counts no more, though its task may need a moment.
        if let Some(waiting) = self.leave(id) {
            waiting.end.notify_one();
        }
        true
    }

    /// Ends the connection that can best be spared.
    fn make_room(&mut self, now: Instant) -> Option<Phase> {
        for phases in ROOM {
            let first = |phase: &Phase| self.phases[*phase as usize].first_key_value();
            let oldest = phases.iter().filter_map(|p| Some((*first(p)?.0, *p))).min_by_key(|o| o.0);
            if let Some((_, phase)) = oldest
                && phase.patience().is_some_and(|least| self.end_first(phase, least, now))
            {
                return Some(phase);
            }
        }
        None
    }
}

/// All connections.
pub(crate) struct Connections {
    table: Mutex<Table>,
    /// Those beyond the limit, which may ask for `/health` only.
    reserve: Mutex<Table>,
    most: usize,
    next: std::sync::atomic::AtomicU64,
}

/// Connections beyond the limit.
pub(crate) const RESERVE: usize = 256;

/// Why connections were ended, and how many of each.
pub(crate) type Ended = Vec<(Phase, usize)>;

impl Connections {
    pub(crate) fn new(most: usize) -> Arc<Connections> {
        let (table, reserve) = Default::default();
        Arc::new(Connections { table, reserve, most, next: 0.into() })
    }

    /// A new connection. Where there are too many, another one that waits for its client makes
    /// room; where none does, this one is of the reserve. Also gives who made room.
    pub(crate) fn open(self: &Arc<Connections>) -> (Arc<Connection>, Option<Phase>) {
        let now = Instant::now();
        let mut table = lock(&self.table);
        let full = table.places.len() >= self.most;
        let room = if full { table.make_room(now) } else { None };
        let reserved = full && room.is_none();
        if reserved {
            drop(table);
            table = lock(&self.reserve);
            if table.places.len() >= RESERVE {
                // Their one request takes no time: what is still there does not send it.
                let phases = [Phase::New, Phase::Head, Phase::Body, Phase::Unread, Phase::Idle];
                let _ = phases.into_iter().any(|p| table.end_first(p, Duration::ZERO, now));
            }
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let end = Arc::new(Notify::new());
        table.enter(Phase::New, Waiting { id, since: now, end: end.clone() });
        drop(table);
        let phase = AtomicU8::new(Phase::New as u8);
        let answering = AtomicBool::new(false);
        let connection = Connection { all: self.clone(), id, reserved, phase, answering, end };
        (Arc::new(connection), room)
    }

    /// Ends connections that have been in their phase for too long.
    pub(crate) fn sweep(&self, now: Instant) -> Ended {
        let mut ended = Vec::new();
        for table in [&self.table, &self.reserve] {
            let mut table = lock(table);
            for phase in PHASES {
                let Some(limit) = phase.limit() else { continue };
                let count =
                    std::iter::from_fn(|| table.end_first(phase, limit, now).then_some(())).count();
                ended.push((phase, count));
            }
        }
        ended
    }

    /// Ends those that no request of which anything is known came from.
    pub(crate) fn end_unheard(&self) {
        let now = Instant::now();
        for table in [&self.table, &self.reserve] {
            let mut table = lock(table);
            for phase in [Phase::New, Phase::Idle, Phase::Head, Phase::Body] {
                while table.end_first(phase, Duration::ZERO, now) {}
            }
        }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        lock(&self.table).places.len() + lock(&self.reserve).places.len()
    }
}

fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One connection, for those who serve it.
pub(crate) struct Connection {
    all: Arc<Connections>,
    id: u64,
    /// Whether it is one beyond the limit.
    pub(crate) reserved: bool,
    phase: AtomicU8,
    /// Whether an answer is being made or sent.
    answering: AtomicBool,
    end: Arc<Notify>,
}

impl Connection {
    /// Waits until it is to end.
    pub(crate) async fn ended(&self) {
        self.end.notified().await;
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        lock(if self.reserved { &self.all.reserve } else { &self.all.table })
    }

    fn is(&self, phase: Phase) -> bool {
        self.phase.load(Ordering::Acquire) == phase as u8
    }

    fn enter(&self, phase: Phase) {
        if self.is(phase) {
            return;
        }
        let mut table = self.table();
        // One that was ended stays so.
        if let Some(waiting) = table.leave(self.id) {
            self.phase.store(phase as u8, Ordering::Release);
            table.enter(phase, Waiting { since: Instant::now(), ..waiting });
        }
    }

    /// A request's head is there.
    pub(crate) fn asked(&self, has_body: bool) {
        self.answering.store(true, Ordering::Release);
        self.enter(if has_body { Phase::Body } else { Phase::Answer });
    }

    /// A request's body is there.
    pub(crate) fn read(&self) {
        self.enter(Phase::Answer);
    }

    fn answered(&self) {
        self.answering.store(false, Ordering::Release);
        if !self.is(Phase::Unread) {
            self.enter(Phase::Idle);
        }
    }

    fn received(&self) {
        if self.is(Phase::New) || self.is(Phase::Idle) {
            self.enter(Phase::Head);
        }
    }

    fn wrote(&self, blocked: bool) {
        if blocked {
            if self.is(Phase::Answer) || self.is(Phase::Idle) {
                self.enter(Phase::Unread);
            }
        } else if self.is(Phase::Unread) {
            let answering = self.answering.load(Ordering::Acquire);
            self.enter(if answering { Phase::Answer } else { Phase::Idle });
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.table().leave(self.id);
    }
}

/// An answer's body, which notes its own end.
pub(crate) struct Answer {
    body: Body,
    connection: Arc<Connection>,
}

impl Answer {
    pub(crate) fn body(body: Body, connection: Arc<Connection>) -> Body {
        Body::new(Answer { body, connection })
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.connection.answered();
    }
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<hyper::body::Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}

/// The next data of a body; `None` at its end.
pub(crate) async fn next_data(body: &mut Body) -> Option<std::result::Result<Bytes, axum::Error>> {
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

/// A stream that notes when bytes come, and when they cannot go.
pub(crate) struct Watched {
    stream: TcpStream,
    connection: Arc<Connection>,
}

impl Watched {
    pub(crate) fn new(stream: TcpStream, connection: Arc<Connection>) -> Watched {
        Watched { stream, connection }
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(context, buffer));
        if buffer.filled().len() > before {
            self.connection.received();
        }
        Poll::Ready(read)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.connection.wrote(written.is_pending());
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.connection.wrote(written.is_pending());
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gone(connection: &Connection) -> bool {
        !connection.table().places.contains_key(&connection.id)
    }

    fn open(all: &Arc<Connections>) -> Arc<Connection> {
        all.open().0
    }

    #[test]
    fn the_oldest_idle_connection_makes_room() {
        let all = Connections::new(4);
        let [a, b, c, d] = std::array::from_fn(|_| open(&all));
        a.received();
        a.asked(false);
        b.received();
        // c has been idle longer than d; a is served, and then idle last.
        let e = open(&all);
        assert!(gone(&c) && !gone(&d) && !e.reserved);
        a.answered();
        assert_eq!(all.open().1, Some(Phase::New));
        assert!(gone(&d) && !gone(&a) && !gone(&b));
        let _kept = [open(&all), open(&all)];
        assert!(gone(&e) || gone(&a));
    }

    #[test]
    fn senders_of_half_a_request_go_before_those_who_are_served() {
        let all = Connections::new(3);
        let [a, b, c] = std::array::from_fn(|_| open(&all));
        a.asked(false);
        b.received();
        b.asked(true);
        c.received();
        let d = open(&all);
        d.asked(false);
        assert!(gone(&b) && !gone(&c));
        let e = open(&all);
        e.asked(false);
        assert!(gone(&c) && !gone(&a));
        // All are served: whoever comes now is of the reserve.
        let f = open(&all);
        assert!(f.reserved && !gone(&a) && !gone(&d) && !gone(&e));
        // One that does not read is given a moment first.
        a.wrote(true);
        assert!(open(&all).reserved);
        assert!(lock(&all.table).make_room(Instant::now() + Duration::from_secs(2)).is_some());
        assert!(gone(&a));
    }

    #[test]
    fn the_reserve_is_bounded_and_has_room() {
        let all = Connections::new(1);
        let first = open(&all);
        first.asked(false);
        let crowd: Vec<_> = (0..3 * RESERVE).map(|_| open(&all)).collect();
        assert!(crowd.iter().all(|c| c.reserved));
        assert_eq!(all.count(), 1 + RESERVE);
        assert!(!gone(&crowd[crowd.len() - 1]) && gone(&crowd[0]));
        drop(crowd);
        assert_eq!(all.count(), 1);
        drop(first);
        assert_eq!(all.count(), 0);
        assert!(!open(&all).reserved);
    }

    #[test]
    fn each_phase_has_its_time() {
        let all = Connections::new(8);
        let [new, idle, head, body, answer, unread] = std::array::from_fn(|_| open(&all));
        for connection in [&idle, &answer, &unread] {
            connection.asked(false);
        }
        idle.answered();
        head.received();
        body.asked(true);
        unread.wrote(true);
        let swept = |seconds| {
            all.sweep(Instant::now() + Duration::from_secs(seconds));
            [&new, &idle, &head, &body, &answer, &unread].map(|c| gone(c))
        };
        assert_eq!(swept(5), [false; 6]);
        assert_eq!(swept(15), [true, false, true, false, false, false]);
        assert_eq!(swept(35), [true, false, true, false, false, true]);
        assert_eq!(swept(100), [true, true, true, false, false, true]);
        // What was ended is told, once, and comes back to nothing.
        new.received();
        assert!(gone(&new));
    }

    #[test]
    fn reading_on_goes_on() {
        let all = Connections::new(1);
        let one = open(&all);
        one.asked(false);
        one.wrote(true);
        assert!(one.is(Phase::Unread));
        one.wrote(false);
        assert!(one.is(Phase::Answer));
        one.wrote(true);
        one.answered();
        assert!(one.is(Phase::Unread), "what is written last may not be read either");
        one.wrote(false);
        assert!(one.is(Phase::Idle));
    }
}
