// Tiles of the cache whose rows are elements of the queries' type: how they come to shared memory, and to tensor cores.
constexpr int K_ROW = D + 8, V_ROW = DV + 8;       // padded: the 8 rows of a matrix load differ in banks
constexpr int K_TILE = TILE * K_ROW, STAGE = 2 * (K_TILE + TILE * V_ROW);   // a stage in bytes
static_assert(D % 16 == 0 && DV % 16 == 0, "");

// DIM elements of each of a tile's rows, from a plane to shared memory; zeros from `rows` on.
template <int DIM> __device__ __forceinline__ void copy_tile(u32 to, const V* plane, int row, int rows, int head, int lane) {
    constexpr int CHUNKS = DIM / 8;
    const V* from = plane + ((i64)row * HKV + head) * DIM;
#pragma unroll
    for (int j = 0; j < (TILE * CHUNKS + 31) / 32; j++) {
        const int i = lane + 32 * j, r = i / CHUNKS, c = i % CHUNKS;
        if (TILE * CHUNKS % 32 == 0 || i < TILE * CHUNKS)
            copy16_async(to + (r * (DIM + 8) + c * 8) * 2, from + (i64)r * HKV * DIM + c * 8, r < rows);
    }
}
template <int DIM> __device__ __forceinline__ void prefetch_tile(const V* plane, int row, int rows, int head, int lane) {
    constexpr int LINES = (DIM * 2 + 127) / 128;
    for (int i = lane; i < TILE * LINES; i += 32)
        if (i / LINES < rows) prefetch_l2(plane + ((i64)(row + i / LINES) * HKV + head) * DIM + i % LINES * 64);
}
__device__ __forceinline__ void prefetch(const V* k_state, const V* v_state, int row, int rows, int head, int lane) {
    prefetch_tile<D>(k_state, row, rows, head, lane);
    prefetch_tile<DV>(v_state, row, rows, head, lane);
}
__device__ __forceinline__ void copy_stage(u32 to, const V* k_state, const V* v_state, int row, int rows, int head, int lane) {
    copy_tile<D>(to, k_state, row, rows, head, lane);
    copy_tile<DV>(to + K_TILE * 2, v_state, row, rows, head, lane);
}

// What rows are to be multiplied by: nothing.
struct Scales {
    __device__ __forceinline__ Scales(u32, int, int, int) {}
    __device__ __forceinline__ float key(int) const { return 1.0f; }
    __device__ __forceinline__ float value(int) const { return 1.0f; }
};

// Query heads of a KV head as the 8 side of the products; those beyond the group are zeros.
__device__ __forceinline__ void load_query(u32 (&query)[NT][D / 16][2], const Q* q, int lane) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const int head = n * 8 + lane / 4;
#pragma unroll
        for (int i = 0; i < D / 16; i++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                query[n][i][j] = head < GROUP ? *(const u32*)(q + head * D + i * 16 + j * 8 + lane % 4 * 2) : 0;
    }
}

// s += K q' of a tile, in two sums: half the chain of dependent products.
__device__ __forceinline__ void add_scores(float (&s)[2][NT][4], u32 stage, const u32 (&query)[NT][D / 16][2], int lane) {
    const u32 k = stage + ((lane % 16) * K_ROW + lane / 16 * 8) * 2;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        u32 a[4];
        load_matrices(a, k + i * 32);
#pragma unroll
        for (int n = 0; n < NT; n++) mma(s[i % 2][n], a, query[n][i][0], query[n][i][1]);
    }
}
// Probabilities, of which rows are the 16 side of the next product.
struct Probabilities {
    u32 p[NT][2];
    __device__ __forceinline__ void set(int n, const float (&s)[4]) {
        p[n][0] = transpose8x8(pack_pair(s[0], s[1]));
        p[n][1] = transpose8x8(pack_pair(s[2], s[3]));
    }
};
// acc += V' p.
__device__ __forceinline__ void add_values(float (&acc)[DV / 16][NT][4], u32 stage, const Probabilities& p, int lane) {
    const u32 v = stage + (K_TILE + (lane % 8 + lane / 16 * 8) * V_ROW + lane / 8 % 2 * 8) * 2;
#pragma unroll
    for (int d = 0; d < DV / 16; d++) {
        u32 a[4];
        load_matrices_transposed(a, v + d * 32);
#pragma unroll
        for (int n = 0; n < NT; n++) mma(acc[d][n], a, p.p[n][0], p.p[n][1]);
    }
}
// The column of 16 that a lane's sums 0 and 1 are of, and the one that 2 and 3 are of.
__device__ __forceinline__ int column_of(int half, int lane) { return lane / 4 + half * 8; }
