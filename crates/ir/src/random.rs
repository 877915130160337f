//! Random numbers for trials, measurements and tests: the same for the same name and seed, on every machine.
//! (What sampling draws by is another thing: `sampling::noise` of the runtime, which kernels compute too.)

pub use fastrand::Rng;

/// A generator of its own for every name and seed.
pub fn named(name: &str, seed: u64) -> Rng {
    let mix = |h: u64, byte: u8| (h ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    Rng::with_seed(name.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, mix))
}

/// Numbers in -1..1.
pub fn uniform(name: &str, seed: u64, n: usize) -> Vec<f64> {
    let mut rng = named(name, seed);
    (0..n).map(|_| 2.0 * rng.f64() - 1.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_depend_on_the_name_and_the_seed_alone() {
        assert_eq!(uniform("w", 1, 9), uniform("w", 1, 9));
        assert_ne!(uniform("w", 1, 9), uniform("v", 1, 9));
        assert_ne!(uniform("w", 1, 9), uniform("w", 2, 9));
        let many = uniform("w", 1, 10_000);
        assert!(many.iter().all(|x| (-1.0..1.0).contains(x)));
        assert!((many.iter().sum::<f64>() / 1e4).abs() < 0.03);
    }
}
