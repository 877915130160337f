//! The `infernum` command.

fn main() {}
