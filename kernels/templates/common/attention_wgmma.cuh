// Prefill on wgmma: GROUPS warpgroups of 64 query rows each, and tiles of COLS rows of the cache.
{% include "common/wgmma.cuh" %}
constexpr int GROUPS = {{ p.groups }}, COLS = {{ p.cols }}, ROWS = GROUPS * 64, TOKENS = ROWS / GROUP;
constexpr u32 Q_BYTES = ROWS * D * 2;
static_assert(D % 64 == 0 && DV % 64 == 0 && COLS % 16 == 0 && GROUP <= ROWS, "");

{% include "common/attention_tiles.cuh" %}

// Chunk c of row r, in a tile of N rows.
template <int N> __device__ __forceinline__ u32 swizzled(int r, int c) {
    return c / 8 * (N * 128) + r * 128 + (c % 8 ^ r % 8) * 16;
}
{% set n = p.cols // 2 %}
{% macro sums(of, n) %}{% for i in range(n) %}"+f"({{ of }}[{{ i // 4 }}][{{ i % 4 }}]){{ "" if loop.last else ", " }}{% endfor %}{% endmacro %}
{% macro places(n) %}{% for i in range(n) %}%{{ i }}{{ "" if loop.last else ", " }}{% endfor %}{% endmacro %}
// s[64, COLS] = (add ? s : 0) + q[64, 16] k[COLS, 16]'
__device__ __forceinline__ void score_product(float (&s)[{{ p.cols // 8 }}][4], u64 q, u64 k, int add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %{{ n + 2 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ p.cols }}k16.f32.{{ q.type }}.{{ q.type }} { {{ places(n) }} }, "
                 "%{{ n }}, %{{ n + 1 }}, p, 1, 1, 0, 0; }\n"
                 : {{ sums("s", n) }}
                 : "l"(q), "l"(k), "r"(add));
}
// acc[64, DV] += p[64, 16] v[16, DV]
{% set n = v_state.dim // 2 %}
__device__ __forceinline__ void value_product(float (&acc)[{{ v_state.dim // 8 }}][4], const u32 (&p)[4], u64 v) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n{{ v_state.dim }}k16.f32.{{ q.type }}.{{ q.type }} { {{ places(n) }} }, "
                 "{ %{{ n }}, %{{ n + 1 }}, %{{ n + 2 }}, %{{ n + 3 }} }, %{{ n + 4 }}, 1, 1, 1, 1;\n"
                 : {{ sums("acc", n) }}
                 : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));
}

// The warpgroup's scores against the tile at `k`. In 16 bytes: 64 columns are a block of rows, 16 of them 32 bytes.
__device__ __forceinline__ void start_scores(float (&s)[COLS / 8][4], u32 q, u32 k) {
    const u64 qs = descriptor(q, 16, 1024), ks = descriptor(k, 16, 1024);
#pragma unroll
    for (int i = 0; i < D / 16; i++)
        score_product(s, qs + (i / 4 * (64 * 128) + i % 4 * 32) / 16, ks + (i / 4 * (COLS * 128) + i % 4 * 32) / 16, i > 0);
    wgmma_commit();
}
__device__ __forceinline__ void start_values(float (&acc)[DV / 8][4], const u32 (&p)[COLS / 16][4], u32 v) {
    const u64 vs = descriptor(v, COLS * 128, 1024);
#pragma unroll
    for (int i = 0; i < COLS / 16; i++) value_product(acc, p[i], vs + i * 16 * 128 / 16);
    wgmma_commit();
}

// What a warpgroup keeps of its query rows, 64 from row `first` of the block's tile on. A warp has 16 of them, a lane two.
struct Rows {
    float acc[DV / 8][4], m[2], l[2], shrink[2];
    int position[2];
    const int first;

    __device__ __forceinline__ Rows(int first, int tile_position) : first(first) {
#pragma unroll
        for (int d = 0; d < DV / 8; d++) acc[d][0] = acc[d][1] = acc[d][2] = acc[d][3] = 0.0f;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            m[j] = minus_infinity(), l[j] = 0.0f;
            position[j] = tile_position + (first + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + j * 8) / GROUP;
        }
    }
    // Scores against the tile that begins at row `base` of the context become probabilities.
    __device__ __forceinline__ void softmax(float (&s)[COLS / 8][4], bool edge, int base) {
        softmax_step(s, m, l, shrink, position, edge, base, threadIdx.x % 32);
    }
    // Has what softmax() does done here: the compiler would move it behind a wait for products that follows, where nothing is left to run
    // beside it. It leaves what writes to memory in its place, and does not know that no sum is negative: nothing is written.
    // (Two small blocks of a multiprocessor run beside one another: those of attention_hopper.cuh are faster without.)
    __device__ __forceinline__ void settle() const {
        asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.f32 [%1], %0; }" ::"f"(fminf(l[0], l[1])), "r"(0) : "memory");
    }
    // Results go through 64 rows of shared memory at `out`, which is the warpgroup's own, a warp its own rows, so that 16 bytes are stored
    // at a time. Of the block's tile, which begins at row0 of `output`, `rows` are there; factor(m, l, r) makes results of a row's sums.
    template <class Factor> __device__ __forceinline__ void store(u8* out, Output output, i64 tile_row0, int rows, Factor factor) const {
        int thread = threadIdx.x;
        asm volatile("" : "+r"(thread));   // what follows from it would take registers before it is wanted
        const int lane = thread % 32, row0 = thread / 32 % 4 * 16;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int r = row0 + lane / 4 + j * 8;
            float sum = l[j];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            const float f = factor(m[j] * LOGIT, sum, first + r);
#pragma unroll
            for (int d = 0; d < DV / 8; d++)
                *(u32*)(out + swizzled<64>(r, d) + lane % 4 * 4) = pack_pair(acc[d][j * 2] * f, acc[d][j * 2 + 1] * f);
        }
        __syncwarp();
        output.put_tile(tile_row0, first + row0, rows, lane, [&](int r, int c) { return load16(out + swizzled<64>(row0 + r, c)); });
    }
};
// Only tiles on the diagonal, at the window's edge and at the end have rows to hide from tokens at `position` and up to before `end`.
__device__ __forceinline__ bool is_edge(int base, int position, int end) {
    return base + COLS - 1 > position || (WINDOW && base <= end - 1 - WINDOW);
}
