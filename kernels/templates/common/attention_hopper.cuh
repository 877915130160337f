// Prefill on wgmma: GROUPS warpgroups of 64 query rows share tiles of COLS rows of the cache. While
// a warpgroup is at the softmax of tile j + 1, its tensor cores multiply tile j's probabilities with
// its values; and tiles j + 1 of V and j + 2 of K are on their way.
constexpr int GROUPS = {{ p.groups }}, COLS = {{ p.cols }}, THREADS = GROUPS * 128;
constexpr int ROWS = GROUPS * 64, TOKENS = ROWS / GROUP, OUT_ROW = DV + 8;
constexpr u32 Q_BYTES = ROWS * D * 2, K_BYTES = COLS * D * 2, V_BYTES = COLS * DV * 2;
static_assert(D % 64 == 0 && DV % 64 == 0 && COLS % 16 == 0 && GROUP <= ROWS, "");
static_assert(ROWS * OUT_ROW <= COLS * (D + DV) * 2, "results pass through the buffers");

{% include "common/attention_tiles.cuh" %}

// Chunk c of row r, in a tile of N rows.
template <int N> __device__ __forceinline__ u32 swizzled(int r, int c) {
    return c / 8 * (N * 128) + r * 128 + (c % 8 ^ r % 8) * 16;
}
{% if k_state.quantised %}
template <int DIM> __device__ __forceinline__ u32 place_of(int r, int c) { return swizzled<COLS>(r, c); }
{% include "common/attention_code_rows.cuh" %}
{% else %}
// COLS rows of a plane, of which those from `first` on and before `left` are there; `block` is, in lane i, the cache row at which the
// i-th 16 of them begin.
template <int DIM> __device__ __forceinline__ void copy_rows(u32 to, const V* plane, int kv, int block, int first, int left) {
    constexpr int CHUNKS = DIM / 8;
#pragma unroll
    for (int j = 0; j < (COLS * CHUNKS + THREADS - 1) / THREADS; j++) {
        const int i = threadIdx.x + j * THREADS, r = i / CHUNKS, c = i % CHUNKS;
        const int row = __shfl_sync(0xffffffffu, block, r / 16 % (COLS / 16)) + r % 16;
        if (COLS * CHUNKS % THREADS == 0 || r < COLS)
            copy16_async(to + swizzled<COLS>(r, c), plane + ((i64)row * HKV + kv) * DIM + c * 8, (!WINDOW || r >= first) && r < left);
    }
}
{% endif %}
// The warpgroup's scores against the tile at `k`.
__device__ __forceinline__ void start_scores(float (&s)[COLS / 8][4], u32 q, u32 k) {
    const u64 qs = descriptor(q, 16, 1024), ks = descriptor(k, 16, 1024);
#pragma unroll
    for (int i = 0; i < D / 16; i++)                // in 16 bytes: 64 columns are a block of rows, 16 of them 32 bytes
        score_product(s, qs + (i / 4 * (64 * 128) + i % 4 * 32) / 16, ks + (i / 4 * (COLS * 128) + i % 4 * 32) / 16, i > 0);
    wgmma_commit();
}
__device__ __forceinline__ void start_values(float (&acc)[DV / 8][4], const u32 (&p)[COLS / 16][4], u32 v) {
    const u64 vs = descriptor(v, COLS * 128, 1024);
#pragma unroll
    for (int i = 0; i < COLS / 16; i++) value_product(acc, p[i], vs + i * 16 * 128 / 16);
    wgmma_commit();
}

