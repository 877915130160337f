//! The CPU target against the reference interpreter.

mod common;
mod loading;
mod model;
mod ops;
