//! A safetensors header is read or refused, in at most twice its own length; what is read lies
//! inside the file.

#![no_main]

mod common;

use common::{Bound, bounded};
use infernum_frontend_hf::safetensors::Header;
use libfuzzer_sys::fuzz_target;

/// Beside the header's own bytes: messages quote a little of what they refuse.
const HEADER: Bound = Bound { factor: 2, slack: 16 << 10 };

fuzz_target!(|data: &[u8]| {
    // Both as a whole file, and as the header of one that is long enough.
    check(data);
    let mut file = (data.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(data);
    file.resize(file.len() + 64, 0);
    check(&file);
});

fn check(file: &[u8]) {
    let stated = file.first_chunk().map_or(0, |n| u64::from_le_bytes(*n) as usize);
    let header = stated.min(file.len());
    let read = bounded("parse", header, HEADER, || Header::parse(file).map_err(|e| e.to_string()));
    let Ok(read) = read else { return };
    for entry in read.entries() {
        assert_eq!(read.data(file, entry).len() as u64, entry.len(), "outside the file");
        assert!(read.find(file, read.name(file, entry)).is_some(), "not found by its name");
        std::hint::black_box(read.shape(entry));
    }
}
