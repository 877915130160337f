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
    const u32 first = e4m3x4(v[0], v[1], v[2], v[3]), second = e4m3x4(v[4], v[5], v[6], v[7]);
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
            of[i / 2][i % 2] = e4m3x4(four[0], four[1], four[2], four[3]);
        }
        u32 words[4] = {first_pair(of[0][0], of[1][0]), second_pair(of[0][0], of[1][0]), first_pair(of[0][1], of[1][1]), second_pair(of[0][1], of[1][1])};
        transpose4(words, quad);
        if (!absent) *(Vec16*)(codes + half * 64 + quad * 16) = Vec16{ {words[0], words[1], words[2], words[3]} };
    }
    return scale;
}
// The same by a warp that has a group, four neighbours a lane.
__device__ __forceinline__ float quantise_fours(const float (&x)[4], u8* codes) {
    const int lane = threadIdx.x % 32;
    float most = 0, inverse, v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) most = larger(most, fabsf(x[i]));
#pragma unroll
    for (int d = 1; d < 32; d *= 2) most = larger(most, __shfl_xor_sync(0xffffffffu, most, d));
    const bool finite = most <= 3.402823466e38f;
    const float scale = group_scale(most, finite, inverse);
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = finite ? __fmul_rn(x[i], inverse) : 0;
    // Lanes two apart have the same columns of a sixteen's lower and upper eight: each stores a pair of both.
    const u32 own = e4m3x4(v[0], v[1], v[2], v[3]), other = __shfl_xor_sync(0xffffffffu, own, 2);
    const bool upper = lane & 2;
    ((u32*)codes)[lane / 16 * 16 + (lane % 2 * 2 + upper) * 4 + lane / 4 % 4] = upper ? second_pair(other, own) : first_pair(own, other);
    return scale;
}
#if __CUDA_ARCH__ >= 800
// The larger ones of two pairs of 16-bit floats, NaN where either is.
__device__ __forceinline__ u32 larger2(u32 a, u32 b, bf16) {
    u32 y;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
__device__ __forceinline__ u32 larger2(u32 a, u32 b, f16) {
    u32 y;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
// As quantise_group, where a warp has PACKS packs of 32 eights, lane after lane, as pairs of T: sixteen lanes have a group of each.
// Groups of pack p begin at column(p, 0) and column(p, 1), and those from column `end` on are not there. A lane works out one group's scale for all that have
// values of it, as divisions take as long as the codes of eight. put(scale, column) gets each group's.
template <class T, int PACKS, class Column, class Put>
__device__ __forceinline__ void quantise_packs(const u32 (&x)[PACKS][4], u8* codes, int end, Column column, Put put) {
    constexpr int PAIRS = PACKS > 8 ? 8 : PACKS > 4 ? 4 : PACKS > 2 ? 2 : 1, SHARE = 16 / PAIRS;
    static_assert(PACKS <= 16, "sixteen lanes keep a pack's scale each");
    const int lane = threadIdx.x % 32;
    // The largest magnitudes of packs 2 i and 2 i + 1 are a pair. As lanes fold, they keep half of the pairs, until they have one.
    u32 most[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        u32 of[2] = {};
#pragma unroll
        for (int j = 0; j < 2 && i * 2 + j < PACKS; j++) {
            const u32(&pairs)[4] = x[i * 2 + j];
            of[j] = pairs[0] & 0x7fff7fffu;
#pragma unroll
            for (int k = 1; k < 4; k++) of[j] = larger2(of[j], pairs[k] & 0x7fff7fffu, T{});
        }
        most[i] = larger2(__byte_perm(of[0], of[1], 0x5410), __byte_perm(of[0], of[1], 0x7632), T{});
    }
#pragma unroll
    for (int d = 8, left = PAIRS / 2; d > 0; d /= 2, left /= 2) {
        if (left == 0) most[0] = larger2(most[0], __shfl_xor_sync(0xffffffffu, most[0], d), T{});
#pragma unroll
        for (int i = 0; i < left; i++) {
            const bool later = lane & d;
            const u32 other = __shfl_xor_sync(0xffffffffu, later ? most[i] : most[i + left], d);
            most[i] = larger2(later ? most[i + left] : most[i], other, T{});
        }
    }
    const float own = lane % 2 ? high<T>(most[0]) : low<T>(most[0]);
    const bool is_finite = own <= 3.402823466e38f;
    float inverse;
    const float scale = group_scale(own, is_finite, inverse);
    const u32 finite = __ballot_sync(0xffffffffu, is_finite) >> (lane & 16);
    const int kept = lane % 16 / SHARE * 2 + lane % 2;
    const int group = column(kept, lane / 16);
    if (lane % SHARE < 2 && kept < PACKS && group < end) put(scale, group);
    // A lane gives away a word for the other eight's of a sixteen, and one of those two for the neighbouring sixteen's: then it has
    // two that are side by side, and all lanes store what is.
    const bool upper = lane & 1, odd = lane & 2;
    const u32 order = upper ? 0x5140 : 0x1504;         // of first_pair, whichever of the two words is our own
    u8* const to = codes + lane % 16 / 8 * 64 + upper * 32 + odd * 16 + lane % 8 / 4 * 8;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int keeper = p / 2 * SHARE + p % 2;      // of sixteen lanes
        const float by = __shfl_sync(0xffffffffu, inverse, keeper, 16);
        u32 words[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 a = x[p][i * 2], b = x[p][i * 2 + 1];
            words[i] = e4m3x4(__fmul_rn(low<T>(a), by), __fmul_rn(high<T>(a), by), __fmul_rn(low<T>(b), by), __fmul_rn(high<T>(b), by));
            if (!(finite & 1u << keeper)) words[i] = 0;
        }
        const u32 ours = upper ? words[1] : words[0], theirs = __shfl_xor_sync(0xffffffffu, upper ? words[0] : words[1], 1);
        const u32 first = __byte_perm(ours, theirs, order), second = __byte_perm(ours, theirs, order + 0x2222);
        const u32 word = odd ? second : first, next = __shfl_xor_sync(0xffffffffu, odd ? first : second, 2);
        const int at = column(p, lane / 16);
        if (at < end) *(Pack<u32, 2>*)(to + at) = Pack<u32, 2>{ {odd ? next : word, odd ? word : next} };
    }
}
#endif
// Keeps the scale of a row's group, whose first column is `column`; one thread of the group calls. Scales lie by groups, padded to
// whole 16 bytes, which the last row fills.
__device__ __forceinline__ void store_scale(float* scales, float scale, i64 row, i64 rows, int column) {
    const i64 stride = (rows + 3) / 4 * 4;
    float* const own = scales + column / 128 * stride;
    own[row] = scale;
#pragma unroll 1
    for (i64 r = rows; r < stride && row == rows - 1; r++) own[r] = 0;
}
