//! A front end's end of sockets: an engine in another process, found again whenever it is back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, ReadHalf, WriteHalf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::timeout;

use crate::address::{Address, resolve};
use crate::handshake::{self, Secret};
use crate::message::{Cause, Command, Offer, Refusal, Report, ToEngine};
use crate::{BEAT, Gone, Link, LinkError, READ_AT_ONCE, WRITTEN_AT_ONCE, frame};

/// Credit that an engine has for what it tells. Steps with log-probabilities of long prompts take half a MiB each.
const WINDOW: u64 = 16 << 20;
/// Pauses between two tries to connect.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Bytes of a report at most.
const MOST_BYTES: usize = 256 << 20;

/// Bytes in both directions.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

pub(crate) fn tuned(stream: TcpStream) -> Box<dyn Stream> {
    // Tokens are small and must not wait for each other.
    let _ = stream.set_nodelay(true);
    Box::new(stream)
}

/// Who is told what an engine says.
pub trait FrontEnd: Send {
    /// The engine is there. An error says why it is not one for this front end.
    fn offered(&mut self, offer: &Offer) -> Result<(), String>;
    /// What became of requests.
    fn reported(&mut self, report: Report);
    /// A command that is waited for was not handed over: for a reason of its own, or because the engine is not there.
    fn unsent(&mut self, key: u64, refusal: Option<Refusal>);
    /// The engine is gone, and all that was asked of it.
    fn lost(&mut self);
    /// A message of the engine's could not be read.
    fn malformed(&mut self);
}

/// Where an engine is, and what it takes to be let in.
#[derive(Clone, Debug)]
pub struct Dial {
    /// Where it listens.
    pub address: Address,
    /// What it knows, too.
    pub secret: Option<Secret>,
    /// How long it may be silent.
    pub silence: Duration,
}

/// An engine in another process.
pub struct Remote(UnboundedSender<Command>);

impl Link for Remote {
    fn send(&self, command: Command) -> Result<(), Gone> {
        self.0.send(command).map_err(|_| Gone)
    }
}

impl Dial {
    /// What the engine offers.
    pub async fn offer(&self) -> Result<Offer, LinkError> {
        Ok(self.connect().await?.1)
    }

    /// Connects, again and again, and tells what the engine says, until the [`Remote`] is dropped.
    pub fn follow(
        self,
        front_end: impl FrontEnd + 'static,
    ) -> (Remote, impl Future<Output = ()> + Send) {
        let (sender, commands) = unbounded_channel();
        (Remote(sender), Follower { dial: self, commands, front_end }.run())
    }

    async fn connect(&self) -> Result<(Box<dyn Stream>, Offer), LinkError> {
        let connected = async {
            let mut stream = self.open().await?;
            let offer = handshake::introduce(&mut stream, self.secret.as_ref(), WINDOW).await?;
            Ok((stream, offer))
        };
        timeout(self.silence, connected).await.map_err(|_| LinkError::Silent(self.silence))?
    }

    async fn open(&self) -> Result<Box<dyn Stream>, LinkError> {
        match &self.address {
            Address::Ipc(path) => Ok(Box::new(UnixStream::connect(path).await?)),
            Address::Tcp(host) => {
                let addresses = resolve(host).await?;
                if self.secret.is_none() && !addresses.iter().all(|a| a.ip().is_loopback()) {
                    return Err(LinkError::Open(self.address.to_string()));
                }
                Ok(tuned(TcpStream::connect(&addresses[..]).await?))
            }
        }
    }
}

struct Follower<F> {
    dial: Dial,
    commands: UnboundedReceiver<Command>,
    front_end: F,
}

