//! Where a sequence's state of fixed size lies: spread over blocks.

use infernum_codegen::slot_bytes;

use super::Plane;

impl Plane<'_> {
    /// The bytes of a slot in these of its group's blocks; zeros where there are none.
    pub(super) fn read_slot(&self, blocks: &[u32], block_size: usize, to: &mut [u8]) {
        if blocks.is_empty() {
            to.fill(0);
            return;
        }
        let (block, room) = self.block(block_size);
        for (part, at) in to.chunks_mut(room).zip(&blocks[self.first..]) {
            let n = part.len();
            part.copy_from_slice(&self.bytes[*at as usize * block..][..n]);
        }
    }

    /// Puts them there.
    pub(super) fn write_slot(&mut self, blocks: &[u32], block_size: usize, from: &[u8]) {
        let (block, room) = self.block(block_size);
        for (part, at) in from.chunks(room).zip(&blocks[self.first..]) {
            self.bytes[*at as usize * block..][..part.len()].copy_from_slice(part);
        }
    }

    /// Bytes of a block of its array, and how many of them slots use.
    fn block(&self, block_size: usize) -> (usize, usize) {
        let block = self.row_bytes * block_size;
        (block, slot_bytes(block as u64).max(1) as usize)
    }
}
