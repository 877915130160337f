//! CPU compute kernels: vector loops behind safe functions on plain slices.
//!
//! Every kernel is written once, generic over `vector::Simd`, and compiled for each
//! instruction set; [`Isa`] picks the copy to run and is the proof that the CPU has it.
//!
//! AMX is left alone: hypervisors advertise it without the kernel permission that it needs
//! (`arch_prctl`), and a wrong guess is a fault, not an error.

#![allow(
    unsafe_code,
    reason = "vector intrinsics, raw weight bytes, and disjoint writes from several threads"
)]
#![allow(
    clippy::inline_always,
    reason = "a body takes its features from the function that it is inlined into"
)]

mod codes;
mod element;
mod isa;
mod linear;
mod ops;
mod threads;
mod tile;
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use codes::{Codes, Reader, Rounding, linear_codes, rounded};
pub use element::{Act, ActMut, Float, WeightError, Weights};
pub use isa::{Isa, Level};
pub use linear::{linear, linear_add};
pub use ops::{
    axpy, axpy_rows, dot, dot_rows, exp_sum, max, narrow, scale, softmax, sum_squares, widen,
    widen_bytes,
};
pub use threads::{for_each_block, for_each_chunk, with_team};

#[cfg(test)]
mod tests;

/// Asks for `rows` rows of `bytes` bytes, `stride` bytes apart, which will be read soon. Rows beyond
/// the memory are left out.
pub fn prefetch(memory: &[u8], rows: usize, bytes: usize, stride: usize) {
    #[cfg(target_arch = "x86_64")]
    for row in memory.chunks(stride.max(1)).take(rows) {
        for line in row[..bytes.min(row.len())].chunks(64) {
            // SAFETY: it reads nothing: a hint, which no address can make fault.
            unsafe {
                std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
                    line.as_ptr().cast(),
                );
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (memory, rows, bytes, stride);
}

/// Writes a byte beside or into what is only lent for reading, as a wrong kernel would: `at` bytes
/// from the start. For tests of what must catch it, on memory that they know goes on there.
#[cfg(test)]
pub(crate) fn poke(bytes: &[u8], at: isize, value: u8) {
    let address = bytes.as_ptr().expose_provenance().wrapping_add_signed(at);
    // SAFETY: unsound by purpose. The tests' memory is allocated there, nothing else runs on it, and
    // neither this address nor the callers, behind `dyn`, tell the compiler that it cannot change.
    unsafe { std::ptr::with_exposed_provenance_mut::<u8>(address).write_volatile(value) }
}
