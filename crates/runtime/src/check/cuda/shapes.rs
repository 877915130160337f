//! The shapes of products that are tried: each admits variants that others do not.

use infernum_ir::DType;

use super::super::Batch;
use super::super::batches::{
    DECODES, FEW, HUNDRED, HUNDREDS, LARGE, MIDDLE, SINGLE, SIXTEEN, TWO_HUNDRED,
};

/// Products by what admits their variants.
pub(super) struct Shape {
    pub(super) inputs: usize,
    /// `[H, G, D]`, which say the output channels: see `Sizes::product`.
    pub(super) heads: [usize; 3],
    pub(super) batches: &'static [&'static Batch],
    /// The variants that are tried; all where none is named.
    pub(super) variants: &'static [&'static str],
}

impl Shape {
    /// Rows of all heads' queries, keys and values.
    pub(super) fn outputs(&self) -> usize {
        let [queries, keys, size] = self.heads;
        (queries + 2 * keys) * size
    }

    /// Steps in bf16, the first in f16 and f32 as well where all variants are tried.
    pub(super) fn steps(&self) -> impl Iterator<Item = (DType, &'static Batch)> {
        let first = self.batches.first().filter(|_| self.variants.is_empty());
        let first = first.into_iter().flat_map(|b| [(DType::F16, *b), (DType::F32, *b)]);
        self.batches.iter().map(|b| (DType::Bf16, *b)).chain(first)
    }
}

/// Products of packed codes, of every encoding.
pub(super) const CODED: [Shape; 2] = [
    Shape {
        inputs: 2048,
        heads: [16, 4, 64],
        batches: &[&SINGLE, &FEW, &SIXTEEN, &LARGE, &HUNDRED],
        variants: &[],
    },
    // Parts of tiles, and half a unit of columns.
    Shape {
        inputs: 320,
        heads: [3, 1, 16],
        batches: &[&SINGLE, &FEW, &SIXTEEN, &LARGE, &HUNDREDS],
        variants: &[],
    },
];

/// Products of packed codes, of one encoding that has all that there is.
pub(super) const CODED_ONCE: [Shape; 6] = [
    // Several tiles of tokens, and of rows.
    Shape { inputs: 512, heads: [8, 1, 64], batches: &[&HUNDREDS, &TWO_HUNDRED], variants: &[] },
    Shape { inputs: 4096, heads: [3, 1, 128], batches: &[&SINGLE, &FEW, &SIXTEEN], variants: &[] },
    Shape { inputs: 8192, heads: [2, 1, 64], batches: &[&SINGLE, &FEW, &SIXTEEN], variants: &[] },
    // Tiles of whole heads.
    Shape {
        inputs: 1536,
        heads: [6, 2, 128],
        batches: &[&HUNDREDS, &TWO_HUNDRED],
        variants: EIGHTS,
    },
    Shape { inputs: 512, heads: [4, 2, 256], batches: &[&HUNDREDS], variants: EIGHTS },
    // Rows that are no whole eights.
    Shape { inputs: 256, heads: [3, 1, 10], batches: &[&FEW, &SIXTEEN], variants: &[] },
];

const EIGHTS: &[&str] = &["eights_parts2", "eights_by_64", "eights_by_128", "eights_by_256"];

/// Products of packed codes whose rows fill an H100's multiprocessors once: by tiles of 64, by halves of their columns, and by
/// taller tiles.
pub(super) const CODED_FULL: [Shape; 5] = [
    full(1024, [64, 16, 64]),
    full(2048, [48, 8, 64]),
    full(512, [96, 8, 128]),
    full(512, [152, 8, 128]),
    full(512, [208, 8, 128]),
];

const fn full(inputs: usize, heads: [usize; 3]) -> Shape {
    Shape { inputs, heads, batches: TENS, variants: FULL }
}

