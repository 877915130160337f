//! Rewrites on the IR.
