// Planes of the cache whose rows are codes (`f8e4m3`), each head of a row with a scale. A block of PAGE rows is the codes of
// its rows, head after head, and then their scales in the same order: what is read of a head is one piece of memory, and
// its scales are another. crates/ir/src/encoding/quantised_rows.rs says how a head is rounded.
{% include "common/e4m3.cuh" %}
// Heads and elements of a head.
template <int HEADS, int DIM> struct CodedPlane {
    static constexpr int CODES = PAGE * HEADS * DIM;                   // bytes of a block's codes
    static constexpr int BLOCK = CODES + PAGE * HEADS * 4;
    static __device__ __forceinline__ i64 block(i64 row) { return (i64)((u64)row / PAGE) * BLOCK; }
    static __device__ __forceinline__ i64 codes(i64 row, int head) {
        return block(row) + (head * PAGE + (u32)row % PAGE) * DIM;
    }
    static __device__ __forceinline__ i64 scale(i64 row, int head) {
        return block(row) + CODES + (head * PAGE + (u32)row % PAGE) * 4;
    }
};

// The scale by which the largest magnitude of a head becomes the largest code, and its inverse; 0 where all codes are zero, as they
// are where a value is not finite: then the scale is NaN.
struct HeadScale { float scale, inverse; };
__device__ __forceinline__ HeadScale head_scale(float most, bool finite) {
    const float scale = __fdiv_rn(most, 448.0f), inverse = __fdiv_rn(1.0f, scale);
    if (!finite) return {__uint_as_float(0x7fc00000), 0.0f};
    return {scale, inverse <= 3.402823466e38f ? inverse : 0.0f};
}
// The value of a code under a scale.
__device__ __forceinline__ float value_of(u32 code, float scale) {
    const u32 bits = code & 127, exponent = bits >> 3, mantissa = bits & 7;
    const float magnitude = exponent ? __uint_as_float((exponent + 120) << 23 | mantissa << 20) : (float)mantissa * 0.001953125f;
    return (code & 128 ? -magnitude : magnitude) * scale;
}

// Codes 0 and 2 of four (ODD: 1 and 3) as two floats: their bits are put where they are a number of the same mantissa, which a power
// of two then makes the right one.
template <bool ODD> __device__ __forceinline__ u32 as_bf16(u32 codes) {
    const u32 bits = (ODD ? codes >> 4 : codes << 4) & 0x07f007f0u, sign = (ODD ? codes : codes << 8) & 0x80008000u;
    u32 y = 0;
#if __CUDA_ARCH__ >= 800
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(bits | sign), "r"(0x7b807b80u), "r"(0x80008000u));
#endif
    return y;
}

// A head of D values, of which LANES neighbouring threads of a warp have N at a time, as codes: value j of pack p is that of column
// (p * LANES + lane) * N + j. The LANES threads call together.
template <int HEADS, int D, int N, int LANES, int PACKS>
__device__ __forceinline__ void store_codes(u8* plane, i64 row, int head, const float (&v)[PACKS][N]) {
    const u32 lane = threadIdx.x % LANES, together = LANES == 32 ? 0xffffffffu : ((1u << LANES % 32) - 1) << threadIdx.x % 32 / LANES * LANES;
    float most = 0.0f;
    bool finite = true;
#pragma unroll
    for (int p = 0; p < PACKS; p++)
#pragma unroll
        for (int j = 0; j < N; j++)
            if ((p * LANES + lane) * N < D) {
                most = fmaxf(most, fabsf(v[p][j]));
                finite &= fabsf(v[p][j]) <= 3.402823466e38f;
            }
#pragma unroll
    for (int d = 1; d < LANES; d *= 2) most = fmaxf(most, __shfl_xor_sync(together, most, d));
    const HeadScale scale = head_scale(most, __all_sync(together, finite));
    typedef CodedPlane<HEADS, D> Plane;
    u8* const codes = plane + Plane::codes(row, head);
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int c = (p * LANES + lane) * N;
        if (c >= D) continue;
        Pack<u8, N> out;
        if constexpr (N % 2 == 0) {
#pragma unroll
            for (int j = 0; j < N; j += 2) {
                const u32 two = e4m3x2(__fmul_rn(v[p][j], scale.inverse), __fmul_rn(v[p][j + 1], scale.inverse));
                out.v[j] = (u8)two, out.v[j + 1] = (u8)(two >> 8);
            }
        } else {
#pragma unroll
            for (int j = 0; j < N; j++) out.v[j] = (u8)e4m3(__fmul_rn(v[p][j], scale.inverse));
        }
        *(Pack<u8, N>*)(codes + c) = out;
    }
    if (lane == 0) *(float*)(plane + Plane::scale(row, head)) = scale.scale;
}
