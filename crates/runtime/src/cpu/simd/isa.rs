//! Which instruction set to run.

use std::sync::OnceLock;

use super::vector::{Portable, Simd};

/// Instruction sets that the kernels are compiled for, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// No intrinsics; the compiler's own vectorisation (SSE2, NEON).
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with the bf16 dot product.
    Avx512Bf16,
}

/// An instruction set that this CPU has. Only detection makes one, so that holding one is proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Isa(Level);

impl Isa {
    /// What every CPU has.
    pub const PORTABLE: Isa = Isa(Level::Portable);

    /// The highest instruction set that this CPU has, probed once.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Isa(detect()))
    }

    /// The highest available instruction set that is no higher than `level`.
    pub fn at_most(level: Level) -> Isa {
        Isa(level.min(Isa::best().0))
    }

    /// Every available instruction set, in ascending order.
    pub fn available() -> impl Iterator<Item = Isa> {
        [Level::Portable, Level::Avx2, Level::Avx512, Level::Avx512Bf16]
            .into_iter()
            .filter(|&level| level <= Isa::best().0)
            .map(Isa)
    }

    /// Whether bf16 products need no widening.
    pub(super) const fn has_bf16_dot(self) -> bool {
        matches!(self.0, Level::Avx512Bf16)
    }

    /// Which one this is.
    pub const fn level(self) -> Level {
        self.0
    }
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    let avx512 = avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512, avx512 && is_x86_feature_detected!("avx512bf16")) {
        (_, _, true) => Level::Avx512Bf16,
        (_, true, _) => Level::Avx512,
        (true, ..) => Level::Avx2,
        _ => Level::Portable,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Level {
    Level::Portable
}

/// A kernel body, generic over the vector type.
pub(super) trait Kernel {
    type Out;

    /// Implementations are `inline(always)`, so that the body is compiled with the features of
    /// the function that [`Isa::run`] calls it from.
    ///
    /// # Safety
    /// The CPU has `S`'s instructions.
    unsafe fn run<S: Simd>(self) -> Self::Out;
}

impl Isa {
    /// Runs a kernel with this instruction set.
    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        #[cfg(target_arch = "x86_64")]
        {
            use super::x86::{Avx2, Avx512};

            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2<K: Kernel>(kernel: K) -> K::Out {
                // SAFETY: the features are enabled here.
                unsafe { kernel.run::<Avx2>() }
            }
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            unsafe fn avx512<K: Kernel>(kernel: K) -> K::Out {
                // SAFETY: the features are enabled here.
                unsafe { kernel.run::<Avx512<false>>() }
            }
            #[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx512_bf16<K: Kernel>(kernel: K) -> K::Out {
                // SAFETY: the features are enabled here.
                unsafe { kernel.run::<Avx512<true>>() }
            }
            // SAFETY: `self` exists only if `detect` found the level.
            match self.0 {
                Level::Avx512Bf16 => return unsafe { avx512_bf16(kernel) },
                Level::Avx512 => return unsafe { avx512(kernel) },
                Level::Avx2 => return unsafe { avx2(kernel) },
                Level::Portable => {}
            }
        }
        // SAFETY: `Portable` needs nothing.
        unsafe { kernel.run::<Portable>() }
    }
}
