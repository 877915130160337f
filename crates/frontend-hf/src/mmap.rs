//! The one place that maps files into memory.
#![allow(
    unsafe_code,
    reason = "a file mapping is unsafe by nature; this module holds the only one"
)]

use std::fs::File;
use std::io;

use memmap2::Mmap;

/// Maps a whole file, read-only.
pub(crate) fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: the mapping is private and read-only, and nothing in this program writes to a model
    // file in place (our own writer renames a finished temporary over it, which leaves the old
    // mapping valid). What stays is what every engine that maps weights accepts: another process
    // that truncates the file while it is mapped makes reads fail with SIGBUS. Contents are only
    // ever read as bytes, so no bit pattern found in the file is invalid.
    unsafe { Mmap::map(file) }
}
