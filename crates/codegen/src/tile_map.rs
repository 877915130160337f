//! How the copy engine is told of a matrix.

use serde::{Deserialize, Serialize};

/// How the copy engine (TMA, from sm_90 on) finds tiles of a matrix of 16-bit elements, or of codes of 8 bits: so many
/// rows of 128 bytes, laid out in shared memory with the 16-byte chunks of a row
/// exchanged by its number modulo 8, as tensor cores read them. Rows beyond the last are zero. Of packed codes of 8 bits a tile
/// is 64 columns of so many rows, a multiple of 8, in rows of 64 bytes: rows 0 and 1 of each eight, then 2 and 3, and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TileMap {
    /// Index into [`crate::Launch::named_values`].
    pub value: u32,
    /// Rows of a tile, at most [`TileMap::MOST_ROWS`].
    pub rows: u32,
    /// Whether rows are dealt: of every [`TileMap::DEALT`], a tile's row `8 j + 2 q + c` (j and q below 4, c below 2) is the
    /// matrix' row `8 q + 2 j + c`. The four threads that have a row of a tensor core's product then have eight
    /// neighbours each, where they would have four pairs. The rows of both are multiples of [`TileMap::DEALT`].
    pub dealt: bool,
}

impl TileMap {
    /// What the hardware allows.
    pub const MOST_ROWS: u32 = 256;
    /// Bytes of a row of a tile: 64 elements, or 128 codes.
    pub const ROW_BYTES: u32 = 128;
    /// Rows that are dealt among themselves.
    pub const DEALT: u32 = 32;
}
