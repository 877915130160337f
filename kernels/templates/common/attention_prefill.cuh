// FlashAttention-2 over pages: ROWS query rows a block, RT x 16 of them a warp; tiles of COLS rows
// of the cache pass through two buffers, the next one landing while this one is used.
constexpr int WARPS = {{ p.warps }}, RT = {{ p.row_tiles }}, COLS = {{ p.cols }};
constexpr int ROWS = WARPS * RT * 16, TOKENS = ROWS / GROUP, THREADS = WARPS * 32;
constexpr int Q_ROW = D + 8, K_ROW = D + 8, V_ROW = DV + 8;   // padded: rows of a matrix load differ in banks
constexpr int Q_SIZE = ROWS * (D > DV ? D + 8 : DV + 8), K_SIZE = COLS * K_ROW, BUFFER = K_SIZE + COLS * V_ROW;
static_assert(PAGE % 16 == 0 && COLS % 16 == 0 && D % 16 == 0 && DV % 16 == 0 && GROUP <= ROWS, "");

{% include "common/attention_tiles.cuh" %}

{% if k_state.quantised %}
template <int DIM> __device__ __forceinline__ u32 place_of(int r, int c) { return (r * (DIM + 8) + c * 8) * 2; }
{% include "common/attention_code_rows.cuh" %}
{% else %}
// COLS rows of the context, of which those from `first` on and before `left` are there; zeros elsewhere. `block` is, in lane i, the cache
// row at which the i-th 16 of them begin.
template <int DIM> __device__ __forceinline__ void copy_rows(u32 to, const V* plane, int kv, int block, int first, int left) {
    constexpr int CHUNKS = DIM / 8;
#pragma unroll
    for (int j = 0; j < (COLS * CHUNKS + THREADS - 1) / THREADS; j++) {
        const int i = threadIdx.x + j * THREADS, r = i / CHUNKS, c = i % CHUNKS;
        const int row = __shfl_sync(0xffffffffu, block, r / 16 % (COLS / 16)) + r % 16;
        if (COLS * CHUNKS % THREADS == 0 || r < COLS)
            copy16_async(to + (r * (DIM + 8) + c * 8) * 2, plane + ((i64)row * HKV + kv) * DIM + c * 8, (!WINDOW || r >= first) && r < left);
    }
}
{% endif %}

extern "C" __global__ void __launch_bounds__({{ block }}) {{ kernel }}({{ params }}) {
    extern __shared__ __align__(128) u8 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv = blockIdx.x % HKV;
    const QueryTile tile = find_tile(step);
    pdl_wait();
    pdl_launch();
    if (tile.tokens == 0) return;
    const u32 qs = shared_address(shared), buffers = qs + Q_SIZE * 2;
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
    const auto copy = [&](u32 to, int block, int base) {
        copy_rows<D>(to, k_state, kv, block, seen - base, end - base);
        copy_rows<DV>(to + K_SIZE * 2, v_state, kv, block, seen - base, end - base);
        copies_commit();
    };
{% endif %}
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * (D / 8); i += THREADS) {
        const int r = i / (D / 8), c = i % (D / 8);
        copy16_async(qs + (r * Q_ROW + c * 8) * 2, q + (query0 + query_row(r < rows ? r : 0)) * D + c * 8, r < rows);
    }
{% if k_state.quantised %}
    copies_commit();
    fetch_k(block_of(begin), begin);
    keys.put(buffers);
    fetch_v(block_of(begin), begin);
    values.put(buffers + K_SIZE * 2);
{% else %}
    copy(buffers, block_of(begin), begin);
{% endif %}
    int block = block_of(begin + COLS);

    float acc[RT][DV / 8][4] = {}, m[RT][2], l[RT][2] = {};
    int position[RT][2];                                          // of the lane's rows
