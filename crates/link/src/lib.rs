//! Between engines and front ends: what they tell each other, and the ways that it goes.
//!
//! A front end sends [`Command`]s and hears [`Report`]s. An engine runs on a thread of its own ([`Driver`]), for any number of
//! front ends that have [joined](Handle::join) it. One in the same process is told through a channel, one in
//! another process through a socket, whose ends are [`host`] and [`client`]: the messages are the same, and so is all code
//! before and behind them.
//!
//! A connection begins with the version of the protocol on both sides and a challenge ([`handshake`]); then each message is a
//! frame of MessagePack. Whoever hears nothing for a while takes the other for dead, which is why both send
//! something every [`BEAT`]. What an engine sends is paid with credit that the front end gives back when it has taken it.

mod adapters;
mod address;
pub mod client;
mod driver;
pub mod frame;
pub mod handshake;
pub mod host;
mod message;
mod source;
#[cfg(test)]
mod tests;
mod unix;

use std::time::Duration;

pub use adapters::{AdapterFiles, AdapterRefused, ReadAdapter, check_name};
pub use address::{Address, AddressError};
pub use client::Stream;
pub use driver::{Driver, Handle, Panicked, Peer, Port, engine};
pub use handshake::Secret;
pub use message::{
    AdapterPath, Cause, Command, Depth, End, Facts, Offer, Refusal, Report, Sleep, StepTime,
    Submission, ToEngine,
};
pub use source::Source;
pub use unix::{Socket, bind_unix};

/// The version of the protocol. Both sides have the same: messages say nothing of their own form.
pub const VERSION: u32 = 4;

/// How often something is sent, at least.
pub const BEAT: Duration = Duration::from_secs(1);

/// Bytes that are read and written at once, where so much is there: most messages are some hundred.
const READ_AT_ONCE: usize = 16 << 10;
const WRITTEN_AT_ONCE: usize = 64 << 10;

/// An engine somewhere, as whoever asks it has it.
pub trait Link: Send + Sync {
    /// Sends a command. It may yet be lost: then the engine is told to have gone.
    fn send(&self, command: Command) -> Result<(), Gone>;

    /// Ends an engine that this process runs; one of another process is left alone.
    fn stop(&self) {}
}

/// The engine is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the engine is not there")]
pub struct Gone;

/// Why two sides do not talk to each other.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum LinkError {
    #[error("the connection: {0}")]
    Io(#[from] std::io::Error),
    #[error("the other side ended the connection")]
    Ended,
    #[error("nothing was heard for {0:?}")]
    Silent(Duration),
    #[error("expected a frame of at most {most} bytes, found one of {found}")]
    Frame { found: usize, most: usize },
    #[error("a message cannot be read: {0}")]
    Message(String),
    #[error("the other side is no engine or front end of Infernum: it began with other bytes")]
    Stranger,
    #[error(
        "the other side speaks version {found} of the protocol, and this one version {VERSION}: run the same release on both"
    )]
    Version { found: u32 },
    #[error("the engine wants a secret: give the one it was started with, with --engine-secret")]
    NoSecret,
    #[error("the other side has another secret: give both the same, with --engine-secret")]
    Secret,
    #[error("{0}")]
    Unsuitable(String),
    #[error(
        "`{0}` is reached by others than this machine: give engine and front end a secret, with --engine-secret FILE, or use an address of this machine"
    )]
    Open(String),
    #[error("of the last messages {0} could not be read")]
    Malformed(u32),
    #[error("no randomness: {0}")]
    Random(String),
}
