//! Tests of the IR crate's public surface, as one binary.

mod expr;
mod interp;
mod ops;
mod random;
mod text;
mod verify;
mod windows;
