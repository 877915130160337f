// The scale of a group whose largest magnitude is `most`, and what its numbers are multiplied by: none, if they cannot be.
__device__ __forceinline__ float group_scale(float most, bool finite, float& inverse) {
    const float scale = __fdiv_rn(most, 448.0f);
    inverse = __fdiv_rn(1.0f, scale);
    if (!(finite && inverse <= 3.402823466e38f)) inverse = 0;
    return finite ? scale : __uint_as_float(0x7fc00000);
}
// The larger one, NaN if either is.
__device__ __forceinline__ float larger(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#else
    return b <= a || a != a ? a : b;
#endif
}
// Rounds numbers as a T keeps them, two at a time: the conversion of one takes four times as long.
template <class T, int N> __device__ __forceinline__ void round_as(float (&x)[N]) {
    if constexpr (sizeof(T) == 4) return;
    else {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const u32 two = pack2<T>(x[i], x[i + 1]);
            x[i] = low<T>(two), x[i + 1] = high<T>(two);
        }
    }
}
// Four codes of four columns as two words' halves: a word has a pair of columns of the upper and of the lower eight of sixteen in turn.
__device__ __forceinline__ u32 first_pair(u32 lower, u32 upper) { return __byte_perm(lower, upper, 0x1504); }
__device__ __forceinline__ u32 second_pair(u32 lower, u32 upper) { return __byte_perm(lower, upper, 0x3726); }

// Rounds a group of 128 columns to 8-bit floats: sixteen threads side by side have eight neighbours of it each, and are all there.
// crates/ir/src/encoding/quantised_rows.rs says how codes and scales are stored. `codes` is where the group begins. Gives its
// scale, NaN with a NaN or an infinity.
__device__ __forceinline__ float quantise_group(const float (&x)[8], u8* codes) {
    const u32 together = 0xffffu << threadIdx.x / 16 % 2 * 16;
    float most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) most = larger(most, fabsf(x[i]));
#pragma unroll
    for (int d = 1; d < 16; d *= 2) most = larger(most, __shfl_xor_sync(together, most, d));
    const bool finite = most <= 3.402823466e38f;
    float inverse, v[8];
    const float scale = group_scale(most, finite, inverse);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = finite ? __fmul_rn(x[i], inverse) : 0;
    // A thread has one of a sixteen's eights, gives away half of it, and stores two words. Those of the same pairs of 64 columns are
    // side by side.
    const u32 first = e4m3x2(v[0], v[1]) | e4m3x2(v[2], v[3]) << 16, second = e4m3x2(v[4], v[5]) | e4m3x2(v[6], v[7]) << 16;
    const bool upper = threadIdx.x % 2;
    const u32 other = __shfl_xor_sync(together, upper ? first : second, 1);
    const u32 low = upper ? other : first, high = upper ? second : other;
    u32* const to = (u32*)codes + threadIdx.x % 16 / 8 * 16 + upper * 8 + threadIdx.x % 8 / 2;
    to[0] = first_pair(low, high);
    to[4] = second_pair(low, high);
    return scale;
}
// The same where four lanes have a group, each the eights 2 i and 2 i + 1 for i its place and four more; all lanes of the warp are there.
// Stores nothing of a row that is `absent`.
__device__ __forceinline__ float quantise_quarters(const float (&x)[4][8], u8* codes, bool absent) {
    const int quad = threadIdx.x % 4;
    float most = 0, inverse, v[4][8];
#pragma unroll
    for (int i = 0; i < 32; i++) most = larger(most, fabsf(x[i / 8][i % 8]));
#pragma unroll
    for (int d = 1; d < 4; d *= 2) most = larger(most, __shfl_xor_sync(0xffffffffu, most, d));
    const bool finite = most <= 3.402823466e38f;
    const float scale = group_scale(most, finite, inverse);
#pragma unroll
    for (int i = 0; i < 32; i++) v[i / 8][i % 8] = __fmul_rn(x[i / 8][i % 8], inverse);
    if (!finite) {
#pragma unroll
        for (int i = 0; i < 32; i++) v[i / 8][i % 8] = 0;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 of[2][2];                                  // of the lower and of the upper eight, four columns each
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float* const four = v[half * 2 + i / 2] + i % 2 * 4;
            of[i / 2][i % 2] = e4m3x2(four[0], four[1]) | e4m3x2(four[2], four[3]) << 16;
        }
        u32 words[4] = {first_pair(of[0][0], of[1][0]), second_pair(of[0][0], of[1][0]), first_pair(of[0][1], of[1][1]), second_pair(of[0][1], of[1][1])};
        transpose4(words, quad);
        if (!absent) *(Vec16*)(codes + half * 64 + quad * 16) = Vec16{ {words[0], words[1], words[2], words[3]} };
    }
    return scale;
}
// Keeps the scale of a row's group, whose first column is `column`; one thread of the group calls. Scales lie by groups, padded to
// whole 16 bytes, which the last row fills.
__device__ __forceinline__ void store_scale(float* scales, float scale, i64 row, i64 rows, int column) {
    const i64 stride = (rows + 3) / 4 * 4;
    float* const own = scales + column / 128 * stride;
    own[row] = scale;
    for (i64 r = rows; r < stride && row == rows - 1; r++) own[r] = 0;
}
