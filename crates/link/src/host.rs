//! The engine's end of sockets: front ends come, ask and go.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use infernum_grammar::Grammars;
use tokio::io::{AsyncWriteExt, BufReader, ReadHalf, WriteHalf};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::timeout;

use crate::address::{Address, resolve};
use crate::client::{Stream, tuned};
use crate::driver::{Handle, Peer, Port};
use crate::handshake::{self, Secret};
use crate::message::{Cause, Command, End, Offer, Refusal, Report, Submission, ToEngine};
use crate::unix::{Socket, bind_unix};
use crate::{BEAT, Link, LinkError, READ_AT_ONCE, WRITTEN_AT_ONCE, frame};

/// Connections at once, those that are not front ends yet among them.
const MOST_CONNECTIONS: usize = 128;
/// Messages of a front end that may be unreadable before it is cut off.
const MOST_MALFORMED: u32 = 16;
/// Credit that a front end may give at most, and with it the bytes that wait for it here.
const MOST_WINDOW: u64 = 64 << 20;
/// Of a socket in the file system: its owner's alone.
const MODE: u32 = 0o600;

/// Takes connections.
pub enum Listener {
    /// From the network.
    Tcp(TcpListener),
    /// From this machine.
    Ipc(UnixListener, Socket),
}

impl Listener {
    /// Listens, but never to other machines without a secret.
    pub async fn bind(address: &Address, secret: Option<&Secret>) -> Result<Listener, LinkError> {
        match address {
            Address::Ipc(path) => {
                let (listener, socket) = bind_unix(path, Some(MODE))?;
                Ok(Listener::Ipc(listener, socket))
            }
            Address::Tcp(host) => {
                let addresses = resolve(host).await?;
                if secret.is_none() && !addresses.iter().all(|a| a.ip().is_loopback()) {
                    return Err(LinkError::Open(address.to_string()));
                }
                Ok(Listener::Tcp(TcpListener::bind(&addresses[..]).await?))
            }
        }
    }

    /// What it listens on, its port known.
    pub fn address(&self) -> std::io::Result<Address> {
        match self {
            Listener::Tcp(listener) => Ok(Address::Tcp(listener.local_addr()?.to_string())),
            Listener::Ipc(_, socket) => Ok(Address::Ipc(socket.path().to_owned())),
        }
    }

