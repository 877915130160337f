//! Memory of the host, and disjoint parts of it in safe code.

use std::fmt;
use std::ops::Range;

use memmap2::MmapMut;

pub(crate) use crate::exec::plan_check::MAX_ARGS;

/// Zeroed host memory, aligned to pages, of which the system has each back until it is first written, and all at once when
/// this is dropped: an allocator would keep them, and write zeros to what it hands out again.
pub struct HostMemory(MmapMut);

impl HostMemory {
    /// Zeroed memory; `None` if the system has not enough.
    pub fn zeroed(bytes: usize) -> Option<HostMemory> {
        MmapMut::map_anon(bytes).ok().map(HostMemory)
    }

    /// The same in large pages, where the system has some: memory that is read from end to end in each step is found
    /// sooner so. What is written a little at a time had better not be, as each large page is there as soon as a byte of it is.
    pub fn zeroed_in_large_pages(bytes: usize) -> Option<HostMemory> {
        let memory = HostMemory::zeroed(bytes)?;
        #[cfg(target_os = "linux")]
        // A system without large pages has small ones.
        let _ = memory.0.advise(memmap2::Advice::HugePage);
        Some(memory)
    }

    /// Its contents.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Its contents.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl AsRef<[u8]> for HostMemory {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostMemory({} bytes)", self.0.len())
    }
}

/// Parts of the arena lent to one launch.
#[derive(Default)]
pub(super) struct Parts<'a> {
    reads: [Option<(usize, &'a [u8])>; MAX_ARGS],
    writes: [Option<&'a mut [u8]>; MAX_ARGS],
}

impl<'a> Parts<'a> {
    /// Lends `writes` mutably and `reads` (those that are not written) shared. `None` when two of
    /// them overlap otherwise than by being the same, or lie outside: no plan does that.
    pub(super) fn carve(
        arena: &'a mut [u8],
        reads: &[Option<Range<usize>>],
        writes: &[Option<Range<usize>>],
    ) -> Option<Parts<'a>> {
        // (start, end, position among the writes)
        let mut wanted = [(0, 0, None); 2 * MAX_ARGS];
        let mut n = 0;
        let writes = writes.iter().enumerate().filter_map(|(i, r)| Some((r.as_ref()?, Some(i))));
        let reads = reads.iter().flatten().map(|r| (r, None));
        for (range, write) in writes.chain(reads) {
            // The same read twice, or a read in place.
            if wanted[..n].iter().any(|w| w.0 == range.start && w.1 == range.end) {
                if write.is_some() {
                    return None;
                }
                continue;
            }
            *wanted.get_mut(n)? = (range.start, range.end, write);
            n += 1;
        }
        wanted[..n].sort_unstable_by_key(|w| (w.0, w.1));
        let mut parts = Parts::default();
        let (mut rest, mut at, mut read) = (arena, 0usize, 0);
        for &(start, end, write) in &wanted[..n] {
            let (_, tail) = rest.split_at_mut_checked(start.checked_sub(at)?)?;
            let (part, tail) = tail.split_at_mut_checked(end.checked_sub(start)?)?;
            (rest, at) = (tail, end);
            if let Some(i) = write {
                *parts.writes.get_mut(i)? = Some(part);
            } else {
                *parts.reads.get_mut(read)? = Some((start, part));
                read += 1;
            }
        }
        Some(parts)
    }

    /// The bytes read from `start` on; `None` if they are also written.
    pub(super) fn read(&self, start: usize) -> Option<&'a [u8]> {
        self.reads.iter().flatten().find(|r| r.0 == start).map(|r| r.1)
    }

    /// The bytes of write `i`, once.
    pub(super) fn write(&mut self, i: usize) -> Option<&'a mut [u8]> {
        self.writes.get_mut(i)?.take()
    }
}

#[cfg(test)]
mod tests {
    use super::Parts;

    #[test]
    fn parts_are_what_was_asked_for() {
        let mut arena: Vec<u8> = (0..64).collect();
        let reads = [Some(32..40), None, Some(0..8), Some(32..40), Some(16..20)];
        let mut parts = Parts::carve(&mut arena, &reads, &[Some(16..20), Some(8..16)]).expect("ok");
        assert_eq!(parts.read(32), Some(&[32, 33, 34, 35, 36, 37, 38, 39][..]));
        assert_eq!(parts.read(0).map(<[u8]>::len), Some(8));
        assert_eq!(parts.read(16), None, "it is written in place");
        assert_eq!(parts.write(1).map(|w| w[0]), Some(8));
        assert_eq!(parts.write(0).map(|w| w[0]), Some(16));
    }

    #[test]
    fn overlaps_are_refused() {
        let mut arena = vec![0; 64];
        assert!(Parts::carve(&mut arena, &[Some(0..16)], &[Some(8..24)]).is_none());
        assert!(Parts::carve(&mut arena, &[Some(60..70)], &[]).is_none());
        assert!(Parts::carve(&mut arena, &[], &[Some(0..8), Some(0..8)]).is_none());
    }
}