const TENS: &[&Batch] = &[&SIXTEEN, &LARGE];
const FULL: &[&str] = &[
    "codes16_slices",
    "codes16_slices2",
    "codes16_values",
    "codes16_values2",
    "codes16_values_tall2",
    "codes16_values_tall3",
    "codes16_values_tall4",
    "codes16_tall2",
    "codes16_tall3",
    "codes16_tall4",
    "codes64_slices",
    "codes64_slices2",
    "codes64_tall2",
    "codes64_tall3",
    "codes64_tall4",
    "eights64_slices",
    "eights64_slices2",
    "eights64_tall2",
    "eights64_tall3",
    "eights64_tall4",
];

/// Products whose results are rounded to 8 bits, in whole groups.
pub(super) const ROUNDED: [Shape; 2] = [
    Shape { inputs: 512, heads: [12, 2, 64], batches: &[&HUNDREDS, &TWO_HUNDRED], variants: &[] },
    Shape { inputs: 512, heads: [208, 8, 128], batches: &[&LARGE], variants: &["eights64_tall4"] },
];

pub(super) const SHAPES: [Shape; 13] = [
    Shape {
        inputs: 2048,
        heads: [16, 4, 64],
        batches: &[&SINGLE, &FEW, &SIXTEEN, &LARGE],
        variants: &[],
    },
    // Long rows, few of them.
    Shape {
        inputs: 8192,
        heads: [2, 1, 64],
        batches: &[&SINGLE, &FEW, &SIXTEEN, &LARGE],
        variants: &[
            "t1_deep",
            "t1_long",
            "few8",
            "few16",
            "direct8",
            "direct16",
            "t32_split8",
            "t64_split8",
            "t8_long",
            "library",
        ],
    },
    // 16M elements.
    Shape {
        inputs: 2048,
        heads: [64, 32, 64],
        batches: &[&FEW, &SIXTEEN],
        variants: &["t8", "t16"],
    },
    // Rows for every multiprocessor.
    Shape {
        inputs: 128,
        heads: [80, 10, 128],
        batches: &[&MIDDLE, &LARGE],
        variants: &["t32", "t32_split4", "t64", "t64_split4", "head128"],
    },
    // Heads that clusters part.
    Shape {
        inputs: 2048,
        heads: [10, 2, 128],
        batches: &[&SINGLE, &FEW],
        variants: &["head128_t1", "head128_t8"],
    },
    // More than fits a cache: as many rows as columns, and fewer.
    Shape {
        inputs: 2048,
        heads: [96, 2, 128],
        batches: &[&HUNDRED],
        variants: &[
            "product128",
            "product128_2",
            "chain128",
            "chain128_2",
            "chain192_2",
            "mma_128x128",
            "mma_64x128",
            "mma_128x64",
            "mma_64x64",
        ],
    },
    Shape {
        inputs: 8192,
        heads: [20, 2, 128],
        batches: &[&HUNDRED],
        variants: &["product128_split", "chain128"],
    },
    // Tiles for every pair of multiprocessors: of 128 rows, of 192, of 256.
    Shape {
        inputs: 128,
        heads: [18, 2, 128],
        batches: &[&HUNDREDS],
        variants: &["cooperative128"],
    },
    Shape {
        inputs: 192,
        heads: [24, 4, 128],
        batches: &[&HUNDREDS],
        variants: &["cooperative192"],
    },
    Shape {
        inputs: 320,
        heads: [36, 4, 128],
        batches: &[&HUNDREDS],
        variants: &["cooperative256", "chain192_2"],
    },
    // Several tiles of tokens.
    Shape {
        inputs: 512,
        heads: [8, 1, 64],
        batches: &[&DECODES],
        variants: &["mma_128x128", "mma_64x128", "mma_64x64"],
    },
    // More rows than columns.
    Shape {
        inputs: 512,
        heads: [28, 4, 64],
        batches: &[&SINGLE],
        variants: &["t1_tall", "chain_tall", "chain8"],
    },
    Shape {
        inputs: 4096,
        heads: [3, 1, 128],
        batches: &[&SINGLE, &FEW],
        variants: &["t1_small", "t1_deep", "t4", "direct8", "direct16", "head128"],
    },
];
