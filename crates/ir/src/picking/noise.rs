//! The random part of sampling, the same on every target: `kernels/templates/common/noise.cuh` is
//! its other half.
//!
//! A choice is the largest sum of a token's log2 probability and its noise (the Gumbel-max trick).
//! Noise comes from counters, not from a state: a token's is a function of the seed, the position and
//! the token. So a choice depends neither on the rest of the batch nor on the order in which tokens
//! are looked at, and leaving tokens out leaves the others' noise as it is.

/// The noise of one choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noise {
    /// What differs between seeds and positions.
    pub key: [u32; 2],
}

impl Noise {
    /// Two rounds of SplitMix64's finaliser (Steele et al. 2014), whose outputs for distinct inputs are
    /// independent for our purpose.
    pub fn new(seed: u64, position: u64) -> Noise {
        let mix = |mut z: u64| {
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        };
        let step = position.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let bits = mix(mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)) ^ step);
        Noise { key: [bits as u32, (bits >> 32) as u32] }
    }

    /// 32 random bits for a token: a mixer of 32 bits (of Wellons's family), keyed at two places. Tokens of
    /// one choice never share their bits.
    pub fn bits(self, token: u32) -> u32 {
        let mut x = token.wrapping_mul(0x9e37_79b9).wrapping_add(self.key[0]);
        x = (x ^ (x >> 16)).wrapping_mul(0x21f0_aaad);
        x ^= x >> 15;
        x = (x ^ self.key[1]).wrapping_mul(0x735a_2d97);
        x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
        x ^ (x >> 16)
    }

    /// The better of `best` and a token of this log2 probability (up to a constant); of equal ones
    /// the earlier.
    pub(super) fn challenge(self, best: Option<(f64, u32)>, weight: f64, token: u32) -> (f64, u32) {
        let bits = self.bits(token);
        if let Some(best) = best {
            // Most tokens lose at their best, which needs no logarithm.
            if weight + most(bits) < best.0 {
                return best;
            }
            let score = weight + gumbel(bits);
            let wins = score > best.0 || (score == best.0 && token < best.1);
            return if wins { (score, token) } else { best };
        }
        (weight + gumbel(bits), token)
    }
}

/// `gumbel` is at most this.
fn most(bits: u32) -> f64 {
    f64::from(1 + bits.leading_zeros())
}

/// -log2 of a draw from the exponential distribution.
fn gumbel(bits: u32) -> f64 {
    let v = (f64::from(bits) + 0.5) / 4_294_967_296.0;
    -(-(-v).ln_1p()).log2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_that_kernels_compute() {
        // A kernel that computes others draws other tokens than the host.
        let noise = Noise::new(7, 3);
        assert_eq!(noise.key, [0x2343_ccd7, 0x7b8b_8a0a]);
        let bits = [0x87d9_d3b5, 0xbc83_58e3, 0xb0b6_f477];
        assert_eq!([0, 1, 128_255].map(|t| noise.bits(t)), bits);
    }

    #[test]
    fn noise_is_gumbel_distributed_within_its_bound() {
        let noise = Noise::new(1, 0);
        let n = 200_000;
        let mut below = [0.0; 4];
        // P(-log2 E < x) = exp(-2^-x).
        let at = [-1.5, 0.0, 1.0, 4.0];
        for token in 0..n {
            let bits = noise.bits(token);
            let g = gumbel(bits);
            assert!(g.is_finite() && g <= most(bits), "{g} for {bits:#x}");
            for (count, x) in below.iter_mut().zip(at) {
                *count += f64::from(u8::from(g < x)) / f64::from(n);
            }
        }
        for (found, x) in below.iter().zip(at) {
            let expected = (-(-x).exp2()).exp();
            assert!((found - expected).abs() < 0.004, "{x}: expected {expected}, found {found}");
        }
        for extreme in [0, 1, u32::MAX] {
            assert!(gumbel(extreme).is_finite() && gumbel(extreme) <= most(extreme));
        }
    }

    #[test]
    fn positions_and_seeds_are_independent() {
        // Bits of neighbours agree in half of their places.
        let far = |a: u32, b: u32| f64::from((a ^ b).count_ones());
        let n = 10_000;
        let mean = |pair: &dyn Fn(u32) -> (u32, u32)| {
            (0..n).map(pair).map(|(a, b)| far(a, b)).sum::<f64>() / f64::from(n)
        };
        let at = |seed, position, token| Noise::new(seed, position).bits(token);
        let means = [
            mean(&|i| (at(1, 0, i), at(1, 0, i + 1))),
            mean(&|i| (at(1, i.into(), 5), at(1, u64::from(i) + 1, 5))),
            mean(&|i| (at(i.into(), 0, 5), at(u64::from(i) + 1, 0, 5))),
            mean(&|i| (at(1, i.into(), i + 1), at(1, u64::from(i) + 1, i))),
        ];
        assert!(means.iter().all(|m| (m - 16.0).abs() < 0.15), "{means:?}");
    }
}
