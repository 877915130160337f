//! How the planes of a cache share its memory.
//!
//! Layers that keep their rows alike form a *group*, whose sequences have block tables of their own. Groups draw
//! blocks from one pool, so that no kind of state strands another's memory: a block is at any time one group's, and
//! is as large for each. For that planes lie over one another: the cache is a number of *arrays* of rows, each of a
//! size, and every plane of a group is an array of its own, which other groups' planes are, too. So a row's address
//! is that of a plane and a slot in it, as if there were no groups, and a model of one group has an array for
//! each plane.
//!
//! A state of fixed size (`slot`) is spread over blocks instead: it lies in one array, and the blocks that a sequence holds of it are
//! filled one after another, whatever the array's rows are. So slots need no memory of their own where there are layers with rows, and
//! have an array for each plane where there are none. All slots are one group: nothing would be gained by giving a part of them back.
//!
//! (vLLM's hybrid KV manager cuts layers into groups of one size in the same way. It lets a page be a whole number of
//! blocks of the smaller kind where the bytes of rows differ; here an array is shared by rows of one size alone.)

use std::collections::BTreeMap;

use infernum_ir::StateKind;

use crate::plan::{Arg, Launch, Plan, ProgramCall, StateSpec};

/// Groups and arrays of a plan's cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheLayout {
    /// What each group keeps. There is one at least, and one of slots at most.
    pub groups: Vec<StateKind>,
    /// Blocks that a sequence's slots fill, if there are some.
    pub slot_blocks: u64,
    /// Bytes of a row of each array.
    pub arrays: Vec<u64>,
    /// Where each of [`Plan::states`] lies.
    pub planes: Vec<PlanePlace>,
}

/// Where a plane lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanePlace {
    /// Index into [`CacheLayout::groups`].
    pub group: usize,
    /// Index into [`CacheLayout::arrays`].
    pub array: usize,
    /// Of a slot: the first of its blocks, among those of its group. Others may lie before it in its array.
    pub first: u64,
}

/// Bytes that slots use of a block are a multiple of this, so that no wide access goes beyond one.
const SLOT_ALIGN: u64 = 16;

/// Bytes of a slot in one block of an array, given those of the block.
pub fn slot_bytes(block: u64) -> u64 {
    block / SLOT_ALIGN * SLOT_ALIGN
}

/// Sizes of groups that are tried beyond the smallest.
const SIZES: usize = 256;

impl CacheLayout {
    /// The layout of a plan's cache in blocks of so many rows. A ring that holds the longest sequence is no ring.
    pub fn of(plan: &Plan, block_size: usize) -> CacheLayout {
        let longest = plan.limits.s.checked_div(plan.limits.seqs).unwrap_or(0);
        CacheLayout::of_states(&plan.states, longest, block_size as u64)
    }

    /// The group of the planes that a launch works on, which are all of one. Where it has none, no kernel asks: the first group.
    pub fn group(&self, call: &ProgramCall, launch: &Launch) -> usize {
        let plane = launch.operands.iter().flatten().find_map(|value| match value.arg {
            Arg::State(slot) => call.states.get(slot as usize),
            _ => None,
        });
        plane.map_or(0, |state| self.planes[*state as usize].group)
    }