impl<F: FrontEnd> Follower<F> {
    async fn run(mut self) {
        let (mut pause, mut said) = (FIRST_PAUSE, String::new());
        loop {
            let dial = self.dial.clone();
            let Some(connected) = self.meanwhile(async move { dial.connect().await }).await else {
                return;
            };
            let suited = connected.and_then(|(stream, offer)| {
                self.front_end.offered(&offer).map_err(LinkError::Unsuitable)?;
                Ok((stream, offer))
            });
            let error = match suited {
                Ok((stream, offer)) => {
                    tracing::info!(engine = %self.dial.address, on = offer.facts.on, "connected");
                    (pause, said) = (FIRST_PAUSE, String::new());
                    let ended = self.converse(stream, offer.most_bytes as usize).await;
                    self.front_end.lost();
                    let Err(error) = ended else { return };
                    error
                }
                Err(error) => error,
            };
            // It is said once, however often it is tried.
            let message = error.to_string();
            if message != said {
                tracing::warn!(engine = %self.dial.address, error = message, "no engine there: trying again and again");
                said = message;
            }
            if self.meanwhile(tokio::time::sleep(pause)).await.is_none() {
                return;
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Waits for something else while there is no engine to ask; `None` where nobody asks any more.
    async fn meanwhile<T>(&mut self, other: impl Future<Output = T>) -> Option<T> {
        let mut other = std::pin::pin!(other);
        loop {
            tokio::select! {
                done = &mut other => return Some(done),
                command = self.commands.recv() => {
                    if let Some(key) = command?.key() {
                        self.front_end.unsent(key, None);
                    }
                }
            }
        }
    }

    /// Talks to the engine; an error where that ends, nothing where nobody asks any more.
    async fn converse(&mut self, stream: Box<dyn Stream>, most: usize) -> Result<(), LinkError> {
        let (reader, writer) = tokio::io::split(stream);
        let taken = Taken::default();
        let (heard, unsent) = (std::sync::Mutex::new(&mut self.front_end), &mut self.commands);
        let silence = self.dial.silence;
        tokio::select! {
            ended = hear(reader, &heard, &taken, silence) => ended,
            ended = tell(writer, unsent, &heard, &taken, most, silence) => ended,
        }
    }
}

type Shared<'a, F> = std::sync::Mutex<&'a mut F>;

fn locked<'a, 'b, F>(shared: &'a Shared<'b, F>) -> std::sync::MutexGuard<'a, &'b mut F> {
    shared.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Credit to be given back.
#[derive(Default)]
struct Taken {
    size: AtomicU64,
    much: Notify,
}

async fn hear<F: FrontEnd>(
    reader: ReadHalf<Box<dyn Stream>>,
    front_end: &Shared<'_, F>,
    taken: &Taken,
    silence: Duration,
) -> Result<(), LinkError> {
    let mut reader = BufReader::with_capacity(READ_AT_ONCE, reader);
    let mut buffer = Vec::new();
    loop {
        let read = frame::read(&mut reader, &mut buffer, MOST_BYTES);
        timeout(silence, read).await.map_err(|_| LinkError::Silent(silence))??;
        match frame::parse::<Report>(&buffer) {
            Ok(report) => {
                let size = report.size() as u64;
                locked(front_end).reported(report);
                if taken.size.fetch_add(size, Ordering::AcqRel) + size > WINDOW / 8 {
                    taken.much.notify_one();
                }
            }
            Err(error) => {
                locked(front_end).malformed();
                // What it told is lost: no request may go on as if nothing were missing.
                return Err(error);
            }
        }
    }
}

async fn tell<F: FrontEnd>(
    mut writer: WriteHalf<Box<dyn Stream>>,
    commands: &mut UnboundedReceiver<Command>,
    front_end: &Shared<'_, F>,
    taken: &Taken,
    most: usize,
    silence: Duration,
) -> Result<(), LinkError> {
    let mut beat = tokio::time::interval(BEAT);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        tokio::select! {
            command = commands.recv() => match command {
                Some(command) => push(&mut bytes, command, front_end, most),
                None => return Ok(()),
            },
            _ = beat.tick() => pay(&mut bytes, taken)?,
            () = taken.much.notified() => pay(&mut bytes, taken)?,
        }
        while bytes.len() < WRITTEN_AT_ONCE
            && let Ok(command) = commands.try_recv()
        {
            push(&mut bytes, command, front_end, most);
        }
        let written = timeout(silence, writer.write_all(&bytes)).await;
        written.map_err(|_| LinkError::Silent(silence))??;
    }
}

fn pay(bytes: &mut Vec<u8>, taken: &Taken) -> Result<(), LinkError> {
    frame::push(bytes, &ToEngine::Taken(taken.size.swap(0, Ordering::AcqRel)))
}

/// Writes a command, or says why it cannot be written.
fn push<F: FrontEnd>(
    bytes: &mut Vec<u8>,
    command: Command,
    front_end: &Shared<'_, F>,
    most: usize,
) {
    let mut command = command;
    let key = command.key();
    let mut refusal = None;
    if let Command::Submit(submission) = &mut command
        && let Some(constraint) = &submission.request.constraint
    {
        submission.grammar = constraint.written();
        if submission.grammar.is_none() {
            let message = "what the text is held to cannot be sent to an engine of another process";
            refusal = Some(Refusal::new(Cause::Grammar, message));
        }
    }
    let start = bytes.len();
    if refusal.is_none()
        && let Err(error) = frame::push(bytes, &ToEngine::Command(command))
    {
        refusal = Some(Refusal::new(Cause::Internal, error.to_string()));
    }
    let found = (bytes.len() - start).saturating_sub(4);
    if found > most {
        bytes.truncate(start);
        refusal = Some(Refusal::new(Cause::TooLong, LinkError::Frame { found, most }.to_string()));
    }
    if let Some((key, refusal)) = key.zip(refusal) {
        locked(front_end).unsent(key, Some(refusal));
    }
}
