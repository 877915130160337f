//! How a connection begins: versions, then a challenge, so that both sides know that the other has the secret, which itself is
//! never sent (HMAC-SHA-256 over random numbers of both). It tells who is there; what follows is not encrypted.

use std::fmt;
use std::sync::Arc;

use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::message::Offer;
use crate::{LinkError, VERSION, frame};

/// What both sides begin with.
const MAGIC: [u8; 8] = *b"INFERNUM";
/// Bytes of a message before it is known who sends it, and of an engine's offer.
const MOST_EARLY: usize = 4096;
const MOST_OFFER: usize = 1 << 20;
/// Bytes of a secret at least.
const LEAST_SECRET: usize = 16;

/// What engines and front ends share, and nobody else knows.
#[derive(Clone)]
pub struct Secret(Arc<[u8]>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// A secret as a file holds it: white space around it is not part of it. `None` where it is shorter than 16 bytes.
    pub fn new(text: &str) -> Option<Secret> {
        let text = text.trim();
        (text.len() >= LEAST_SECRET).then(|| Secret(text.as_bytes().into()))
    }
}

#[derive(Serialize, Deserialize)]
struct Challenge {
    nonce: [u8; 32],
    wants_secret: bool,
}

#[derive(Serialize, Deserialize)]
struct Proof {
    nonce: [u8; 32],
    /// Of who has the secret; of others anything.
    mac: [u8; 32],
    /// Credit for reports.
    window: u64,
}

/// What the engine says to a proof.
#[derive(Serialize, Deserialize)]
enum Answer {
    Welcome {
        mac: [u8; 32],
        offer: Box<Offer>,
    },
    /// The front end has not shown that it has the secret.
    WrongSecret,
}

/// Who proves to have the secret: otherwise a proof could be sent back as the other side's.
#[derive(Clone, Copy)]
enum Side {
    FrontEnd,
    Engine,
}

fn mac(secret: &Secret, side: Side, engine: &[u8; 32], front_end: &[u8; 32]) -> Hmac<Sha256> {
    // Keys may have any length.
    let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(&secret.0)
        .unwrap_or_else(|_| unreachable!("HMAC takes keys of any length"));
    mac.update(&MAGIC);
    mac.update(&VERSION.to_le_bytes());
    mac.update(&[side as u8]);
    mac.update(engine);
    mac.update(front_end);
    mac
}

fn proof(secret: Option<&Secret>, side: Side, engine: &[u8; 32], front_end: &[u8; 32]) -> [u8; 32] {
    secret.map_or([0; 32], |secret| {
        mac(secret, side, engine, front_end).finalize().into_bytes().into()
    })
}

/// Compares in a time that tells nothing of the secret.
fn proves(
    secret: &Secret,
    side: Side,
    engine: &[u8; 32],
    front_end: &[u8; 32],
    found: &[u8; 32],
) -> Result<(), LinkError> {
    let mac = mac(secret, side, engine, front_end);
    mac.verify_slice(found).map_err(|_| LinkError::Secret)
}

fn nonce() -> Result<[u8; 32], LinkError> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(|e| LinkError::Random(e.to_string()))?;
    Ok(nonce)
}

/// A number that no other process has.
pub fn instance() -> Result<u64, LinkError> {
    let [a, b, c, d, e, f, g, h, ..] = nonce()?;
    Ok(u64::from_le_bytes([a, b, c, d, e, f, g, h]))
}

/// What is sent and read first, on both sides; its form never changes.
async fn greet(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> Result<(), LinkError> {
    let mut greeting = [0; 12];
    greeting[..8].copy_from_slice(&MAGIC);
    greeting[8..].copy_from_slice(&VERSION.to_le_bytes());
    stream.write_all(&greeting).await?;
    let mut found = [0; 12];
    stream.read_exact(&mut found).await?;
    let [magic @ .., a, b, c, d] = found;
    if magic != MAGIC {
        return Err(LinkError::Stranger);
    }
    match u32::from_le_bytes([a, b, c, d]) {
        VERSION => Ok(()),
        found => Err(LinkError::Version { found }),
    }
}

async fn send(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &impl Serialize,
) -> Result<(), LinkError> {
    let mut bytes = Vec::new();
    frame::push(&mut bytes, message)?;
    Ok(stream.write_all(&bytes).await?)
}

async fn receive<T: serde::de::DeserializeOwned>(
    stream: &mut (impl AsyncRead + Unpin),
    most: usize,
) -> Result<T, LinkError> {
    let mut bytes = Vec::new();
    frame::read(stream, &mut bytes, most).await?;
    frame::parse(&bytes)
}

/// The engine's side: the credit that the front end gives.
pub async fn welcome(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    secret: Option<&Secret>,
    offer: &Offer,
) -> Result<u64, LinkError> {
    greet(stream).await?;
    let own = nonce()?;
    send(stream, &Challenge { nonce: own, wants_secret: secret.is_some() }).await?;
    let Proof { nonce: other, mac, window } = receive(stream, MOST_EARLY).await?;
    if let Some(secret) = secret
        && let Err(error) = proves(secret, Side::FrontEnd, &own, &other, &mac)
    {
        send(stream, &Answer::WrongSecret).await?;
        return Err(error);
    }
    let mac = proof(secret, Side::Engine, &own, &other);
    send(stream, &Answer::Welcome { mac, offer: Box::new(offer.clone()) }).await?;
    Ok(window)
}

/// The front end's side: what the engine offers.
pub async fn introduce(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    secret: Option<&Secret>,
    window: u64,
) -> Result<Offer, LinkError> {
    greet(stream).await?;
    let Challenge { nonce: other, wants_secret } = receive(stream, MOST_EARLY).await?;
    if wants_secret && secret.is_none() {
        return Err(LinkError::NoSecret);
    }
    let own = nonce()?;
    let mac = proof(secret, Side::FrontEnd, &other, &own);
    send(stream, &Proof { nonce: own, mac, window }).await?;
    let Answer::Welcome { mac, offer } = receive(stream, MOST_OFFER).await? else {
        return Err(LinkError::Secret);
    };
    if let Some(secret) = secret {
        proves(secret, Side::Engine, &other, &own, &mac)?;
    }
    Ok(*offer)
}
