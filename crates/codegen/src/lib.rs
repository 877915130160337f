//! From IR to plans.
