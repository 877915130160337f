// Attention to latents on wgmma: 64 rows of queries by two warpgroups. Each has the scores of half of a tile's columns and the
// sums of half of the latents' columns; row maxima and probabilities pass through shared memory. While one tile is used,
// the next one lands.
{% include "common/wgmma.cuh" %}
constexpr int HALF = COLS / 2, NV = R / 2;
constexpr u32 Q_BYTES = ROWS * D * 2, TILE_BYTES = COLS * D * 2, P_BYTES = ROWS * COLS * 2;
static_assert(ROWS == 64 && COLS == 64 && WARPS == 8 && R % 128 == 0 && NV <= 256 && P % 64 == 0, "");

// Chunk c of row r, in tiles of 64 rows.
__device__ __forceinline__ u32 swizzled(int r, int c) { return c / 8 * (64 * 128) + r * 128 + (c % 8 ^ r % 8) * 16; }

// s[64, HALF] = (add ? s : 0) + q[64, 16] k[HALF, 16]'
{% set n = p.cols // 4 %}
__device__ __forceinline__ void score_product(float (&s)[HALF / 8][4], u64 q, u64 k, int add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %{{ n + 2 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ p.cols // 2 }}k16.f32.{{ q.type }}.{{ q.type }} { {% for i in range(n) %}%{{ i }}{{ "" if loop.last else ", " }}{% endfor %} }, "
                 "%{{ n }}, %{{ n + 1 }}, p, 1, 1, 0, 0; }\n"
                 : {% for i in range(n) %}"+f"(s[{{ i // 4 }}][{{ i % 4 }}]){{ "" if loop.last else ", " }}{% endfor %}

                 : "l"(q), "l"(k), "r"(add));
}
// acc[64, NV] += p[64, 16] v[16, NV]
{% set n = latents.dim // 4 %}
__device__ __forceinline__ void value_product(float (&acc)[NV / 8][4], u64 p, u64 v) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n{{ latents.dim // 2 }}k16.f32.{{ q.type }}.{{ q.type }} { {% for i in range(n) %}%{{ i }}{{ "" if loop.last else ", " }}{% endfor %} }, "
                 "%{{ n }}, %{{ n + 1 }}, 1, 1, 1, 0, 1;\n"
                 : {% for i in range(n) %}"+f"(acc[{{ i // 4 }}][{{ i % 4 }}]){{ "" if loop.last else ", " }}{% endfor %}

                 : "l"(p), "l"(v));
}

struct Attend {
    float acc[NV / 8][4];
    u32 qs, tiles, probs;
    float* tops;                                      // [2, ROWS]: a row's maximum in each half, at the end its sums
    float2* ends;
    const int lane = threadIdx.x % 32, half = threadIdx.x / 128, row0 = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;

    // Shared memory: up to 1023 bytes until operands are aligned, which are followed by what is kept of rows.
    __device__ __forceinline__ explicit Attend(u8* shared) {
        const u32 base = shared_address(shared);
        qs = (base + 1023) / 1024 * 1024, tiles = qs + Q_BYTES, probs = tiles + 2 * TILE_BYTES;
        tops = (float*)(shared + (probs + P_BYTES - base)), ends = (float2*)(tops + 2 * ROWS);
    }
    // Maximum (base 2) and sum of a row's softmax, once `run` is done.
    __device__ __forceinline__ float2 end(int r) const { return ends[r]; }
    // Calls f(row, column, x, y) for the sums that this thread has, of two columns side by side.
    template <class F> __device__ __forceinline__ void each(F f) const {
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int d = 0; d < NV / 8; d++)
                f(row0 + j * 8, half * NV + d * 8 + lane % 4 * 2, acc[d][j * 2], acc[d][j * 2 + 1]);
    }
    // One step of the softmax of the half's scores; rows are those of mma's results: row0 and row0 + 8.
    __device__ __forceinline__ void softmax(const Work& work, int tile, float (&s)[HALF / 8][4], float (&m)[2], float (&l)[2]) {
        const int i0 = tile * COLS + half * HALF + lane % 4 * 2;
        float top[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int position = work.position + (row0 + j * 8) / GROUP;
            top[j] = minus_infinity();
#pragma unroll
            for (int n = 0; n < HALF / 8; n++)
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    float& x = s[n][j * 2 + k];
                    x = is_seen(position, i0 + n * 8 + k) ? logit2(x) : minus_infinity();
                    top[j] = fmaxf(top[j], x);
                }
            top[j] = fmaxf(top[j], __shfl_xor_sync(0xffffffffu, top[j], 1));
            top[j] = fmaxf(top[j], __shfl_xor_sync(0xffffffffu, top[j], 2));
            if (lane % 4 == 0) tops[half * ROWS + row0 + j * 8] = top[j];
        }
        __syncthreads();
        float shrink[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int r = row0 + j * 8;
            const float now = fmaxf(m[j], fmaxf(top[j], tops[(half ^ 1) * ROWS + r]));
            // A row that has seen nothing yet (its window begins later) must not make NaNs.
            const float at = now == minus_infinity() ? 0.0f : now;
            shrink[j] = ex2(m[j] - at);
            m[j] = now;
            l[j] *= shrink[j];
            const u32 to = probs + r * 128 + lane % 4 * 4;
#pragma unroll
            for (int n = 0; n < HALF / 8; n++) {
                const float x = ex2(s[n][j * 2] - at), y = ex2(s[n][j * 2 + 1] - at);
                l[j] += x + y;
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + ((half * (HALF / 8) + n) ^ r % 8) * 16), "r"(pack_pair(x, y)) : "memory");
            }
        }
#pragma unroll
        for (int d = 0; d < NV / 8; d++)
#pragma unroll
            for (int j = 0; j < 4; j++) acc[d][j] *= shrink[j / 2];
    }
    __device__ __forceinline__ void run(const Step* step, const Work& work, const Q* q_latent, const Q* q_rope, const V* latents, const V* keys) {
        const auto copy = [&](int tile, int turn, int block) {
            const u32 to = tiles + turn * TILE_BYTES;
            if (tile < work.end) copy_rows(work, latents, keys, tile, block, [&](int r, int c) { return to + swizzled(r, c); });
            copies_commit();
        };
        copy_queries(work, q_latent, q_rope, [&](int r, int c) { return qs + swizzled(r, c); });
        copy(work.tile, 0, block_of(step, work, work.tile));
        int block = block_of(step, work, work.tile + 1), turn = 0;
        float m[2], l[2];
#pragma unroll
        for (int j = 0; j < 2; j++) m[j] = minus_infinity(), l[j] = 0.0f;
#pragma unroll
        for (int d = 0; d < NV / 8; d++)
#pragma unroll
            for (int j = 0; j < 4; j++) acc[d][j] = 0.0f;
        const u64 q_at = descriptor(qs, 16, 1024), p_at = descriptor(probs, 16, 1024);
#pragma unroll 1
        for (int tile = work.tile; tile < work.end; tile++, turn ^= 1) {
            const u32 buffer = tiles + turn * TILE_BYTES;
            copies_wait<0>();
            fence_products();
            __syncthreads();                          // it has landed, and all are done with the one before
            copy(tile + 1, turn ^ 1, block);
            block = block_of(step, work, tile + 2);
            // In 16 bytes: 64 columns are a block of rows of 128 bytes, 16 of them 32 bytes.
            const u64 k_at = descriptor(buffer + half * HALF * 128, 16, 1024);
            const u64 v_at = descriptor(buffer + half * (NV / 64) * (COLS * 128), COLS * 128, 1024);
            float s[HALF / 8][4];
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                const u32 column = (i / 4 * (64 * 128) + i % 4 * 32) / 16;
                score_product(s, q_at + column, k_at + column, i > 0);
            }
            wgmma_commit();
            wgmma_wait<0>();
            landed(s);
            softmax(work, tile, s, m, l);
            fence_products();
            __syncthreads();                          // both halves' probabilities are there
            landed(acc);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < COLS / 16; i++) value_product(acc, p_at + i * 32 / 16, v_at + i * 16 * 128 / 16);
            wgmma_commit();
            wgmma_wait<0>();
            landed(acc);
        }
        copies_wait<0>();
        // A row's sum is that of both halves.
        __syncthreads();
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float sum = l[j];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (lane % 4 == 0) tops[half * ROWS + row0 + j * 8] = sum;
        }
        __syncthreads();
        if (half == 0 && lane % 4 == 0) {
#pragma unroll
            for (int j = 0; j < 2; j++) ends[row0 + j * 8] = make_float2(m[j], tops[row0 + j * 8] + tops[ROWS + row0 + j * 8]);
        }
        __syncthreads();
    }
};
