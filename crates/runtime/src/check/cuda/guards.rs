//! What a launch may not touch, for `check-kernels`: all memory is compared with what it was before.

use std::ops::Range;

use infernum_codegen::cuda::abi::PAGE;
use infernum_codegen::{Arg, Launch};
use infernum_ir::{Dims, StateType, Type};

use crate::cuda::{DeviceMemory, DeviceState, Frame, Watch};
use crate::exec::elements;

/// Bytes of each margin around activations and around planes of the cache.
const MARGIN: u64 = 1024;

/// A NaN in every float type, and no token.
const POISON: u8 = 0xff;

/// A result in the arena.
struct Written {
    range: Range<usize>,
    element: usize,
    /// Whether an operand lies there too.
    in_place: bool,
}

/// Memory as a launch finds it.
struct Before {
    arena: Vec<u8>,
    states: Vec<Vec<u8>>,
    inputs: Vec<u8>,
    results: Vec<Written>,
}

/// Compares all memory before and after each launch: one that writes anything but its results, or less
/// than all of them, fails. Very slow.
pub(super) struct Guards;

impl Watch for Guards {
    fn margin(&self) -> u64 {
        MARGIN
    }

    fn begin(&self, memory: &DeviceState<'_>) -> Result<(), String> {
        let mut all = memory.states.iter().chain([memory.arena]);
        all.try_for_each(|m| memory.stream.fill(m.address(), POISON, m.bytes() as usize))
            .map_err(|e| e.to_string())
    }

    fn around(
        &self,
        memory: &DeviceState<'_>,
        launch: &Launch,
        frame: &Frame<'_>,
        dims: &Dims,
        run: &mut dyn FnMut() -> Result<(), String>,
    ) -> Result<(), String> {
        let fence = Fence(memory);
        let before = fence.before(launch, frame, dims)?;
        run()?;
        fence.after(&before, launch, frame)
    }
}

/// The memory around one launch.
struct Fence<'a>(&'a DeviceState<'a>);

