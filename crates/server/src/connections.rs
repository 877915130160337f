//! What each connection waits for, how long it may, and which one makes room for another.
//!
//! A client costs the server something by being slow in one of four ways: it sends nothing, it
//! sends a request bit by bit, it stays when it has been answered, or it does not read its answer.
//! So each connection is in a [`Phase`]; a table keeps those of each phase in the order in which
//! they entered it, a sweep ends those that have been in it for too long, and when there are too
//! many, the one that has been idle longest goes.
//!
//! With HTTP/2 a connection has many requests. It waits for a body where all of them do, and is idle without any. A
//! client has three more ways there to cost something: requests by the hundred, of which each connection gets its share
//! of those that there may be; not taking what is offered of an answer while the connection itself goes on; and taking
//! requests back as fast as it sends them. The last two end the connection, too.

use std::collections::{BTreeMap, HashMap};
use std::io::{IoSlice, Result};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;

use infernum_link::Stream;

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
    /// Requests under way, of all.
    requests: AtomicUsize,
    /// Those with many requests.
    multiplexed: Mutex<Vec<Weak<Connection>>>,
    /// Those that were ended because they took back too many requests, since they were counted.
    flooded: AtomicUsize,
}

/// Connections beyond the limit.
pub(crate) const RESERVE: usize = 256;

/// Requests that a client may take back beyond those whose answers it took.
const TAKEN_BACK: usize = 100;

/// Why connections were ended, and how many of each.
pub(crate) type Ended = Vec<(&'static str, usize)>;

impl Connections {
    pub(crate) fn new(most: usize) -> Arc<Connections> {
        let (table, reserve, multiplexed) = Default::default();
        let (requests, flooded) = Default::default();
        Arc::new(Connections {
            table,
            reserve,
            most,
            next: 0.into(),
            requests,
            multiplexed,
            flooded,
        })
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
        let (multiplexed, requests) = (AtomicBool::new(false), Mutex::default());
        let connection =
            Connection { all: self.clone(), id, reserved, phase, multiplexed, requests, end };
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
                ended.push((phase.name(), count));
            }
        }
        let mut multiplexed = lock(&self.multiplexed);
        multiplexed.retain(|connection| connection.strong_count() > 0);
        let all: Vec<_> = multiplexed.iter().filter_map(Weak::upgrade).collect();
        drop(multiplexed);
        let stalled = all.into_iter().filter(|c| c.is_stalled(now) && c.end()).count();
        ended.push((Phase::Unread.name(), stalled));
        ended.push(("taken_back", self.flooded.swap(0, Ordering::Relaxed)));
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a connection was asked.
#[derive(Default)]
struct Requests {
    /// Those without an answer, or with one that is on its way.
    open: usize,
    /// Those of them whose body is on its way.
    bodies: usize,
    /// Answers of which a part is offered that was not taken yet, and since when.
    offered: HashMap<u64, Instant>,
    /// Requests whose answers were taken, and those that were taken back.
    answered: usize,
    taken_back: usize,
}

impl Requests {
    fn phase(&self) -> Phase {
        match (self.open, self.bodies) {
            (0, _) => Phase::Idle,
            (open, bodies) if open == bodies => Phase::Body,
            _ => Phase::Answer,
        }
    }
}

/// One connection, for those who serve it.
pub(crate) struct Connection {
    all: Arc<Connections>,
    id: u64,
    /// Whether it is one beyond the limit.
    pub(crate) reserved: bool,
    phase: AtomicU8,
    /// Whether it may have many requests at once.
    multiplexed: AtomicBool,
    requests: Mutex<Requests>,
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

    /// Enters the phase that its requests are in; one that is not read stays so.
    fn settle(&self, requests: &Requests) {
        if !self.is(Phase::Unread) {
            self.enter(requests.phase());
        }
    }

    /// A request's head is there.
    pub(crate) fn asked(&self, has_body: bool) {
        self.all.requests.fetch_add(1, Ordering::Relaxed);
        let mut requests = lock(&self.requests);
        requests.open += 1;
        requests.bodies += usize::from(has_body);
        self.settle(&requests);
    }

    /// A request's body is there, or no longer waited for.
    pub(crate) fn read(&self) {
        let mut requests = lock(&self.requests);
        requests.bodies -= 1;
        self.settle(&requests);
    }

    /// A request's answer is gone, as a whole or because nobody wants it any more.
    pub(crate) fn answered(&self, id: u64, whole: bool) {
        self.all.requests.fetch_sub(1, Ordering::Relaxed);
        let mut requests = lock(&self.requests);
        requests.open -= 1;
        requests.offered.remove(&id);
        if whole {
            requests.answered += 1;
        } else {
            requests.taken_back += 1;
        }
        self.settle(&requests);
        let flooded = requests.taken_back > requests.answered + TAKEN_BACK;
        drop(requests);
        if flooded && self.end() {
            self.all.flooded.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// It may have many requests at once, by HTTP/2.
    pub(crate) fn multiplex(self: &Arc<Connection>) {
        if !self.multiplexed.swap(true, Ordering::AcqRel) {
            lock(&self.all.multiplexed).push(Arc::downgrade(self));
        }
    }

    /// Whether it may have many requests at once.
    pub(crate) fn is_multiplexed(&self) -> bool {
        self.multiplexed.load(Ordering::Acquire)
    }

    /// Whether it has more requests than its share: as many as are free ("dynamic thresholds", as `budget` has them).
    pub(crate) fn is_crowded(&self) -> bool {
        let free = self.all.most.saturating_sub(self.all.requests.load(Ordering::Relaxed));
        self.is_multiplexed() && lock(&self.requests).open > free.max(1)
    }

    /// A part of an answer is offered, or the one before it was taken.
    pub(crate) fn offers(&self, id: u64, offered: bool) {
        let mut requests = lock(&self.requests);
        if offered {
            requests.offered.insert(id, Instant::now());
        } else {
            requests.offered.remove(&id);
        }
    }

    fn is_stalled(&self, now: Instant) -> bool {
        let limit = Phase::Unread.limit().unwrap_or(Duration::MAX);
        let requests = lock(&self.requests);
        requests.offered.values().any(|since| now.saturating_duration_since(*since) >= limit)
    }

    /// Ends it; whether it had not been before.
    fn end(&self) -> bool {
        let waiting = self.table().leave(self.id);
        waiting.iter().for_each(|waiting| waiting.end.notify_one());
        waiting.is_some()
    }

    fn received(&self) {
        // Between requests of HTTP/2 there are frames that are none.
        if self.is(Phase::New) || (self.is(Phase::Idle) && !self.is_multiplexed()) {
            self.enter(Phase::Head);
        }
    }

    fn wrote(&self, blocked: bool) {
        if blocked {
            if self.is(Phase::Answer) || self.is(Phase::Idle) {
                self.enter(Phase::Unread);
            }
        } else if self.is(Phase::Unread) {
            let phase = lock(&self.requests).phase();
            self.enter(phase);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.table().leave(self.id);
    }
}

/// A stream that notes when bytes come, and when they cannot go.
pub(crate) struct Watched {
    stream: Box<dyn Stream>,
    connection: Arc<Connection>,
}

impl Watched {
    pub(crate) fn new(stream: Box<dyn Stream>, connection: Arc<Connection>) -> Watched {
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
mod tests;
