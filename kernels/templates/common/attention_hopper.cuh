// Prefill on wgmma: GROUPS warpgroups of 64 query rows share tiles of COLS rows of the cache. While
// a warpgroup is at the softmax of tile j + 1, its tensor cores multiply tile j's probabilities with
// its values; and tiles j + 1 of V and j + 2 of K are on their way.
constexpr int THREADS = GROUPS * 128;
constexpr u32 K_BYTES = COLS * D * 2, V_BYTES = COLS * DV * 2;
static_assert(ROWS * DV <= COLS * (D + DV) * 2, "results pass through the buffers");

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
        copy16_async(qs + r / 64 * (64 * D * 2) + swizzled<64>(r % 64, c), q + (query0 + query_row(r < rows ? r : 0)) * D + c * 8, r < rows);
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

    const int group = warp / 4;
    Rows own(group * 64, tile.position);
    float s[COLS / 8][4];
    u32 p[COLS / 16][4];
    const u32 my_q = qs + group * (64 * D * 2);
    copies_wait<1>();
    fence_products();
    __syncthreads();
    wgmma_fence();
    start_scores(s, my_q, ks);
    wgmma_wait<0>();
    landed(s);
    own.softmax(s, is_edge(begin, tile.position, end), begin);
    to_operand<COLS / 8>(p, s);

    int turn = 0, base = begin + COLS;
    for (; base < end; base += COLS, turn ^= 1) {
        copies_wait<0>();
        fence_products();
        __syncthreads();                 // landed; and all are done with the last K and the V before
        wgmma_fence();
        start_scores(s, my_q, ks + (turn ^ 1) * K_BYTES);
        start_values(own.acc, p, vs + turn * V_BYTES);
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
        own.softmax(s, is_edge(base, tile.position, end), base);
{% if k_state.quantised %}
        if (base + COLS < end) keys.put(ks + turn * K_BYTES);
{% endif %}
        wgmma_wait<0>();
        landed(own.acc);
        rescale(own.acc, own.shrink);
        to_operand<COLS / 8>(p, s);
    }
    copies_wait<0>();
    fence_products();
    __syncthreads();
    wgmma_fence();
    start_values(own.acc, p, vs + turn * V_BYTES);
    wgmma_wait<0>();
    landed(own.acc);
    __syncthreads();

    own.store(shared + (ks - shared_address(shared)) + group * (64 * DV * 2), Output{ {{ output }}, step}, query0, rows,
              [&](float m, float l, int r) { return row_factor(m, l SINKS_ARG(kv * GROUP + r % GROUP)); });
}
