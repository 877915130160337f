//! Fused ops, rules and encodings, read from files.
//!
//! The first two are written in the notation of specs: a body is a map from names to calls, a number stands
//! for itself, and a text is the name of a value or attribute, or an expression.

mod encodings;
pub mod fields;
mod fused;
mod kernels;
mod notation;
mod rules;
mod samples;
mod signature;
#[cfg(test)]
mod tests;
mod var_type;

pub use kernels::{DataError, Kernels};
pub use rules::{Numerics, Rule};
pub use samples::Samples;
pub use signature::Signature;
pub use var_type::{DimPattern, Sizes, VarType};
