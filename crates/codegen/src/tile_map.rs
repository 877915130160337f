//! How the copy engine is told of a matrix.

use serde::{Deserialize, Serialize};

/// How the copy engine (TMA, from sm_90 on) finds tiles of a matrix of 16-bit elements: so many rows
/// of 64 columns, which is 128 bytes, laid out in shared memory with the 16-byte chunks of a row
/// exchanged by its number modulo 8, as tensor cores read them. Rows beyond the last are zero.
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
    /// Elements in a row of a tile: 128 bytes of 16-bit ones.
    pub const COLUMNS: u32 = 64;
    /// Rows that are dealt among themselves.
    pub const DEALT: u32 = 32;
}
