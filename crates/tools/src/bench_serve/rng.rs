//! Random numbers that are the same everywhere for the same seed.

/// SplitMix64 (Steele, Lea and Flood 2014).
pub(super) struct Rng(u64);

impl Rng {
    /// A sequence of its own for every choice of `parts`.
    pub(super) fn new(parts: &[u64]) -> Rng {
        parts.iter().fold(Rng(0), |mut rng, part| Rng(rng.next() ^ part))
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in 0..1.
    pub(super) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in 0..`bound`; 0 where the bound is 0.
    pub(super) fn below(&mut self, bound: u32) -> u32 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u32
    }
}
