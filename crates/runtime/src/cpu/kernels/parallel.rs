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

thread_local! {
    static FLOATS: [Cell<Vec<f32>>; 2] = const { [Cell::new(Vec::new()), Cell::new(Vec::new())] };
    static BYTES: Cell<Vec<u64>> = const { Cell::new(Vec::new()) };
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

/// As [`scratch`], in bytes aligned for every element type.
pub(super) fn scratch_bytes<R>(len: usize, f: impl FnOnce(&mut [u8]) -> R) -> R {
    let mut memory = BYTES.with(Cell::take);
    if memory.len() < len.div_ceil(8) {
        memory.resize(len.div_ceil(8), 0);
    }
    let result = f(&mut bytemuck::cast_slice_mut(&mut memory)[..len]);
    BYTES.with(|s| s.set(memory));
    result
}
