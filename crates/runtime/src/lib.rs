//! Executes plans.
