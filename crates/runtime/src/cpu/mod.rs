//! The CPU target.

pub mod simd;
