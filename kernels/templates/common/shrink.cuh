{# Activations by the first matrices of their tokens' adapters: `parts` are the matrices, `result` is theirs, side by side. What shrink.cu.j2, shrink_pair.cu.j2 and
   shrink_triple.cu.j2 are made of. #}
{%- from "common/shape.j2" import rows -%}
{% include "common/prelude.cuh" %}
{% include "common/vec.cuh" %}
{% set a = parts[0] %}
typedef {{ x.type }} X;
typedef {{ a.type }} W;
constexpr int PARTS = {{ parts | length }}, K = {{ a.shape[2] }}, ADAPTERS = {{ a.shape[0] }}, R = {{ a.shape[1] }}, RANKS = PARTS * R;
__device__ __forceinline__ const W* pick(const W* const (&of)[PARTS], int part) {
    const W* a = of[0];
#pragma unroll
    for (int i = 1; i < PARTS; i++) a = part == i ? of[i] : a;
    return a;
}
// 0 where there is no adapter. Another kernel may have made them.
__device__ __forceinline__ u32 slot_of(const {{ slots.type }}* slots, int t) {
    const u32 slot = *(const volatile u32*)(slots + t);
    return slot <= ADAPTERS ? slot : 0;
}
{% if p.cluster > 1 %}
{% include "common/cluster.cuh" %}
{% include "common/mma.cuh" %}
// Up to eight tokens of one adapter are an item, whose rows of `a` are read once: by the eight blocks of a cluster, which part K.
// Tensor cores have 16 rows of `a` as M and the tokens as N. Order of summation: a warp's columns, a block's warps, the blocks.
constexpr int BLOCKS = {{ p.cluster }}, WARPS = {{ block }} / 32, TOKENS = 8, MOST = 128;
constexpr int TILES = RANKS / 16, CHUNKS = K / 32, TURN = BLOCKS * WARPS, TURNS = (CHUNKS + TURN - 1) / TURN;
// Turns whose rows of `a` are on their way, in registers, before activations are there: all of them where that leaves room for a second
// block on a multiprocessor, beside one of the kernel before. (Clusters of eight blocks that have one to themselves are fifteen on an H100.)
constexpr int LIMIT = TILES > 12 ? 1 : 12 / TILES, ROUNDS = (TURNS + LIMIT - 1) / LIMIT, HELD = (TURNS + ROUNDS - 1) / ROUNDS;

struct Shrink {
    const X* x;
    const W* parts[PARTS];
    int tokens;
    const int rank = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 *of_tokens, *leaders;                          // slots; tokens that begin an item, as bits
    int *members, *item;                               // of this block's item: its tokens, and its slot and how many they are
    Vec16 held[HELD][TILES][2], columns[HELD];
    float sums[TILES][4];

    // Tokens of an adapter, in order, are items of eight each; so all blocks find the same.
    __device__ __forceinline__ void find(const {{ slots.type }}* slots) {
        const int t = threadIdx.x;
        if (t < tokens) of_tokens[t] = slot_of(slots, t);
        if (t == 0) item[0] = item[1] = 0;
        __syncthreads();
        const u32 slot = t < tokens ? of_tokens[t] : 0;
        int before = 0;
        if (slot != 0)
            for (int o = 0; o < t; o++) before += of_tokens[o] == slot;
        const bool leads = slot != 0 && before % TOKENS == 0;
        const u32 all = __ballot_sync(0xffffffffu, leads);
        if (lane == 0) leaders[warp] = all;
        __syncthreads();
        int index = __popc(leaders[warp] & ((1u << lane) - 1));
        for (int w = 0; w < warp; w++) index += __popc(leaders[w]);
        if (leads && index == (int)blockIdx.y) item[0] = slot, item[2] = before;
        __syncthreads();
        const int at = before - item[2];
        if (slot != 0 && slot == (u32)item[0] && at >= 0 && at < TOKENS) members[at] = t, atomicAdd(&item[1], 1);
        __syncthreads();
    }
    __device__ __forceinline__ bool has() const { return item[0] != 0; }
    __device__ __forceinline__ int chunk(int turn) const { return turn * TURN + rank * WARPS + warp; }
    // A lane takes eight neighbours of a row, whose pairs are the columns of two products: which ones does not matter, as both operands agree.
    __device__ __forceinline__ void ask(int first) {
        const int g = lane / 4, q = lane % 4, slot = item[0];
#pragma unroll
        for (int h = 0; h < HELD; h++)
#pragma unroll
            for (int i = 0; i < TILES * 2; i++) {
                const int row = i * 8 % R + g, c = chunk(first + h);
                if (has() && first + h < TURNS && c < CHUNKS) held[h][i / 2][i % 2] = load16_stream(pick(parts, i * 8 / R) + ((i64)(slot - 1) * R + row) * K + c * 32 + q * 8);
                else held[h][i / 2][i % 2] = Vec16{};
            }
    }
    // Those of later turns come as far as the L2 cache.
    __device__ __forceinline__ void ask_ahead() const {
        const int slot = item[0];
        for (int first = HELD; first < TURNS && slot != 0; first++) {
            const int c = chunk(first);
            for (int row = lane; row < RANKS && c < CHUNKS; row += 32)
                asm volatile("prefetch.global.L2 [%0];" ::"l"(pick(parts, row / R) + ((i64)(slot - 1) * R + row % R) * K + c * 32));
        }
    }
    __device__ __forceinline__ void take(int first) {
        const int g = lane / 4, q = lane % 4, token = g < item[1] ? members[g] : -1;
#pragma unroll
        for (int h = 0; h < HELD; h++) {
            const int c = chunk(first + h);
            columns[h] = Vec16{};
            if (c < CHUNKS && token >= 0) columns[h] = load16(x + (i64)token * K + c * 32 + q * 8);
        }
    }
    __device__ __forceinline__ void multiply() {
#pragma unroll
        for (int h = 0; h < HELD; h++)
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                const Vec16 &above = held[h][i][0], &below = held[h][i][1], &v = columns[h];
                mma(sums[i], above.w[0], below.w[0], above.w[1], below.w[1], v.w[0], v.w[1], X{});
                mma(sums[i], above.w[2], below.w[2], above.w[3], below.w[3], v.w[2], v.w[3], X{});
            }
    }
    __device__ __forceinline__ void finish(float (*of_warps)[TOKENS][RANKS], float* own, float* to) const {
        const int g = lane / 4, q = lane % 4;
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) of_warps[warp][q * 2 + j % 2][i * 16 + g + j / 2 * 8] = sums[i][j];
        __syncthreads();
        for (int i = threadIdx.x; i < TOKENS * RANKS; i += {{ block }}) {
            float sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += (&of_warps[w][0][0])[i];
            own[i] = sum;
        }
        cluster_sync();
        // Each block has its share of what is written.
        for (int i = threadIdx.x * BLOCKS + rank; i < item[1] * RANKS; i += {{ block }} * BLOCKS) {
            float sum = 0;
#pragma unroll
            for (int r = 0; r < BLOCKS; r++) sum += cluster_load(own + i, r);
            to[(i64)members[i / RANKS] * RANKS + i % RANKS] = sum;
        }
    }
};

