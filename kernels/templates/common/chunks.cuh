// What kernels share that compute a recurrence in chunks of tokens, by products on tensor cores (sm_80 and later). Sums are in f32; what is not in 16
// bits already comes to tensor cores as two of them, its value rounded and what is left of it, so that 16 bits of a mantissa count.
{% include "common/power.cuh" %}
// Two floats as two pairs.
__device__ __forceinline__ void split(float a, float b, u32& high_part, u32& low_part) {
    high_part = pack_pair(a, b);
    low_part = pack_pair(a - low<bf16>(high_part), b - high<bf16>(high_part));
}
// A left operand in two parts: 16 rows by 16 columns.
struct Left { u32 high_part[4], low_part[4]; };
// That of the sums of two products side by side, which have their columns where a left operand has them.
__device__ __forceinline__ Left left_of(const float (&a)[4], const float (&b)[4]) {
    Left x;
    split(a[0], a[1], x.high_part[0], x.low_part[0]);
    split(a[2], a[3], x.high_part[1], x.low_part[1]);
    split(b[0], b[1], x.high_part[2], x.low_part[2]);
    split(b[2], b[3], x.high_part[3], x.low_part[3]);
    return x;
}
// What a left operand stands for, each column times a factor: of a lane's columns 2i, 2i + 1, 2i + 8 and 2i + 9.
__device__ __forceinline__ Left scaled(const Left& x, float2 near, float2 far) {
    Left y;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 a = x.high_part[i], b = x.low_part[i];
        const float2 by = i < 2 ? near : far;
        split((low<bf16>(a) + low<bf16>(b)) * by.x, (high<bf16>(a) + high<bf16>(b)) * by.y, y.high_part[i], y.low_part[i]);
    }
    return y;
}
// c[16, 16] += x[16, 16] y[16, 16], of a y that is exact in 16 bits.
__device__ __forceinline__ void multiply(float (&c)[4], float (&d)[4], const Left& x, const u32 (&y)[4]) {
    mma(c, x.high_part, y[0], y[1]);
    mma(d, x.high_part, y[2], y[3]);
    mma(c, x.low_part, y[0], y[1]);
    mma(d, x.low_part, y[2], y[3]);
}
// Two such products of one left operand: no sum waits for the one before it.
__device__ __forceinline__ void multiply(float (&c)[4], float (&d)[4], float (&e)[4], float (&f)[4], const Left& x, const u32 (&y)[4], const u32 (&z)[4]) {
    mma(c, x.high_part, y[0], y[1]);
    mma(d, x.high_part, y[2], y[3]);
    mma(e, x.high_part, z[0], z[1]);
    mma(f, x.high_part, z[2], z[3]);
    mma(c, x.low_part, y[0], y[1]);
    mma(d, x.low_part, y[2], y[3]);
    mma(e, x.low_part, z[0], z[1]);
    mma(f, x.low_part, z[2], z[3]);
}
// Products whose right operand is in two parts, too. Those with a low part are added up apart, for the same reason; that of both low parts counts for
// nothing.
struct Sums {
    float of_low[2][4] = {}, by_low[2][4] = {};
    __device__ __forceinline__ void add(float (&c)[4], float (&d)[4], const Left& x, const u32 (&y)[4], const u32 (&y_low)[4]) {
        mma(c, x.high_part, y[0], y[1]);
        mma(d, x.high_part, y[2], y[3]);
        mma(of_low[0], x.low_part, y[0], y[1]);
        mma(of_low[1], x.low_part, y[2], y[3]);
        mma(by_low[0], x.high_part, y_low[0], y_low[1]);
        mma(by_low[1], x.high_part, y_low[2], y_low[3]);
    }
    __device__ __forceinline__ void close(float (&c)[4], float (&d)[4]) const {
#pragma unroll
        for (int e = 0; e < 4; e++) c[e] += of_low[0][e] + by_low[0][e], d[e] += of_low[1][e] + by_low[1][e];
    }
};
// Where a lane's row of four 8x8 matrices is in a row-major array of `width` columns: by `rows_first`, of 16 rows by 16 columns the second matrix is
// below the first, else beside it.
template <bool ROWS_FIRST> __device__ __forceinline__ u32 matrix_at(u32 base, int width, int row, int column) {
    const int lane = threadIdx.x % 32, down = ROWS_FIRST ? lane / 8 % 2 : lane / 16, right = ROWS_FIRST ? lane / 16 : lane / 8 % 2;
    return base + ((row + down * 8 + lane % 8) * width + column + right * 8) * 2;
}
// Of the logarithms (base 2) of a chunk's decays, token n * 32 + i in lane i, the sums up to each; and the sign of the product of decays that are negative.
template <int PER> __device__ __forceinline__ void decays(float (&log)[PER], const bool (&negative)[PER], float (&sign)[PER]) {
    const int lane = threadIdx.x % 32;
    float before = 0;
    u32 odd = 0;
#pragma unroll
    for (int n = 0; n < PER; n++) {
        float x = log[n];
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const float other = __shfl_up_sync(0xffffffffu, x, d);
            if (lane >= d) x += other;
        }
        const u32 all = __ballot_sync(0xffffffffu, negative[n]);
        sign[n] = (__popc(all & (0xffffffffu >> (31 - lane))) + odd) % 2 ? -1.0f : 1.0f;
        log[n] = x + before;
        before += __shfl_sync(0xffffffffu, x, 31);
        odd += __popc(all);
    }
}