#pragma unroll
    for (int t = 0; t < RT; t++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            m[t][j] = minus_infinity();
            position[t][j] = tile.position + ((warp * RT + t) * 16 + lane / 4 + j * 8) / GROUP;
        }
    const u32 q_at = qs + ((warp * RT * 16 + lane % 16) * Q_ROW + lane / 16 * 8) * 2;
    // Two n8 tiles a load: matrices are (rows 0-7, k 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
    const u32 k_at = ((lane % 8 + lane / 16 * 8) * K_ROW + lane / 8 % 2 * 8) * 2;
    const u32 v_at = (K_SIZE + (lane % 16) * V_ROW + lane / 16 * 8) * 2;

    int turn = 0;
    for (int base = begin; base < end; base += COLS, turn ^= 1) {
        const u32 buffer = buffers + turn * BUFFER * 2;
        copies_wait<0>();
        __syncthreads();                                          // landed; and the other buffer is free
{% if k_state.quantised %}
        // Codes of keys wait in registers while scores are computed, those of values while these are.
        const bool more = base + COLS < end;
        const u32 next = buffers + (turn ^ 1) * BUFFER * 2;
        if (more) fetch_k(block, base + COLS);
{% else %}
        if (base + COLS < end) {
            copy(buffers + (turn ^ 1) * BUFFER * 2, block, base + COLS);
            block = block_of(base + 2 * COLS);
        }
{% endif %}
        float s[RT][COLS / 8][4] = {};
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            u32 a[RT][4];
#pragma unroll
            for (int t = 0; t < RT; t++) load_matrices(a[t], q_at + (t * 16 * Q_ROW + i * 16) * 2);
#pragma unroll
            for (int n = 0; n < COLS / 16; n++) {
                u32 b[4];
                load_matrices(b, buffer + k_at + (n * 16 * K_ROW + i * 16) * 2);
#pragma unroll
                for (int t = 0; t < RT; t++) {
                    mma(s[t][n * 2], a[t], b[0], b[1]);
                    mma(s[t][n * 2 + 1], a[t], b[2], b[3]);
                }
            }
        }
{% if k_state.quantised %}
        if (more) keys.put(next);
{% endif %}
        // Only tiles on the diagonal, at the window's edge and at the end have rows to hide.
        const bool edge = base + COLS - 1 > tile.position || (WINDOW && base <= end - 1 - WINDOW);
        u32 p[RT][COLS / 16][4];
#pragma unroll
        for (int t = 0; t < RT; t++) {
            float shrink[2];
            softmax_step(s[t], m[t], l[t], shrink, position[t], edge, base, lane);
            rescale(acc[t], shrink);
            to_operand<COLS / 8>(p[t], s[t]);
        }
{% if k_state.quantised %}
        if (more) {
            fetch_v(block, base + COLS);
            block = block_of(base + 2 * COLS);
        }
{% endif %}
#pragma unroll
        for (int n = 0; n < COLS / 16; n++)
#pragma unroll
            for (int d = 0; d < DV / 16; d++) {
                u32 b[4];
                load_matrices_transposed(b, buffer + v_at + (n * 16 * V_ROW + d * 16) * 2);
#pragma unroll
                for (int t = 0; t < RT; t++) {
                    mma(acc[t][d * 2], p[t][n], b[0], b[1]);
                    mma(acc[t][d * 2 + 1], p[t][n], b[2], b[3]);
                }
            }
{% if k_state.quantised %}
        if (more) values.put(next + K_SIZE * 2);
{% endif %}
    }
    // Through the warp's own rows of shared memory, so that 16 bytes are stored at a time.
    __syncwarp();
#pragma unroll
    for (int t = 0; t < RT; t++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int r = (warp * RT + t) * 16 + lane / 4 + j * 8;
            float sum = l[t][j];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            const float f = row_factor(m[t][j] * LOGIT, sum SINKS_ARG(kv * GROUP + r % GROUP));
#pragma unroll
            for (int d = 0; d < DV / 8; d++)
                *(u32*)(shared + (r * V_ROW + d * 8 + lane % 4 * 2) * 2) = pack_pair(acc[t][d][j * 2] * f, acc[t][d][j * 2 + 1] * f);
        }
    __syncwarp();
    const Output output{ {{ output }}, step};
#pragma unroll
    for (int t = 0; t < RT; t++) {
        const int first = (warp * RT + t) * 16;
        output.put_tile(query0, first, rows, lane, [&](int r, int c) { return load16(shared + ((first + r) * V_ROW + c * 8) * 2); });
    }
}
