//! Random numbers that are the same everywhere for the same seed.

use infernum_ir::random;

/// A sequence of its own for every choice of `parts`.
pub(super) struct Rng(random::Rng);

impl Rng {
    pub(super) fn new(parts: &[u64]) -> Rng {
        let seed = parts.iter().fold(0, |seed, part| random::Rng::with_seed(seed).u64(..) ^ part);
        Rng(random::Rng::with_seed(seed))
    }

    /// Uniform in 0..1.
    pub(super) fn unit(&mut self) -> f64 {
        self.0.f64()
    }

    /// Uniform in 0..`bound`; 0 where the bound is 0.
    pub(super) fn below(&mut self, bound: u32) -> u32 {
        if bound == 0 { 0 } else { self.0.u32(..bound) }
    }
}
