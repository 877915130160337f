//! Maps by which the copy engine (TMA) finds tiles of a matrix: CUDA driver API, "Tensor Map Object
//! Management".

#![allow(unsafe_code, reason = "maps are made by the driver")]

use std::cell::RefCell;
use std::collections::HashMap;

use cudarc::driver::sys;
use infernum_codegen::{Launch, TileMap};
use infernum_ir::{DType, Dim, Dims};

use super::frame::Frame;

/// What a map says of a matrix, row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Matrix {
    address: u64,
    rows: u64,
    columns: u64,
    stored: Stored,
    tile_rows: u32,
}

/// How a matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stored {
    /// As elements of 16 bits, and whether a tile's rows are dealt.
    Elements(DType, bool),
    /// As the codes of quantised rows.
    Codes,
    /// As packed codes: bytes and columns of a unit, and whether a tile's rows are dealt.
    Packed(u64, u64, bool),
}

/// Words of 64 bits that a tile has side by side, at most.
const MOST_WORDS: u64 = 256;

/// The maps that launches asked for. There are as many as there are operands read in tiles, in all
/// layers: rows are those at the plan's limits, so that steps of any size share them.
#[derive(Default)]
pub(super) struct Tiles(RefCell<HashMap<Matrix, sys::CUtensorMap>>);

impl Tiles {
    /// The maps of a launch, in the order in which its kernel takes them.
    pub(super) fn tensor_maps(
        &self,
        launch: &Launch,
        tiles: &[TileMap],
        frame: &Frame<'_>,
        limits: &Dims,
    ) -> Result<Vec<sys::CUtensorMap>, String> {
        tiles.iter().map(|tile| self.get(matrix(launch, *tile, frame, limits)?)).collect()
    }

    fn get(&self, matrix: Matrix) -> Result<sys::CUtensorMap, String> {
        if let Some(known) = self.0.borrow().get(&matrix) {
            return Ok(*known);
        }
        let map = encode(&matrix)?;
        self.0.borrow_mut().insert(matrix, map);
        Ok(map)
    }
}

fn matrix(
    launch: &Launch,
    tile: TileMap,
    frame: &Frame<'_>,
    limits: &Dims,
) -> Result<Matrix, String> {
    let value = launch.named_values().nth(tile.value as usize).and_then(|(_, v)| v);
    let value = value.ok_or("an operand read in tiles is left out")?;
    let ty = value.ty.tensor()?;
    let (columns, rows) = ty.shape.split_last().ok_or("an operand read in tiles is a scalar")?;
    let stored = match &ty.encoding {
        None => Stored::Elements(ty.dtype, tile.dealt),
        Some(encoding) => encoding
            .packing()
            .map_or(Stored::Codes, |p| Stored::Packed(p.bytes, p.columns, tile.dealt)),
    };
    Ok(Matrix {
        address: frame.address(value)?,
        rows: Dim::product_of(rows).ok_or("too many rows")?.eval(limits),
        columns: columns.eval(limits),
        stored,
        tile_rows: tile.rows,
    })
}

fn encode(matrix: &Matrix) -> Result<sys::CUtensorMap, String> {
    let Matrix { address, rows, columns, stored, tile_rows } = *matrix;
    let data_type = match stored {
        Stored::Elements(DType::Bf16, _) => {
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
        }
        Stored::Elements(DType::F16, _) => {
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16
        }
        Stored::Packed(_, _, false) => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT64,
        Stored::Codes | Stored::Packed(..) => {
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8
        }
        Stored::Elements(other, _) => {
            return Err(format!("tiles: expected bf16 or f16, found {other}"));
        }
    };
    let element = if matches!(stored, Stored::Elements(..)) { 2 } else { 1 };
    let (row, tile_columns) = (columns * element, TileMap::ROW_BYTES / element as u32);
    let n = TileMap::DEALT;
    // Dimensions from the innermost: their sizes, the bytes between neighbours of all but the first, and a tile's part.
    let (sizes, strides, tile) = match stored {
        Stored::Elements(_, true) => {
            let sizes = vec![columns, 2, 4, 4, rows / u64::from(n)];
            let strides = vec![row, 8 * row, 2 * row, u64::from(n) * row];
            (sizes, strides, vec![tile_columns, 2, 4, 4, tile_rows / n])
        }
        // A unit has eight rows by 128 columns, in two halves of 64 bytes of each row, which are four lines: lines, eights, a
        // half's lines, units.
        Stored::Packed(unit, width, true) => {
            let across = columns.div_ceil(width);
            let sizes = vec![128, rows.div_ceil(8), 8, across];
            let strides = vec![across * unit, 128, unit];
            (sizes, strides, vec![128, tile_rows / 8, 4, 1])
        }
        // Parts of a unit, units, eights. A tile has 256 elements of each at most.
        Stored::Packed(unit, width, false) => {
            let (across, words) = (columns.div_ceil(width), unit / 8);
            let part = (1..=MOST_WORDS).rev().find(|n| words % n == 0 && n % 2 == 0);
            let part = part.ok_or_else(|| format!("tiles: units of {unit} bytes"))?;
            let sizes = vec![part, words / part, across, rows.div_ceil(8)];
            let strides = vec![part * 8, unit, across * unit];
            (sizes, strides, vec![part as u32, (words / part) as u32, 1, tile_rows / 8])
        }
        _ => (vec![columns, rows], vec![row], vec![tile_columns, tile_rows]),
    };
    // Chunks of a tile's row are exchanged as tensor cores read them.
    let swizzle = match stored {
        Stored::Packed(_, _, false) => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        _ => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    let steps = vec![1u32; sizes.len()];
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: each array has an entry for each dimension, strides one less; the matrix
    // lies in memory of the GPU that outlives the executor's launches, and is not read here.
    let status = unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            data_type,
            sizes.len() as u32,
            address as *mut std::ffi::c_void,
            sizes.as_ptr(),
            strides.as_ptr(),
            tile.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    status.result().map_err(|e| format!("cuTensorMapEncodeTiled: {e:?} ({matrix:?})"))?;
    Ok(map)
}
