//! The steps that calls are tried in.

use infernum_codegen::Bucket;
use infernum_ir::Dims;

use super::Batch;

/// Prompts in pieces, short and long ones, and decodes.
pub(super) static RAGGED: Batch = Batch {
    name: "ragged",
    buckets: &[Bucket::ALL],
    steps: &[
        &[(70, 70), (1, 1), (17, 17)],
        &[(1, 71), (33, 34), (3, 20)],
        &[(1, 72), (1, 35), (1, 21)],
        &[(2, 74), (3, 38), (40, 61)],
    ],
    limits: Dims { t: 120, b: 3, s: 300, pairs: 20_000, seqs: 3 },
};

/// For a GPU's kernels, which are chosen by the most tokens that a step may have.
pub(super) static SINGLE: Batch = Batch {
    name: "1 token",
    buckets: &[Bucket::ALL],
    steps: &[&[(1, 1)], &[(1, 2)]],
    limits: Dims { t: 1, b: 1, s: 16, pairs: 16, seqs: 1 },
};

/// As [`SINGLE`]: five and eight sequences.
pub(super) static FEW: Batch = Batch {
    name: "5 and 8 tokens",
    buckets: &[Bucket::ALL],
    steps: &[&[(1, 1); 5], &[(1, 1); 8]],
    limits: Dims { t: 8, b: 8, s: 128, pairs: 128, seqs: 8 },
};

/// As [`SINGLE`]: sixteen tokens, and nine.
pub(super) static SIXTEEN: Batch = Batch {
    name: "16 and 9 tokens",
    buckets: &[Bucket::ALL],
    steps: &[&[(14, 14), (1, 1), (1, 1)], &[(1, 15), (1, 2), (7, 8)]],
    limits: Dims { t: 16, b: 3, s: 48, pairs: 400, seqs: 3 },
};

/// As [`SINGLE`]: many sequences, but fewer than two tiles of 16 hold.
pub(super) static MIDDLE: Batch = Batch {
    name: "29 tokens",
    buckets: &[Bucket::ALL],
    steps: &[&[(1, 1); 29], &[(1, 2); 29]],
    limits: Dims { t: 32, b: 32, s: 512, pairs: 512, seqs: 32 },
};

/// As [`SINGLE`]: prompts.
pub(super) static LARGE: Batch = Batch {
    name: "64 and 18 tokens",
    buckets: &[Bucket::ALL],
    steps: &[&[(60, 60), (1, 1), (3, 3)], &[(1, 61), (16, 17), (1, 4)]],
    limits: Dims { t: 64, b: 3, s: 128, pairs: 4096, seqs: 3 },
};

/// As [`SINGLE`]: more tokens than one tile of 64.
pub(super) static HUNDRED: Batch = Batch {
    name: "94 and 95 tokens",
    buckets: &[Bucket::ALL],
    steps: &[&[(90, 90), (1, 1), (3, 3)], &[(1, 91), (64, 65), (30, 33)]],
    limits: Dims { t: 128, b: 3, s: 256, pairs: 16_384, seqs: 3 },
};

/// As [`SINGLE`]: as many tokens as the largest tile has, and fewer.
pub(super) static TWO_HUNDRED: Batch = Batch {
    name: "256 and 165 tokens",
    buckets: &[Bucket::ALL],
    steps: &[&[(242, 242), (1, 1), (13, 13)], &[(1, 243), (100, 101), (64, 77)]],
    limits: Dims { t: 256, b: 3, s: 448, pairs: 65_536, seqs: 3 },
};

/// As [`SINGLE`]: more tokens than a pair of tiles of 128, and fewer.
pub(super) static HUNDREDS: Batch = Batch {
    name: "294, 265 and 33 tokens",
    buckets: &[Bucket::ALL],
    steps: &[
        &[(280, 280), (1, 1), (13, 13)],
        &[(1, 281), (200, 201), (64, 77)],
        &[(1, 282), (30, 231), (2, 79)],
    ],
    limits: Dims { t: 640, b: 3, s: 640, pairs: 131_072, seqs: 3 },
};

/// As [`SINGLE`]: a prompt whose tiles of a few tokens are more than a GPU's multiprocessors, and its continuation.
pub(super) static LONG: Batch = Batch {
    name: "1700 and 30 tokens",
    buckets: &[Bucket::ALL],
    steps: &[&[(1700, 1700)], &[(30, 1730)]],
    limits: Dims { t: 1700, b: 1, s: 1744, pairs: 3_000_000, seqs: 1 },
};

/// Prompts, and decode steps of long and short contexts, which have kernels of their own.
pub(super) static DECODES: Batch = Batch {
    name: "prompts and decodes",
    buckets: &[Bucket::ALL, Bucket { min: 1, max: u64::MAX, decode: true }],
    steps: &[
        &[(70, 70), (1, 1), (17, 17)],
        &[(1, 71), (1, 2), (1, 18)],
        &[(330, 401), (33, 35), (2, 20)],
        &[(1, 402), (1, 36), (1, 21)],
        // In parts: two and one, and one of each.
        &[(1, 403), (1, 37), (19, 40)],
        &[(1, 404), (40, 77)],
    ],
    limits: Dims { t: 640, b: 3, s: 524, pairs: 200_000, seqs: 3 },
};