    async fn accept(&self) -> Box<dyn Stream> {
        loop {
            let accepted: std::io::Result<Box<dyn Stream>> = match self {
                Listener::Tcp(listener) => listener.accept().await.map(|(s, _)| tuned(s)),
                Listener::Ipc(listener, _) => {
                    listener.accept().await.map(|(s, _)| Box::new(s) as Box<dyn Stream>)
                }
            };
            match accepted {
                Ok(stream) => return stream,
                Err(error) => {
                    // Most often too many open files: wait for some to close.
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

/// An engine as its front ends meet it.
pub struct Host {
    /// The way to its thread.
    pub handle: Handle,
    /// What a front end is told first.
    pub offer: Offer,
    /// What front ends must have.
    pub secret: Option<Secret>,
    /// Of its model, where that generates.
    pub grammars: Option<Grammars>,
    /// How long a front end may be silent.
    pub silence: Duration,
}

impl Host {
    /// Talks to all who connect, until it is dropped.
    pub async fn serve(self: Arc<Host>, listener: Listener) {
        let room = Arc::new(Semaphore::new(MOST_CONNECTIONS));
        loop {
            let stream = listener.accept().await;
            let Ok(permit) = room.clone().try_acquire_owned() else {
                tracing::warn!(
                    most = MOST_CONNECTIONS,
                    "there are too many connections: one was refused"
                );
                continue;
            };
            let host = self.clone();
            tokio::spawn(async move {
                match host.converse(stream).await {
                    Ok(()) | Err(LinkError::Ended) => tracing::info!("a front end is gone"),
                    Err(error) => tracing::warn!(%error, "a front end was let go"),
                }
                drop(permit);
            });
        }
    }

    /// Talks to one, until either side ends it.
    pub async fn converse(&self, mut stream: Box<dyn Stream>) -> Result<(), LinkError> {
        let welcome = handshake::welcome(&mut stream, self.secret.as_ref(), &self.offer);
        let welcome = timeout(self.silence, welcome).await;
        let window = welcome.map_err(|_| LinkError::Silent(self.silence))??;
        let (sender, reports) = unbounded_channel();
        let credit = Arc::new(Credit::default());
        let port = Outgoing {
            reports: sender,
            credit: credit.clone(),
            window: window.min(MOST_WINDOW) as usize,
        };
        let facts = &self.offer.facts;
        let peer = Arc::new(self.handle.join(Box::new(port), facts.sequences + facts.queue));
        tracing::info!("a front end has come");
        let (reader, writer) = tokio::io::split(stream);
        tokio::select! {
            ended = self.hear(reader, &peer, &credit) => ended,
            ended = self.tell(writer, reports, &credit) => ended,
        }
    }

    async fn hear(
        &self,
        reader: ReadHalf<Box<dyn Stream>>,
        peer: &Arc<Peer>,
        credit: &Credit,
    ) -> Result<(), LinkError> {
        let mut reader = BufReader::with_capacity(READ_AT_ONCE, reader);
        let (mut buffer, mut malformed) = (Vec::new(), 0);
        let compiling = Arc::new(Compiling::default());
        loop {
            let read = frame::read(&mut reader, &mut buffer, self.offer.most_bytes as usize);
            let read = timeout(self.silence, read).await;
            if let Err(error) = read.map_err(|_| LinkError::Silent(self.silence))? {
                if matches!(error, LinkError::Frame { .. }) {
                    self.handle.malformed();
                }
                return Err(error);
            }
            match frame::parse(&buffer) {
                Ok(ToEngine::Taken(paid)) => credit.pay(paid),
                Ok(ToEngine::Command(Command::Submit(submission))) => {
                    self.submit(peer, &compiling, submission);
                }
                Ok(ToEngine::Command(Command::Cancel(key, end))) if compiling.cancel(key, end) => {}
                Ok(ToEngine::Command(command)) => {
                    peer.send(command).map_err(|_| LinkError::Ended)?;
                }
                Err(error) => {
                    self.handle.malformed();
                    malformed += 1;
                    tracing::debug!(%error, "a message was dropped");
                    if malformed > MOST_MALFORMED {
                        return Err(LinkError::Malformed(malformed));
                    }
                }
            }
        }
    }

    /// Hands a request on, once its grammar is compiled: other requests do not wait for that.
    fn submit(
        &self,
        peer: &Arc<Peer>,
        compiling: &Arc<Compiling>,
        mut submission: Box<Submission>,
    ) {
        let key = submission.key;
        if let Err(refusal) = submission.check(self.offer.facts.vocab) {
            return peer.refuse(key, refusal);
        }
        let Some(written) = submission.grammar.take() else {
            let _ = peer.send(Command::Submit(submission)); // the connection ends with the engine
            return;
        };
        let Some(grammars) = self.grammars.clone() else {
            return peer.refuse(key, Refusal::new(Cause::Model, "the model does not generate"));
        };
        if !compiling.begin(key, self.offer.facts.sequences + self.offer.facts.queue) {
            return peer.refuse(key, Refusal::new(Cause::Busy, "too many grammars are compiled"));
        }
        let (peer, compiling) = (peer.clone(), compiling.clone());
        tokio::task::spawn_blocking(move || {
            let compiled = grammars.compile_written(&written);
            // Held until the request is handed on, so that its cancellation comes after it.
            let mut all = compiling.all();
            let cancelled = all.remove(&key).flatten();
            match compiled {
                Ok(constraint) => {
                    submission.request.constraint = Some(constraint);
                    let _ = peer.send(Command::Submit(submission)); // as above
                    if let Some(end) = cancelled {
                        let _ = peer.send(Command::Cancel(key, end)); // as above
                    }
                }
                Err(error) => peer.refuse(key, Refusal::new(Cause::Grammar, error.to_string())),
            }
        });
    }

    async fn tell(
        &self,
        mut writer: WriteHalf<Box<dyn Stream>>,
        mut reports: UnboundedReceiver<Report>,
        credit: &Credit,
    ) -> Result<(), LinkError> {
        let mut beat = tokio::time::interval(BEAT);
        beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut bytes = Vec::new();
        loop {
            let report = tokio::select! {
                report = reports.recv() => match report {
                    Some(report) => report,
                    None => return Err(LinkError::Ended),
                },
                _ = beat.tick() => {
                    let report = self.handle.standing();
                    credit.owe(report.size());
                    report
                }
            };
            bytes.clear();
            frame::push(&mut bytes, &report)?;
            while bytes.len() < WRITTEN_AT_ONCE
                && let Ok(report) = reports.try_recv()
            {
                frame::push(&mut bytes, &report)?;
            }
            let written = timeout(self.silence, writer.write_all(&bytes)).await;
            written.map_err(|_| LinkError::Silent(self.silence))??;
        }
    }
}

/// What a front end has been sent, or is about to be, and has not said to have taken.
#[derive(Default)]
pub(crate) struct Credit(AtomicUsize);

impl Credit {
    /// Adds what is sent; what is owed then.
    fn owe(&self, size: usize) -> usize {
        self.0.fetch_add(size, Ordering::AcqRel).saturating_add(size)
    }

    pub(crate) fn pay(&self, size: u64) {
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        let pay = |owed: usize| Some(owed.saturating_sub(size));
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, pay); // it always pays
    }
}

/// Where the engine's thread puts reports for a front end.
pub(crate) struct Outgoing {
    pub(crate) reports: UnboundedSender<Report>,
    pub(crate) credit: Arc<Credit>,
    pub(crate) window: usize,
}

impl Port for Outgoing {
    fn send(&mut self, report: Report) -> bool {
        if self.credit.owe(report.size()) > self.window {
            tracing::warn!("a front end does not take what it is told: its requests end");
            return false;
        }
        self.reports.send(report).is_ok()
    }
}

/// Requests whose grammars are compiled, and why they are not wanted any more, where they are not.
#[derive(Default)]
struct Compiling(Mutex<HashMap<u64, Option<End>>>);

impl Compiling {
    fn all(&self) -> MutexGuard<'_, HashMap<u64, Option<End>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is room for one more; not for one that is there.
    fn begin(&self, key: u64, most: usize) -> bool {
        let mut all = self.all();
        let room = all.len() < most;
        match all.entry(key) {
            Entry::Vacant(vacant) if room => vacant.insert(None).is_none(),
            _ => false,
        }
    }

    /// Whether it is one of them.
    fn cancel(&self, key: u64, end: End) -> bool {
        self.all().get_mut(&key).map(|why| *why = Some(end)).is_some()
    }
}
