//! Sharing rows among threads, and scratch memory.

use std::cell::Cell;

use crate::cpu::simd::for_each_chunk;

/// Below this much work (about one multiply-add each), waking a thread costs more than it saves.
const SERIAL: usize = 1 << 16;

/// Calls `f(row, bytes)` for every row of `out`; `work` is what one row costs.
pub(super) fn rows<F>(out: &mut [u8], row_bytes: usize, work: usize, f: F)
where
    F: Fn(usize, &mut [u8]) + Sync,
{
    if row_bytes == 0 || out.is_empty() {
        return;
    }
    let rows = out.len().div_ceil(row_bytes);
    let threads = rayon::current_num_threads();
    if threads == 1 || rows == 1 || rows.saturating_mul(work) < SERIAL {
        out.chunks_mut(row_bytes).enumerate().for_each(|(i, row)| f(i, row));
        return;
    }
    // A few parts a thread, so that a late one is helped out.
    let part = rows.div_ceil(threads * 4).max((SERIAL / 4).div_ceil(work.max(1))).min(rows);
    for_each_chunk(out, part * row_bytes, |p, chunk| {
        for (i, row) in chunk.chunks_mut(row_bytes).enumerate() {
            f(p * part + i, row);
        }
    });
}

/// As [`rows`], over the rows of two results together.
pub(super) fn rows_of_two<F>(
    (a, a_bytes): (&mut [u8], usize),
    (b, b_bytes): (&mut [u8], usize),
    work: usize,
    f: F,
) where
    F: Fn(usize, &mut [u8], &mut [u8]) + Sync,
{
    const PARTS: usize = 64;
    if a_bytes == 0 || b_bytes == 0 {
        return;
    }
    let count = a.len().div_ceil(a_bytes);
    let parallel = rayon::current_num_threads() > 1 && count.saturating_mul(work) >= SERIAL;
    let part = count.div_ceil(if parallel { PARTS } else { 1 }).max(1);
    let mut parts = [const { None }; PARTS];
    let chunks = a.chunks_mut(part * a_bytes).zip(b.chunks_mut(part * b_bytes));
    let mut used = 0;
    for (slot, chunk) in parts.iter_mut().zip(chunks) {
        *slot = Some(chunk);
        used += 1;
    }
    for_each_chunk(&mut parts[..used], 1, |p, chunks| {
        let Some(Some((a, b))) = chunks.first_mut() else { return };
        for (i, (a, b)) in a.chunks_mut(a_bytes).zip(b.chunks_mut(b_bytes)).enumerate() {
            f(p * part + i, a, b);
        }
    });
}

thread_local! {
    static FLOATS: [Cell<Vec<f32>>; 4] = const { [const { Cell::new(Vec::new()) }; 4] };
    static BYTES: [Cell<Vec<u64>>; 2] = const { [Cell::new(Vec::new()), Cell::new(Vec::new())] };
}

/// Scratch memory of this thread, with any contents. Nested calls need different `which`.
pub(super) fn scratch<R>(which: usize, len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    // Taken out while in use: a thread that waits for its pool may run another kernel's part.
    let mut memory = FLOATS.with(|s| s[which].take());
    if memory.len() < len {
        memory.resize(len, 0.0);
    }
    let result = f(&mut memory[..len]);
    FLOATS.with(|s| s[which].set(memory));
    result
}

/// As [`scratch`] number 0, in bytes aligned for every element type.
pub(super) fn scratch_bytes<R>(len: usize, f: impl FnOnce(&mut [u8]) -> R) -> R {
    bytes(0, len, f)
}

/// More of it, within a [`scratch_bytes`].
pub(super) fn inner_scratch_bytes<R>(len: usize, f: impl FnOnce(&mut [u8]) -> R) -> R {
    bytes(1, len, f)
}

fn bytes<R>(which: usize, len: usize, f: impl FnOnce(&mut [u8]) -> R) -> R {
    let mut memory = BYTES.with(|s| s[which].take());
    if memory.len() < len.div_ceil(8) {
        memory.resize(len.div_ceil(8), 0);
    }
    let result = f(&mut bytemuck::cast_slice_mut(&mut memory)[..len]);
    BYTES.with(|s| s[which].set(memory));
    result
}
