//! The CPU target against the reference interpreter.

mod common;
mod fused;
mod loading;
mod model;
mod ops;
