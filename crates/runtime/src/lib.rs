//! Executes plans.

pub mod cpu;
