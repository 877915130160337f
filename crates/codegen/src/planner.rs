//! Places buffers in the arena.

/// Every buffer begins at a multiple of this: a cache line, and the widest vector.
pub(crate) const ALIGN: u64 = 64;

/// A buffer to place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Storage {
    pub(crate) bytes: u64,
    /// The launch that first writes it.
    pub(crate) first: usize,
    /// The last launch that reads or writes it; no less than `first`.
    pub(crate) last: usize,
}

/// Gives each storage an offset from `base` on, such that those whose lifetimes meet do not
/// overlap; also returns the end of the last one.
///
/// Greedy by size: the largest first, each at the lowest place that is free over its lifetime.
pub(crate) fn place(storages: &[Storage], base: u64) -> (Vec<u64>, u64) {
    let mut order: Vec<usize> = (0..storages.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(storages[i].bytes), storages[i].first, i));
    let mut offsets = vec![base; storages.len()];
    // Placed so far, by offset.
    let mut placed: Vec<usize> = Vec::with_capacity(order.len());
    let mut end = base;
    for i in order {
        let s = storages[i];
        let mut at = base;
        for &j in &placed {
            let other = storages[j];
            let meet = s.first <= other.last && other.first <= s.last;
            if !meet {
                continue;
            }
            if offsets[j] >= at.saturating_add(s.bytes) {
                break;
            }
            at = at.max(aligned(offsets[j].saturating_add(other.bytes)));
        }
        offsets[i] = at;
        end = end.max(aligned(at.saturating_add(s.bytes)));
        let position = placed.partition_point(|&j| offsets[j] <= at);
        placed.insert(position, i);
    }
    (offsets, end)
}

/// The next multiple of [`ALIGN`], saturating.
pub(crate) fn aligned(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(ALIGN).unwrap_or(u64::MAX - ALIGN + 1)
}

#[cfg(test)]
mod tests {
    use super::{ALIGN, Storage, place};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_lives_together_lies_apart(
            raw in prop::collection::vec((0u64..5000, 0usize..40, 0usize..40), 0..60),
        ) {
            let storages: Vec<Storage> = raw
                .iter()
                .map(|&(bytes, a, b)| Storage { bytes, first: a.min(b), last: a.max(b) })
                .collect();
            let (offsets, end) = place(&storages, 128);
            for (i, a) in storages.iter().enumerate() {
                prop_assert!(offsets[i].is_multiple_of(ALIGN) && offsets[i] >= 128);
                prop_assert!(offsets[i] + a.bytes <= end);
                for (j, b) in storages.iter().enumerate().skip(i + 1) {
                    let meet = a.first <= b.last && b.first <= a.last;
                    let apart = offsets[i] + a.bytes <= offsets[j]
                        || offsets[j] + b.bytes <= offsets[i];
                    prop_assert!(!meet || apart, "{i} {a:?} and {j} {b:?}: {offsets:?}");
                }
            }
        }
    }

    #[test]
    fn a_chain_needs_two_buffers() {
        let chain: Vec<Storage> =
            (0..10).map(|i| Storage { bytes: 640, first: i, last: i + 1 }).collect();
        assert_eq!(place(&chain, 0).1, 1280);
    }
}