impl Fence<'_> {
    /// Poisons what the launch writes and copies everything.
    fn before(&self, launch: &Launch, frame: &Frame<'_>, dims: &Dims) -> Result<Before, String> {
        let start = |value| -> Result<usize, String> {
            Ok((frame.address(value)? - self.0.arena.address()) as usize)
        };
        let in_arena = |arg| matches!(arg, Arg::Buffer(_));
        let operands = launch.operands.iter().flatten().filter(|v| in_arena(v.arg));
        let operands = operands.map(start).collect::<Result<Vec<_>, _>>()?;
        let mut results = Vec::new();
        for value in &launch.results {
            let Type::Tensor(ty) = &value.ty else { continue };
            let (at, bytes) = (start(value)?, ty.bytes(dims) as usize);
            let in_place = operands.contains(&at);
            if !in_place {
                let address = self.0.arena.address() + at as u64;
                self.0.stream.fill(address, POISON, bytes).map_err(|e| e.to_string())?;
            }
            let element = elements::size(ty.dtype);
            results.push(Written { range: at..at + bytes, element, in_place });
        }
        let states = self.0.states.iter().map(|s| self.read(s)).collect::<Result<_, _>>()?;
        Ok(Before {
            arena: self.read(self.0.arena)?,
            states,
            inputs: self.read(self.0.inputs)?,
            results,
        })
    }

    /// Says what the launch did that it may not, and poisons what nobody reads from now on.
    fn after(&self, before: &Before, launch: &Launch, frame: &Frame<'_>) -> Result<(), String> {
        let arena = self.read(self.0.arena)?;
        outside(before, &arena)?;
        for (i, result) in before.results.iter().enumerate().filter(|(_, r)| !r.in_place) {
            let mut elements = arena[result.range.clone()].chunks(result.element);
            if let Some(at) = elements.position(|e| e.iter().all(|b| *b == POISON)) {
                return Err(format!("leaves element {at} of result {i} unwritten"));
            }
        }
        if self.read(self.0.inputs)? != before.inputs {
            return Err("writes to the step's inputs".to_owned());
        }
        for (index, (memory, old)) in self.0.states.iter().zip(&before.states).enumerate() {
            let own = launch.results.iter().find(|r| match r.arg {
                Arg::State(slot) => frame.array(slot) == Some(index),
                _ => false,
            });
            let own = own.and_then(|r| r.ty.state().ok());
            let row = frame.row_bytes(index) as i64;
            let new = self.read(memory)?;
            let changed = old.iter().zip(&new).enumerate().filter(|(_, (a, b))| a != b);
            for (at, _) in changed {
                let at = at as i64 - MARGIN as i64;
                let slot = match own {
                    Some(ty) if ty.encoding.is_some() => row_of_codes(ty, at),
                    Some(_) if row > 0 => at.div_euclid(row),
                    _ => -1,
                };
                if !self.0.slots.iter().any(|s| *s as i64 == slot) {
                    let message =
                        format!("writes byte {at} of cache {index}, which is not its own");
                    return Err(message);
                }
            }
        }
        for freed in &launch.frees {
            let (at, bytes) = frame.buffer(*freed).ok_or("a buffer is missing")?;
            self.0.stream.fill(at, POISON, bytes as usize).map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    fn read(&self, memory: &DeviceMemory) -> Result<Vec<u8>, String> {
        self.0.stream.read(memory).map_err(|e| e.to_string())
    }
}

/// The row that byte `at` of a plane of codes belongs to: blocks hold the codes of all rows, head after head, and then their scales
/// (`common/coded_cache.cuh`).
fn row_of_codes(ty: &StateType, at: i64) -> i64 {
    let (heads, dim, page) = (ty.heads() as i64, ty.dim() as i64, PAGE as i64);
    let (block, inside) =
        (at.div_euclid(page * ty.bytes() as i64), at.rem_euclid(page * ty.bytes() as i64));
    let codes = page * heads * dim;
    let row = if inside < codes { inside / dim } else { (inside - codes) / 4 };
    block * page + row % page
}

/// Fails where the arena has changed beside the results.
fn outside(before: &Before, after: &[u8]) -> Result<(), String> {
    let mut results: Vec<(usize, &Range<usize>)> =
        before.results.iter().map(|r| &r.range).enumerate().collect();
    results.sort_by_key(|(_, r)| r.start);
    let mut from = 0;
    let end = (results.len(), after.len()..after.len());
    for (i, range) in results.iter().map(|(i, r)| (*i, (*r).clone())).chain([end]) {
        let to = range.start.max(from);
        let differ = |at: &usize| before.arena[*at] != after[*at];
        if before.arena[from..to] != after[from..to] {
            let first = (from..to).find(differ).unwrap_or(from);
            let last = (from..to).rfind(differ).unwrap_or(from);
            let near = match results.iter().rfind(|(_, r)| r.end <= first) {
                Some((n, r)) => format!("{} byte(s) past the end of result {n}", first - r.end),
                None => format!("{} byte(s) before result {i}", range.start - last),
            };
            let spread = last - first + 1;
            return Err(format!("writes beside its results: {near}, within {spread} byte(s)"));
        }
        from = to.max(range.end);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_codes_and_scales_belong_to_rows() {
        let (heads, dim) = (3, 8);
        let encoding = Some(infernum_ir::encoding::quantised_rows::quantised_heads().clone());
        let ty = StateType { encoding, ..StateType::paged(infernum_ir::DType::Bf16, heads, dim) };
        let (page, block) = (PAGE as i64, PAGE as i64 * 3 * (8 + 4));
        let at = |at| row_of_codes(&ty, at);
        assert_eq!([0, 7, 8, 8 * page, block - 1].map(at), [0, 0, 1, 0, page - 1]);
        assert_eq!([3 * 8 * page, 3 * 8 * page + 4, block, -1].map(at), [0, 1, page, -1]);
    }

    #[test]
    fn a_change_beside_the_results_is_told_and_one_within_is_not() {
        let result = |range| Written { range, element: 4, in_place: false };
        let before = Before {
            arena: vec![POISON; 64],
            states: vec![],
            inputs: vec![],
            results: vec![result(32..40), result(8..16)],
        };
        let told = |at: usize| {
            let mut after = before.arena.clone();
            after[at] = 0;
            outside(&before, &after).err()
        };
        assert_eq!([8, 15, 32, 39].map(told), [const { None }; 4]);
        for (at, message) in [
            (7, "1 byte(s) before result 1, within 1 byte(s)"),
            (16, "0 byte(s) past the end of result 1, within 1 byte(s)"),
            (31, "15 byte(s) past the end of result 1, within 1 byte(s)"),
            (40, "0 byte(s) past the end of result 0, within 1 byte(s)"),
            (63, "23 byte(s) past the end of result 0, within 1 byte(s)"),
        ] {
            assert_eq!(told(at), Some(format!("writes beside its results: {message}")));
        }
    }
}
