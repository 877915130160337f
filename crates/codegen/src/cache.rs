//! How the planes of a cache share its memory.
//!
//! Layers that keep their rows alike form a *group*, whose sequences have block tables of their own. Groups draw
//! blocks from one pool, so that no kind of state strands another's memory: a block is at any time one group's, and
//! is as large for each. For that planes lie over one another: the cache is a number of *arrays* of rows, each of a
//! size, and every plane of a group is an array of its own, which other groups' planes are, too. So a row's address
//! is that of a plane and a slot in it, as if there were no groups, and a model of one group has an array for
//! each plane.
//!
//! (vLLM's hybrid KV manager cuts layers into groups of one size in the same way. It lets a page be a whole number of
//! blocks of the smaller kind where the bytes of rows differ; here an array is shared by rows of one size alone.)

use std::collections::BTreeMap;

use infernum_ir::StateKind;

use crate::plan::{Plan, ProgramCall, StateSpec};

/// Groups and arrays of a plan's cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheLayout {
    /// How long each group's rows are kept. There is one at least.
    pub groups: Vec<StateKind>,
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
}

/// Sizes of groups that are tried beyond the smallest.
const SIZES: usize = 256;

impl CacheLayout {
    /// The layout of a plan's cache. A ring that holds the longest sequence is no ring.
    pub fn of(plan: &Plan) -> CacheLayout {
        let longest = plan.limits.s.checked_div(plan.limits.seqs).unwrap_or(0);
        CacheLayout::of_states(&plan.states, longest)
    }

    /// The group of the layer that a call runs, whose planes are all of one; the first group where it has none.
    pub fn group(&self, call: &ProgramCall) -> usize {
        call.states.first().map_or(0, |state| self.planes[*state as usize].group)
    }

    /// Bytes of a row in all arrays.
    pub fn row_bytes(&self) -> u64 {
        self.arrays.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    fn of_states(states: &[StateSpec], longest: u64) -> CacheLayout {
        // Planes of a layer that are kept alike stay together: an op may read several of them.
        let mut kinds: Vec<StateKind> = Vec::new();
        let mut layers: Vec<BTreeMap<Option<u32>, Vec<usize>>> = Vec::new();
        for (i, state) in states.iter().enumerate() {
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
            StateKind::Paged => longest,
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
        let mut layout = CacheLayout {
            groups: Vec::new(),
            arrays: Vec::new(),
            planes: vec![PlanePlace::default(); states.len()],
        };
        for (kind, layers) in kinds.iter().zip(layers) {
            for group in layers.chunks(size.max(1)) {
                let mut taken = vec![false; layout.arrays.len()];
                for &plane in group.iter().flatten() {
                    let bytes = states[plane].ty.row_bytes();
                    let free = (0..taken.len()).find(|i| !taken[*i] && layout.arrays[*i] == bytes);
                    let array = free.unwrap_or_else(|| {
                        layout.arrays.push(bytes);
                        taken.push(false);
                        taken.len() - 1
                    });
                    taken[array] = true;
                    layout.planes[plane] = PlanePlace { group: layout.groups.len(), array };
                }
                layout.groups.push(*kind);
            }
        }
        if layout.groups.is_empty() {
            layout.groups.push(StateKind::Paged);
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
        let layout = CacheLayout::of_states(&states(layers), 1000);
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
        assert_eq!(CacheLayout::of_states(&[], 9).groups, [StateKind::Paged]);
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
        let layout = CacheLayout::of_states(&states(&[PAGED, (StateKind::Ring(64), 4)]), 1000);
        assert_eq!(layout.arrays, [16, 16, 8, 8]);
        let arrays: Vec<usize> = layout.planes.iter().map(|p| p.array).collect();
        assert_eq!(arrays, [0, 1, 2, 3]);
    }
}
