//! Fusion: what fires, what is refused and why, and that the meaning stays.

mod meaning;
mod prices;
mod random;
mod report;
mod shipped;
mod small;
mod support;
