//! Bytes are read as a message of a front end and of an engine, in bounded memory; what can be read is written as it
//! was meant, and read again.

#![no_main]

mod common;

use common::{Bound, bounded};
use infernum_link::{Report, ToEngine, frame};
use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// An entry of a list of a byte or two is some hundred in memory, and a list may take room for many before it is read.
const BOUND: Bound = Bound { factor: 256, slack: 8 << 20 };

fn read<T: DeserializeOwned + Serialize>(what: &str, data: &[u8]) {
    let Ok(message) = bounded(what, data.len(), BOUND, || frame::parse::<T>(data)) else { return };
    let written = |message: &T| {
        let mut bytes = Vec::new();
        frame::push(&mut bytes, message).expect("it can be written");
        bytes
    };
    let bytes = written(&message);
    let length = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
    assert_eq!(length, bytes.len() - 4);
    let again: T = frame::parse(&bytes[4..]).expect("its own message");
    assert_eq!(written(&again), bytes);
}

fuzz_target!(|data: &[u8]| {
    read::<ToEngine>("to an engine", data);
    read::<Report>("of an engine", data);
});
