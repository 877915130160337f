// The weights of a product of few tokens as they are stored, rows of w. An `Op` names its loader `Weights`; this is
// all that the bodies in skinny.cuh know of one:
//
//   BYTES        of shared memory for a tile's step: 8 pairs of rows by 64 columns
//   Rows         which rows of TILES tiles a lane copies, four of each
//   row_of       row r of 16 of the tile of 8 pairs that begins with `pair`: first rows, then second
//   place        which of its tile's rows the first or second row of a pair is
//   fetch        tile m's columns step * 64 .. + 63 are on their way to `slot` of the ring
//   fragments    a lane's part of 32 columns of them, for two steps of the tensor cores: of the pairs' first rows
//                (a) and second (b)
//   value        one weight, of any type
//
// By value or by reference matters: what is given by value is computed before the call's text, and the compiler then
// makes another loop of it. As it is, the machine code is that of a loader written out in place.
template <class Op, int TILES> struct DenseRows {
    static constexpr bool SCALES_ROW = false;          // whether one token's activations are scaled: scaled_row.cuh
    static constexpr bool BY_LANES = false;            // activations come to shared memory as they are: k is in any order
    static constexpr int SPAN = 0;                     // and no sums of theirs are wanted
    static constexpr int BYTES = 2048;
    typedef int Rows[TILES * 4];
    __device__ __forceinline__ static int row_of(const Op& op, int r, int pair) {
        int a, b;
        op.rows(min(pair + r % 8, Op::PAIRS - 1), a, b);
        return r < 8 || b < 0 ? a : b;
    }
    __device__ __forceinline__ static int place(const Op&, int q, int second) { return second * 8 + q % 8; }
    __device__ __forceinline__ static void fetch(const Op& op, const Rows& row, int m, const u32& ring,
                                                 const int& slot, int step, const int& lane) {
        // Swizzled so that the 8 lanes of a read, two rows of 4, meet all banks.
        const int r = lane / 8, unit = lane % 8;
        const u32 to = ring + slot * BYTES + r * 128 + (unit ^ (r & 1) << 2) * 16;
#pragma unroll
        for (int i = 0; i < 4; i++)
            copy16_async(to + i * 512, op.w + (i64)row[m * 4 + i] * Op::K + step * 64 + unit * 8);
    }
    __device__ __forceinline__ static void fragments(u32 from, int half, int lane, Vec16& a, Vec16& b) {
        const int group = lane / 4, quad = lane % 4;
        const u32 at = from + group * 128 + (half ^ (group & 1)) * 64 + quad * 16;
        a = load16_shared(at), b = load16_shared(at + BYTES / 2);
    }
    __device__ __forceinline__ static float value(const Op& op, int row, int k) {
        return to_f32(op.w[(i64)row * Op::K + k]);
    }
};