extern "C" __global__ void __launch_bounds__({{ block }}, {{ p.per }}) {{ kernel }}({{ params }}) {
    extern __shared__ __align__(128) u8 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv = blockIdx.x % HKV;
    const QueryTile tile = find_tile(step);
    pdl_wait();
    pdl_launch();
    if (tile.tokens == 0) return;
    const u32 qs = (shared_address(shared) + 1023) / 1024 * 1024, ks = qs + Q_BYTES, vs = ks + 2 * K_BYTES;
    const int rows = tile.tokens * GROUP, end = tile.position + tile.tokens;
    // Tiles begin at multiples of COLS counted from position 0, so that a row is summed alike in every step.
    const int seen = first_seen(tile.position), begin = seen / COLS * COLS;
    const i64 query0 = (i64)tile.token * H + kv * GROUP;         // row of q of the tile's row 0
    const auto query_row = [&](int r) { return query0 + r / GROUP * H + r % GROUP; };
    const auto block_of = [&](int base) {
        const int i = base + lane % (COLS / 16) * 16;
        return i < end ? (int)cache_row(step, tile.b, i) : 0;
    };
{% if k_state.quantised %}
    CodedRows<D> keys;
    CodedRows<DV> values;
    const auto fetch_k = [&](int block, int base) { keys.fetch(k_state, kv, block, seen - base, end - base); };
    const auto fetch_v = [&](int block, int base) { values.fetch(v_state, kv, block, seen - base, end - base); };
{% else %}
    const auto copy_k = [&](int turn, int block, int base) { copy_rows<D>(ks + turn * K_BYTES, k_state, kv, block, seen - base, end - base); };
    const auto copy_v = [&](int turn, int block, int base) { copy_rows<DV>(vs + turn * V_BYTES, v_state, kv, block, seen - base, end - base); };
{% endif %}

#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * (D / 8); i += THREADS) {
        const int r = i / (D / 8), c = i % (D / 8);
        copy16_async(qs + r / 64 * (64 * D * 2) + swizzled<64>(r % 64, c), q + query_row(r < rows ? r : 0) * D + c * 8, r < rows);
    }
    int block_v = block_of(begin), block_k = block_of(begin + COLS);
{% if k_state.quantised %}
    copies_commit();
    fetch_k(block_v, begin);
    keys.put(ks);
    fetch_v(block_v, begin);
    values.put(vs);
    if (begin + COLS < end) {
        fetch_k(block_k, begin + COLS);
        keys.put(ks + K_BYTES);
    }
    copies_wait<0>();
{% else %}
    copy_k(0, block_v, begin);
    copies_commit();
    copy_v(0, block_v, begin);
    if (begin + COLS < end) copy_k(1, block_k, begin + COLS);
    copies_commit();
{% endif %}
    block_v = block_k;
    block_k = block_of(begin + 2 * COLS);

    float acc[DV / 8][4] = {}, s[COLS / 8][4], m[2], l[2] = {}, shrink[2];
    u32 p[COLS / 16][4];
    int position[2];                                              // of the lane's rows
#pragma unroll
    for (int j = 0; j < 2; j++) {
        m[j] = minus_infinity();
        position[j] = tile.position + (warp * 16 + lane / 4 + j * 8) / GROUP;
    }
    const u32 my_q = qs + warp / 4 * (64 * D * 2);
    // Only tiles on the diagonal, at the window's edge and at the end have rows to hide.
    const auto edge = [&](int base) { return base + COLS - 1 > tile.position || (WINDOW && base <= end - 1 - WINDOW); };
    copies_wait<1>();
    fence_products();
    __syncthreads();
    wgmma_fence();
    start_scores(s, my_q, ks);
    wgmma_wait<0>();
    landed(s);
    softmax_step(s, m, l, shrink, position, edge(begin), begin, lane);
    to_operand<COLS / 8>(p, s);

    int turn = 0, base = begin + COLS;
    for (; base < end; base += COLS, turn ^= 1) {
        copies_wait<0>();
        fence_products();
        __syncthreads();                 // landed; and all are done with the last K and the V before
        wgmma_fence();
        start_scores(s, my_q, ks + (turn ^ 1) * K_BYTES);
        start_values(acc, p, vs + turn * V_BYTES);
{% if k_state.quantised %}
        // Codes of values wait in registers for the scores, those of keys for the softmax.
        fetch_v(block_v, base);
{% else %}
        copy_v(turn ^ 1, block_v, base);
        if (base + COLS < end) copy_k(turn, block_k, base + COLS);
        copies_commit();
{% endif %}
{% if k_state.quantised %}
        wgmma_wait<1>();
        landed(s);
        values.put(vs + (turn ^ 1) * V_BYTES);
        if (base + COLS < end) fetch_k(block_k, base + COLS);
        block_v = block_k;
        block_k = block_of(base + 2 * COLS);
{% else %}
        block_v = block_k;
        block_k = block_of(base + 2 * COLS);
        wgmma_wait<1>();
        landed(s);
{% endif %}
        softmax_step(s, m, l, shrink, position, edge(base), base, lane);
{% if k_state.quantised %}
        if (base + COLS < end) keys.put(ks + turn * K_BYTES);
{% endif %}
        wgmma_wait<0>();
        landed(acc);
        rescale(acc, shrink);
        to_operand<COLS / 8>(p, s);
    }
    copies_wait<0>();
    fence_products();
    __syncthreads();
    wgmma_fence();
    start_values(acc, p, vs + turn * V_BYTES);
    wgmma_wait<0>();
    landed(acc);
    __syncthreads();

    // Through shared memory, a warp its own rows, so that 16 bytes are stored at a time.
    u8* const out = shared + (ks - shared_address(shared));
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int r = warp * 16 + lane / 4 + j * 8;
        float sum = l[j];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const float f = row_factor(m[j] * LOGIT, sum SINKS_ARG(kv * GROUP + r % GROUP));
#pragma unroll
        for (int d = 0; d < DV / 8; d++)
            *(u32*)(out + (r * OUT_ROW + d * 8 + lane % 4 * 2) * 2) = pack_pair(acc[d][j * 2] * f, acc[d][j * 2 + 1] * f);
    }
    __syncwarp();
    for (int i = lane; i < 16 * (DV / 8); i += 32) {
        const int r = warp * 16 + i / (DV / 8), c = i % (DV / 8);
        if (r < rows) store16(mixed + query_row(r) * DV + c * 8, load16(out + (r * OUT_ROW + c * 8) * 2));
    }
}