    /// Bytes of a row in all arrays.
    pub fn row_bytes(&self) -> u64 {
        self.arrays.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    fn of_states(states: &[StateSpec], longest: u64, block_size: u64) -> CacheLayout {
        let mut layout = CacheLayout::of_rows(states, longest);
        layout.place_slots(states, block_size.max(1));
        if layout.groups.is_empty() {
            layout.groups.push(StateKind::Paged);
        }
        layout
    }

    /// Slots, the largest first, each where the fewest blocks are filled.
    fn place_slots(&mut self, states: &[StateSpec], block_size: u64) {
        let mut slots: Vec<usize> = (0..states.len()).filter(|i| states[*i].ty.is_slot()).collect();
        if slots.is_empty() {
            return;
        }
        let room = |row: &u64| slot_bytes(row.saturating_mul(block_size));
        if self.arrays.iter().all(|row| room(row) == 0) {
            let rows = slots.iter().map(|i| states[*i].ty.bytes().div_ceil(block_size));
            self.arrays.extend(rows.map(|row| row.next_multiple_of(SLOT_ALIGN)));
        }
        let rooms: Vec<u64> = self.arrays.iter().map(room).collect();
        let mut filled = vec![0u64; rooms.len()];
        slots.sort_by_key(|i| (std::cmp::Reverse(states[*i].ty.bytes()), *i));
        for plane in slots {
            let bytes = states[plane].ty.bytes();
            let after = |i: &usize| filled[*i].saturating_add(bytes.div_ceil(rooms[*i]));
            let fits = (0..rooms.len()).filter(|i| rooms[*i] > 0);
            let Some(array) = fits.min_by_key(|i| (after(i), *i)) else { continue };
            let end = after(&array);
            self.planes[plane] =
                PlanePlace { group: self.groups.len(), array, first: filled[array] };
            filled[array] = end;
        }
        self.slot_blocks = filled.into_iter().max().unwrap_or(0);
        self.groups.push(StateKind::Slot);
    }

    /// Groups and arrays of what has rows.
    fn of_rows(states: &[StateSpec], longest: u64) -> CacheLayout {
        // Planes of a layer that are kept alike stay together: an op may read several of them.
        let mut kinds: Vec<StateKind> = Vec::new();
        let mut layers: Vec<BTreeMap<Option<u32>, Vec<usize>>> = Vec::new();
        for (i, state) in states.iter().enumerate().filter(|(_, s)| !s.ty.is_slot()) {
            let kind = match state.ty.kind {
                StateKind::Ring(window) if window >= longest => StateKind::Paged,
                kind => kind,
            };
            let at = kinds.iter().position(|k| *k == kind).unwrap_or_else(|| {
                kinds.push(kind);
                layers.push(BTreeMap::new());
                kinds.len() - 1
            });
            layers[at].entry(state.layer).or_default().push(i);
        }
        let layers: Vec<Vec<Vec<usize>>> =
            layers.into_iter().map(|l| l.into_values().collect()).collect();
        let counts = || layers.iter().map(Vec::len);
        let (fewest, most) = (counts().min().unwrap_or(1), counts().max().unwrap_or(1));
        let cut = |size| CacheLayout::cut(states, &kinds, &layers, size);
        // The bytes of the blocks that the longest sequence holds: what is beyond those of the planes is lost.
        let rows = |kind: &StateKind| match kind {
            StateKind::Ring(window) => *window,
            StateKind::Paged | StateKind::Slot => longest,
        };
        let taken = |l: &CacheLayout| {
            let rows = l.groups.iter().map(rows).fold(0, u64::saturating_add);
            l.row_bytes().saturating_mul(rows.max(1))
        };
        let sizes = fewest..=most.min(fewest.saturating_add(SIZES));
        sizes.map(cut).min_by_key(taken).unwrap_or_default()
    }

    /// Groups of at most `size` layers.
    fn cut(
        states: &[StateSpec],
        kinds: &[StateKind],
        layers: &[Vec<Vec<usize>>],
        size: usize,
    ) -> CacheLayout {
        let planes = vec![PlanePlace::default(); states.len()];
        let mut layout = CacheLayout { planes, ..CacheLayout::default() };
        for (kind, layers) in kinds.iter().zip(layers) {
            for group in layers.chunks(size.max(1)) {
                let mut taken = vec![false; layout.arrays.len()];
                for &plane in group.iter().flatten() {
                    let bytes = states[plane].ty.bytes();
                    let free = (0..taken.len()).find(|i| !taken[*i] && layout.arrays[*i] == bytes);
                    let array = free.unwrap_or_else(|| {
                        layout.arrays.push(bytes);
                        taken.push(false);
                        taken.len() - 1
                    });
                    taken[array] = true;
                    layout.planes[plane] =
                        PlanePlace { group: layout.groups.len(), array, first: 0 };
                }
                layout.groups.push(*kind);
            }
        }
        layout
    }
}

#[cfg(test)]
mod tests {
    use infernum_ir::{DType, StateType};

    use super::*;

    /// Planes `k` and `v` of layers of these kinds, with rows of so many elements.
    fn states(layers: &[(StateKind, u64)]) -> Vec<StateSpec> {
        let planes = layers.iter().enumerate().flat_map(|(layer, &(kind, dim))| {
            ["k", "v"].map(|plane| StateSpec {
                layer: Some(layer as u32),
                plane: plane.to_owned(),
                ty: StateType { kind, ..StateType::paged(DType::Bf16, 1, dim) },
            })
        });
        planes.collect()
    }

    /// Groups, arrays, and where each layer's `k` lies.
    fn laid_out(layers: &[(StateKind, u64)]) -> (Vec<StateKind>, usize, Vec<(usize, usize)>) {
        let layout = CacheLayout::of_states(&states(layers), 1000, 16);
        let places = layout.planes.iter().step_by(2).map(|p| (p.group, p.array));
        (layout.groups.clone(), layout.arrays.len(), places.collect())
    }

