// What the kernels of latent_attention on tensor cores share. A row of the context is its latent and its key side by side, D
// values, of which the first R are also the value. All heads read the same rows: a block has ROWS rows of queries, GROUP
// heads of as many tokens as fit (row r is token r / GROUP, head r % GROUP), and reads tiles of COLS rows of the context once
// for all of them.
typedef {{ q_latent.type }} Q;
typedef {{ latents.type }} V;
constexpr int H = {{ q_latent.shape[1] }}, R = {{ latents.dim }}, P = {{ keys.dim }}, D = R + P, DV = R;
constexpr int ROWS = {{ p.rows }}, COLS = {{ p.cols }}, WARPS = {{ p.warps }}, THREADS = WARPS * 32;
constexpr int HEAD_GROUPS = (H + ROWS - 1) / ROWS, GROUP = (H + HEAD_GROUPS - 1) / HEAD_GROUPS;
constexpr int TOKENS = {{ "1" if p.decode else "ROWS / GROUP" }};
static_assert(PAGE % 16 == 0 && COLS % 16 == 0 && R % 16 == 0 && P % 16 == 0 && GROUP <= ROWS, "");
{% set cap = none %}{% set sinks = none %}
{% include "common/attention_math.cuh" %}

// Tokens of sequence b, the first of them at `position` of its context, a group of heads, and the tiles [tile, end) of the
// context that are looked at.
struct Work { int b, token, tokens, position, group, tile, end; };

__device__ __forceinline__ bool is_there(const Work& work, int r) {
    return r / GROUP < work.tokens && (H % GROUP == 0 || work.group * GROUP + r % GROUP < H);
}
// The row of [T * H] that is row r of the block.
__device__ __forceinline__ i64 query_row(const Work& work, int r) {
    return (i64)(work.token + r / GROUP) * H + work.group * GROUP + r % GROUP;
}
// Queries on their way to shared memory: 16 bytes, chunk c of row r, go to at(r, c).
template <class At> __device__ __forceinline__ void copy_queries(const Work& work, const Q* q_latent, const Q* q_rope, At at) {
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * (D / 8); i += THREADS) {
        const int r = i / (D / 8), c = i % (D / 8);
        const bool there = is_there(work, r);
        const i64 row = there ? query_row(work, r) : 0;
        copy16_async(at(r, c), c < R / 8 ? q_latent + row * R + c * 8 : q_rope + row * P + (c - R / 8) * 8, there);
    }
}
// The cache row at which the i-th 16 rows of a tile begin, in lane i.
__device__ __forceinline__ int block_of(const Step* step, const Work& work, int tile) {
    const int i = tile * COLS + threadIdx.x % 32 % (COLS / 16) * 16;
    return tile < work.end && i < work.position + work.tokens ? (int)cache_row(step, work.b, i) : 0;
}
// A tile's rows on their way, as queries are; zeros for what no token of the block sees.
template <class At>
__device__ __forceinline__ void copy_rows(const Work& work, const V* latents, const V* keys, int tile, int block, At at) {
    const int first = first_seen(work.position) - tile * COLS, left = work.position + work.tokens - tile * COLS;
#pragma unroll 3
    for (int j = 0; j < (COLS * (D / 8) + THREADS - 1) / THREADS; j++) {
        const int i = threadIdx.x + j * THREADS, r = i / (D / 8), c = i % (D / 8);
        const i64 row = __shfl_sync(0xffffffffu, block, r / 16 % (COLS / 16)) + r % 16;
        if (COLS * (D / 8) % THREADS == 0 || r < COLS)
            copy16_async(at(r, c), c < R / 8 ? latents + row * R + c * 8 : keys + row * P + (c - R / 8) * 8, (!WINDOW || r >= first) && r < left);
    }
}
// Whether the token at `position` sees row i of the context.
__device__ __forceinline__ bool is_seen(int position, int i) { return i <= position && (!WINDOW || position - i < WINDOW); }
