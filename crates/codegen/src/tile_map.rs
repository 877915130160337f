//! How the copy engine is told of a matrix.

use serde::{Deserialize, Serialize};

/// How the copy engine (TMA, from sm_90 on) finds tiles of a matrix of 16-bit elements, or of codes of 8 bits: so many
/// rows of 128 bytes, laid out in shared memory with the 16-byte chunks of a row
/// exchanged by its number modulo 8, as tensor cores read them. Rows beyond the last are zero.
///
/// Of packed codes a tile is the units of so many rows, a multiple of 8, one after another as they are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TileMap {
    /// Index into [`crate::Launch::named_values`].
    pub value: u32,
    /// Rows of a tile, at most [`TileMap::MOST_ROWS`].
    pub rows: u32,
    /// Whether rows are dealt: of every [`TileMap::DEALT`], a tile's row `8 j + 2 q + c` (j and q below 4, c below 2) is the
    /// matrix' row `8 q + 2 j + c`. The four threads that have a row of a tensor core's product then have eight
    /// neighbours each, where they would have four pairs. The rows of both are multiples of [`TileMap::DEALT`].
    ///
    /// Of packed codes of 8 bits a tile is then 64 columns, whose bytes of two neighbouring rows make a line of 128 bytes: rows 0
    /// and 1 of all eights, then rows 2 and 3 of all, and so on; chunks of lines are exchanged as those of rows.
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