extern "C" __global__ void __cluster_dims__({{ p.cluster }}, 1, 1) __launch_bounds__({{ block }}, 3) {{ kernel }}({{ params }}) {
    __shared__ float of_warps[WARPS][TOKENS][RANKS], own[TOKENS * RANKS];
    __shared__ u32 of_tokens[MOST], leaders[WARPS];
    __shared__ int members[TOKENS], item[3];
    pdl_launch();
    Shrink op{x, { {% for a in parts %}{{ a.name }}, {% endfor %} }, (int){{ rows(result) }}};
    op.of_tokens = of_tokens, op.leaders = leaders, op.members = members, op.item = item;
    if (op.tokens == 0) {
        pdl_wait();
        return;
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) op.sums[i][0] = op.sums[i][1] = op.sums[i][2] = op.sums[i][3] = 0;
    // An exception to reading nothing of a step before the wait: slots that are the step's input are there already. Where a kernel makes them
    // they may be stale, and then they are read once more.
    op.find(slots);
    op.ask(0);
    op.ask_ahead();
    pdl_wait();
    const bool stale = threadIdx.x < op.tokens && slot_of(slots, threadIdx.x) != of_tokens[threadIdx.x];
    op.take(0);
    if (__syncthreads_or(stale)) {
        op.find(slots);
        op.ask(0);
        op.take(0);
    }
    if (blockIdx.y == 0)                               // tokens without an adapter
        for (int i = op.rank * {{ block }} + threadIdx.x; i < op.tokens * RANKS; i += {{ block }} * BLOCKS)
            if (of_tokens[i / RANKS] == 0) {{ result.name }}[i] = 0;
    if (!op.has()) return;                             // all blocks of the cluster
    op.multiply();
#pragma unroll 1
    for (int first = HELD; first < TURNS; first += HELD) {
        op.ask(first);
        op.take(first);
        op.multiply();
    }
    op.finish(of_warps, own, {{ result.name }});
    cluster_sync();                                    // nobody reads this block's memory any more
}
{% else %}
// A warp has a row of `a` and a token.
extern "C" __global__ void __launch_bounds__({{ block }}) {{ kernel }}({{ params }}) {
    const int r = blockIdx.x * ({{ block }} / 32) + threadIdx.x / 32;
    pdl_launch();
    pdl_wait();
    for (i64 t = blockIdx.y; t < {{ rows(result) }}; t += gridDim.y) {
        if (r >= RANKS) continue;
        const u32 slot = slot_of(slots, t);
        const W* const parts[PARTS] = { {% for a in parts %}{{ a.name }}, {% endfor %} };
        float sums[1] = {0};
        if (slot != 0) warp_dots<K>(sums, x + t * K, { pick(parts, r / R) + ((i64)(slot - 1) * R + r % R) * K });
        if (threadIdx.x % 32 == 0) {{ result.name }}[t * RANKS + r] = sums[0];
    }
}
{% endif %}
