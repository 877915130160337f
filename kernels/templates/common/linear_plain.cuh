// A matrix product in tiles of 64 x 64, of any types and sizes, on plain cores.

// y [M, N] = a [M, K] · b, where b is [N, K], or [K, N] with BY_COLUMNS; `bias` [N] may be null.
// 256 threads compute the tile at (m0, n0), a thread 4 x 4 of it.
template <bool BY_COLUMNS, class A, class B, class C, class Y>
__device__ __forceinline__ void plain_tile(const A* a, const B* b, const C* bias, Y* y,
                                           i64 M, i64 N, i64 K, i64 m0, i64 n0) {
    constexpr int TILE = 64, DEPTH = 32;
    __shared__ float as[DEPTH][TILE + 1], bs[DEPTH][TILE + 1];
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    float sum[4][4] = {};
    for (i64 k0 = 0; k0 < K; k0 += DEPTH) {
        for (int i = threadIdx.x; i < TILE * DEPTH; i += 256) {
            int k = i % DEPTH, row = i / DEPTH;
            as[k][row] = m0 + row < M && k0 + k < K ? to_f32(a[(m0 + row) * K + k0 + k]) : 0.0f;
            if (BY_COLUMNS) k = i / TILE, row = i % TILE;  // neighbouring threads read neighbours
            const bool inside = n0 + row < N && k0 + k < K;
            bs[k][row] = inside ? to_f32(b[BY_COLUMNS ? (k0 + k) * N + n0 + row : (n0 + row) * K + k0 + k]) : 0.0f;
        }
        __syncthreads();
#pragma unroll 8
        for (int k = 0; k < DEPTH; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sum[i][j] += as[k][ty + 16 * i] * bs[k][tx + 16 * j];
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const i64 m = m0 + ty + 16 * i, n = n0 + tx + 16 * j;
            if (m < M && n < N) y[m * N + n] = from_f32<Y>(sum[i][j] + (bias ? to_f32(bias[n]) : 0.0f));
        }
}