    const PAGED: (StateKind, u64) = (StateKind::Paged, 8);
    const RING: (StateKind, u64) = (StateKind::Ring(64), 8);

    #[test]
    fn one_kind_has_an_array_for_each_plane() {
        for layer in [PAGED, RING] {
            let (groups, arrays, places) = laid_out(&[layer; 3]);
            assert_eq!((groups, arrays), (vec![layer.0], 6));
            assert_eq!(places, [(0, 0), (0, 2), (0, 4)]);
        }
        assert_eq!(CacheLayout::of_states(&[], 9, 16).groups, [StateKind::Paged]);
        // It never gives anything back.
        assert_eq!(laid_out(&[PAGED, (StateKind::Ring(1000), 8)]).0, [StateKind::Paged]);
    }

    #[test]
    fn groups_lie_over_one_another() {
        let (groups, arrays, places) = laid_out(&[RING, PAGED, RING, PAGED]);
        assert_eq!((groups, arrays), (vec![RING.0, PAGED.0], 4));
        assert_eq!(places, [(0, 0), (1, 0), (0, 2), (1, 2)]);
        // Five to one: groups of as many layers as the rarer kind has.
        let mut layers = [RING; 12];
        (layers[5], layers[11]) = (PAGED, PAGED);
        let (groups, arrays, places) = laid_out(&layers);
        assert_eq!((groups.len(), arrays, places[11]), (6, 4, (5, 2)));
        // Three and four: the smaller group is filled up rather than the others cut, where that takes less: a sequence
        // of 1000 tokens has 1000 rows of the one and 64, or 900, of the others.
        let layers = |window| {
            let ring = (StateKind::Ring(window), 8);
            laid_out(&[PAGED, ring, PAGED, ring, PAGED, ring, ring])
        };
        let (groups, arrays, _) = layers(900);
        assert_eq!((groups.len(), arrays), (2, 8));
        let (groups, arrays, _) = layers(64);
        assert_eq!((groups.len(), arrays), (3, 6));
    }

    #[test]
    fn arrays_have_rows_of_one_size() {
        let layout = CacheLayout::of_states(&states(&[PAGED, (StateKind::Ring(64), 4)]), 1000, 16);
        assert_eq!(layout.arrays, [16, 16, 8, 8]);
        let arrays: Vec<usize> = layout.planes.iter().map(|p| p.array).collect();
        assert_eq!(arrays, [0, 1, 2, 3]);
    }

    /// Slots of so many bytes each, after paged planes of rows of so many.
    fn slots(rows: &[u64], slots: &[u64], block_size: u64) -> CacheLayout {
        let rows = rows.iter().map(|n| StateType::paged(DType::F8e4m3, 1, *n));
        let slots = slots.iter().map(|n| StateType::slot(DType::F8e4m3, &[*n]));
        let spec = |(i, ty): (usize, StateType)| StateSpec {
            layer: Some(i as u32),
            plane: "p".to_owned(),
            ty,
        };
        let states: Vec<StateSpec> = rows.chain(slots).enumerate().map(spec).collect();
        CacheLayout::of_states(&states, 1000, block_size)
    }

    #[test]
    fn slots_lie_over_rows_and_share_arrays() {
        // Blocks of 64 and of 128 bytes.
        let layout = slots(&[4, 8], &[640, 64, 300, 1], 16);
        assert_eq!(layout.groups, [StateKind::Paged, StateKind::Slot]);
        assert_eq!(layout.arrays, [4, 8]);
        let places: Vec<_> =
            layout.planes[2..].iter().map(|p| (p.group, p.array, p.first)).collect();
        assert_eq!(places, [(1, 1, 0), (1, 0, 5), (1, 0, 0), (1, 1, 5)]);
        assert_eq!(layout.slot_blocks, 6);
    }

    #[test]
    fn slots_alone_have_an_array_each() {
        let layout = slots(&[], &[640, 65], 16);
        assert_eq!(layout.groups, [StateKind::Slot]);
        // Rows of 40 and of 5 bytes, in multiples of 16.
        assert_eq!((layout.arrays, layout.slot_blocks), (vec![48, 16], 1));
        let places: Vec<usize> = layout.planes.iter().map(|p| p.array).collect();
        assert_eq!(places, [0, 1]);
        // Blocks that are too small to be used have others beside them.
        let layout = slots(&[3], &[32], 4);
        assert_eq!((layout.arrays, layout.slot_blocks), (vec![3, 16], 1));
        assert_eq!(layout.planes[1].array, 1);
    }
}
