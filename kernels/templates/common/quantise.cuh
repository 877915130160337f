// Rounds a group of 128 columns to 8-bit floats: sixteen threads side by side have eight neighbours of it each, and are all there.
// crates/ir/src/encoding/quantised_rows.rs says how codes and scales are stored. `codes` is where the group begins. Gives its
// scale, NaN with a NaN or an infinity.
__device__ __forceinline__ float quantise_group(const float (&x)[8], u8* codes) {
    const u32 together = 0xffffu << threadIdx.x / 16 % 2 * 16;
    float most = 0;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        most = fmaxf(most, fabsf(x[i]));
        finite &= fabsf(x[i]) <= 3.402823466e38f;
    }
#pragma unroll
    for (int d = 1; d < 16; d *= 2) most = fmaxf(most, __shfl_xor_sync(together, most, d));
    finite = __all_sync(together, finite);
    const float scale = __fdiv_rn(most, 448.0f);
    float inverse = __fdiv_rn(1.0f, scale);
    if (!(finite && inverse <= 3.402823466e38f)) inverse = 0;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = finite ? __fmul_rn(x[i], inverse) : 0;
    // A word has a pair of columns of the upper and of the lower eight of sixteen in turn: a thread has one of the eights, gives
    // away half of it, and stores two words. Those of the same pairs of 64 columns are side by side.
    const u32 first = e4m3x2(v[0], v[1]) | e4m3x2(v[2], v[3]) << 16, second = e4m3x2(v[4], v[5]) | e4m3x2(v[6], v[7]) << 16;
    const bool upper = threadIdx.x % 2;
    const u32 other = __shfl_xor_sync(together, upper ? first : second, 1);
    const u32 low = upper ? other : first, high = upper ? second : other;
    u32* const to = (u32*)codes + threadIdx.x % 16 / 8 * 16 + upper * 8 + threadIdx.x % 8 / 2;
    to[0] = __byte_perm(low, high, 0x1504);
    to[4] = __byte_perm(low, high, 0x3726);
    return finite ? scale : __uint_as_float(0x7fc00000);
}
// Keeps the scale of a row's group, whose first column is `column`; one thread of the group calls. Scales lie by groups, padded to
// whole 16 bytes, which the last row fills.
__device__ __forceinline__ void store_scale(float* scales, float scale, i64 row, i64 rows, int column) {
    const i64 stride = (rows + 3) / 4 * 4;
    float* const own = scales + column / 128 * stride;
    own[row] = scale;
    for (i64 r = rows; r < stride && row == rows - 1; r++) own[r] = 0;
}
