{# Low-rank parts of adapted products of one x, side by side in base: `parts` is a list of {a, b, start, begin}: operands, the first row of b, the first
   column of base. What adapt.cu.j2, adapt_pair.cu.j2 and adapt_triple.cu.j2 are made of. #}
{%- from "common/shape.j2" import rows -%}
{% include "common/prelude.cuh" %}
{% include "common/vec.cuh" %}
{% include "common/cluster.cuh" %}
{% if p.tensor_cores %}
{% include "common/mma.cuh" %}
{% endif %}
{% set a = parts[0].a %}
typedef {{ x.type }} X;
typedef {{ a.type }} W;
typedef {{ base.type }} Y;
constexpr int PARTS = {{ parts | length }}, K = {{ a.shape[2] }}, N = {{ base.cols }}, ADAPTERS = {{ a.shape[0] }}, R = {{ a.shape[1] }}, RANKS = PARTS * R;
// A cluster's blocks have the same TOKENS. Each multiplies a slice of K by `a`, all add up the slices in order, and each multiplies
// its own columns' rows of `b`.
constexpr int TOKENS = {{ p.tokens }}, BLOCKS = {{ p.cluster }}, WARPS = {{ block }} / 32;
struct Part { const W *a, *b; };

struct LowRank {
    const X* x;
    const Y* base;
    Y* y;
    Part parts[PARTS];
    int first, tokens;                                 // of this cluster
    const int rank = blockIdx.x % BLOCKS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float (*own)[RANKS], (*low)[RANKS];                // x by a: of this block's slice of K, and of all
    u32* slots;                                        // 0 where there is no adapter
{% if p.tensor_cores %}
    u32* adapters;                                     // each of them once
    int count;
{% endif %}

    // Where a part's columns begin, and the row of its b that its first column has.
    __device__ __forceinline__ static int begin(int part) {
        return {% for q in parts[1:] %}part == {{ loop.index }} ? {{ q.begin }} : {% endfor %}0;
    }
    __device__ __forceinline__ static i64 row_of(int part, u32 slot, int column) {
        const int rows = {% for q in parts[1:] %}part == {{ loop.index }} ? {{ q.b.shape[1] }} : {% endfor %}{{ parts[0].b.shape[1] }};
        const int start = {% for q in parts[1:] %}part == {{ loop.index }} ? {{ q.start }} : {% endfor %}{{ parts[0].start }};
        return (i64)(slot - 1) * rows + start + column - begin(part);
    }
    __device__ __forceinline__ static int part_of(int column) {
        int part = 0;
#pragma unroll
        for (int i = 1; i < PARTS; i++) part += column >= begin(i);
        return part;
    }
    __device__ __forceinline__ const W* a_of(int part) const {
        const W* a = parts[0].a;
#pragma unroll
        for (int i = 1; i < PARTS; i++) a = part == i ? parts[i].a : a;
        return a;
    }
    __device__ __forceinline__ const W* b_of(int part) const {
        const W* b = parts[0].b;
#pragma unroll
        for (int i = 1; i < PARTS; i++) b = part == i ? parts[i].b : b;
        return b;
    }
    // Adds up what the cluster's blocks have of x by a. They must not end before all have read: close().
    __device__ __forceinline__ void merge() {
        if (BLOCKS > 1) cluster_sync();
        else __syncthreads();
        for (int i = threadIdx.x; i < TOKENS * RANKS; i += {{ block }}) {
            float sum = 0;
#pragma unroll
            for (int r = 0; r < BLOCKS; r++) sum += BLOCKS > 1 ? cluster_load(&own[0][0] + i, r) : (&own[0][0])[i];
            (&low[0][0])[i] = sum;
        }
        if (BLOCKS > 1) cluster_arrive();
        __syncthreads();
    }
    __device__ __forceinline__ void close() const {
        if (BLOCKS > 1) cluster_wait();
    }

{% if not p.tensor_cores %}
    // What this block will read of adapters, on its way while the kernel before this one ends.
    __device__ __forceinline__ void ask_ahead() const {
        constexpr int EACH = wide<X>(K), CHUNKS = K / EACH, LINE = 128 / sizeof(W);
        const int k0 = CHUNKS * rank / BLOCKS * EACH, k1 = CHUNKS * (rank + 1) / BLOCKS * EACH, lines = (k1 - k0 + LINE - 1) / LINE;
        const int slices = gridDim.x, n0 = (i64)N * blockIdx.x / slices, n1 = (i64)N * (blockIdx.x + 1) / slices;
        for (int t = 0; t < TOKENS; t++) {
            if (slots[t] == 0 || (t > 0 && slots[t] == slots[t - 1])) continue;
            for (int part = 0; part < PARTS; part++)
                for (int i = threadIdx.x; i < R * lines; i += {{ block }})
                    ask(a_of(part) + ((i64)(slots[t] - 1) * R + i / lines) * K + k0 + i % lines * LINE);
            constexpr int ROWS = LINE / R > 0 ? LINE / R : 1;
            for (int n = n0 + threadIdx.x * ROWS; n < n1; n += {{ block }} * ROWS)
                for (int r = 0; r < R; r += LINE) ask(b_of(part_of(n)) + row_of(part_of(n), slots[t], n) * R + r);
        }
    }
    __device__ __forceinline__ static void ask(const W* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

    // ---- few tokens: a warp has eight rows of `a` and a token, a thread a column.
    __device__ __forceinline__ void multiply() {
        constexpr int EACH = wide<X>(K), CHUNKS = K / EACH, EIGHTS = (R + 7) / 8;
        const int k0 = CHUNKS * rank / BLOCKS * EACH, k1 = CHUNKS * (rank + 1) / BLOCKS * EACH;
        for (int item = warp; item < TOKENS * PARTS * EIGHTS; item += WARPS) {
            const int t = item % TOKENS, part = item / TOKENS % PARTS, eight = item / (TOKENS * PARTS) * 8;
            if (slots[t] == 0) continue;
            const X* const from = x + (i64)(first + t) * K;
            const W* const rows = a_of(part) + (i64)(slots[t] - 1) * R * K;
            float sums[8] = {};
#pragma unroll 2
            for (int k = k0 + lane * EACH; k < k1; k += 32 * EACH) {
                float of_x[EACH], of_a[EACH];
                load(of_x, from + k);
#pragma unroll
                for (int r = 0; r < 8; r++) {
                    load(of_a, rows + (i64)min(eight + r, R - 1) * K + k);
#pragma unroll
                    for (int j = 0; j < EACH; j++) sums[r] += of_x[j] * of_a[j];
                }
            }
#pragma unroll
            for (int r = 0; r < 8; r++) {
                sums[r] = warp_sum(sums[r]);
                if (lane == r && eight + r < R) own[t][part * R + eight + r] = sums[r];
            }
        }
    }
    __device__ __forceinline__ void spread() const {
        constexpr int EACH = wide<W>(R);
        const int slices = gridDim.x, begins = (i64)N * blockIdx.x / slices, ends = (i64)N * (blockIdx.x + 1) / slices;
        for (int n = begins + threadIdx.x; n < ends; n += {{ block }}) {
            const int part = part_of(n);
            const W* const b = b_of(part);
            float sums[TOKENS];
#pragma unroll
            for (int t = 0; t < TOKENS; t++) sums[t] = t < tokens ? to_f32(base[(i64)(first + t) * N + n]) : 0.0f;
            float row[R <= 32 ? R : EACH];                 // of the adapter before, which is often the next token's too
            u32 has = 0;
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                if (slots[t] == 0) continue;
                const W* const from = b + row_of(part, slots[t], n) * R;
#pragma unroll
                for (int r = 0; r < R; r += EACH) {
                    float (&v)[EACH] = *(float (*)[EACH])(row + (R <= 32 ? r : 0));
                    if (R > 32 || slots[t] != has) load(v, from + r);
#pragma unroll
                    for (int j = 0; j < EACH; j++) sums[t] += low[t][part * R + r + j] * v[j];
                }
                has = slots[t];
            }
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
                if (t < tokens) y[(i64)(first + t) * N + n] = from_f32<Y>(sums[t]);
        }
    }
{% else %}
    // ---- tiles of 16 tokens on tensor cores, once for each adapter that a tile has. A lane takes eight neighbours of a row, whose
    // pairs are the columns of two products: which ones does not matter, if both operands agree.
    __device__ __forceinline__ void list_adapters() {
        const bool is_new = threadIdx.x < TOKENS && slots[threadIdx.x % TOKENS] != 0 && [&]() {
            for (int t = 0; t < threadIdx.x; t++)
                if (slots[t] == slots[threadIdx.x]) return false;
            return true;
        }();
        if (warp == 0) {
            const u32 all = __ballot_sync(0xffffffffu, is_new);
            if (is_new) adapters[__popc(all & ((1u << lane) - 1))] = slots[lane];
            if (lane == 0) adapters[TOKENS] = __popc(all);
        }
        __syncthreads();
        count = adapters[TOKENS];
    }
    __device__ __forceinline__ void multiply_tile() {
        constexpr int EIGHTS = RANKS / 8;
        static_assert(TOKENS == 16 && K % 32 == 0 && R % 16 == 0, "shape");
        const int g = lane / 4, q = lane % 4;
        const X* const from[2] = {x + (i64)(first + min(g, tokens - 1)) * K + q * 8, x + (i64)(first + min(g + 8, tokens - 1)) * K + q * 8};
        for (int i = threadIdx.x; i < TOKENS * RANKS; i += {{ block }}) (&own[0][0])[i] = 0;
        __syncthreads();
        for (int adapter = 0; adapter < count; adapter++) {
            const u32 slot = adapters[adapter];
            float sums[EIGHTS][4] = {};
            for (int chunk = rank * WARPS + warp; chunk < K / 32; chunk += BLOCKS * WARPS) {
                const Vec16 above = load16(from[0] + chunk * 32), below = load16(from[1] + chunk * 32);
#pragma unroll
                for (int e = 0; e < EIGHTS; e++) {
                    const Vec16 v = load16(parts[e * 8 / R].a + ((i64)(slot - 1) * R + e * 8 % R + g) * K + chunk * 32 + q * 8);
                    mma(sums[e], above.w[0], below.w[0], above.w[1], below.w[1], v.w[0], v.w[1], X{});
                    mma(sums[e], above.w[2], below.w[2], above.w[3], below.w[3], v.w[2], v.w[3], X{});
                }
            }
            // Warps add theirs in turn: the order is always the same.
            for (int w = 0; w < WARPS; w++) {
                if (w == warp)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        if (slots[g + half * 8] == slot)
#pragma unroll
                            for (int e = 0; e < EIGHTS; e++) {
                                own[g + half * 8][e * 8 + q * 2] += sums[e][half * 2];
                                own[g + half * 8][e * 8 + q * 2 + 1] += sums[e][half * 2 + 1];
                            }
                __syncthreads();
            }
        }
    }
    // A pair of `low`, of a token with this adapter, as two 16-bit floats and what they lack.
    __device__ __forceinline__ void pair(u32& whole, u32& rest, int t, int at, u32 slot) const {
        const bool has = slots[t] == slot;
        const float v0 = has ? low[t][at] : 0.0f, v1 = has ? low[t][at + 1] : 0.0f;
        whole = pack2<X>(v0, v1);
        rest = pack2<X>(v0 - ::low<X>(whole), v1 - high<X>(whole));
    }
    __device__ __forceinline__ void spread_tile() const {
        const int g = lane / 4, q = lane % 4;
        u32 whole[R / 16][4], rest[R / 16][4];         // of one part and one adapter: most tiles have one
        int of_part = -1;
        u32 of_slot = 0;
        for (int n = (blockIdx.x * WARPS + warp) * 16; n < N; n += gridDim.x * WARPS * 16) {
            const int part = part_of(n);
            const W* const b = b_of(part);
            float sums[2][4] = {};
            for (int adapter = 0; adapter < count; adapter++) {
                const u32 slot = adapters[adapter];
                if (part != of_part || slot != of_slot) {
#pragma unroll
                    for (int r = 0; r < R; r += 16)
#pragma unroll
                        for (int i = 0; i < 4; i++) pair(whole[r / 16][i], rest[r / 16][i], g + i % 2 * 8, part * R + r + q * 4 + i / 2 * 2, slot);
                    of_part = part, of_slot = slot;
                }
#pragma unroll
                for (int u = 0; u < 2; u++) {
                    // So that a lane has four columns side by side.
                    const int column = n + g / 2 * 4 + u * 2 + g % 2;
                    const W* const row = b + row_of(part, slot, column) * R + q * 4;
#pragma unroll
                    for (int r = 0; r < R; r += 16) {
                        const Pack<W, 4> v = *(const Pack<W, 4>*)(row + r);
                        const u32 first_pair = (u32)v.v[0].bits | (u32)v.v[1].bits << 16, second_pair = (u32)v.v[2].bits | (u32)v.v[3].bits << 16;
                        const u32 (&w)[4] = whole[r / 16], (&s)[4] = rest[r / 16];
                        mma(sums[u], w[0], w[1], w[2], w[3], first_pair, second_pair, X{});
                        mma(sums[u], s[0], s[1], s[2], s[3], first_pair, second_pair, X{});
                    }
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int t = g + half * 8;
                if (t >= tokens) continue;
                const i64 i = (i64)(first + t) * N + n + q * 4;
                float v[4];
                load(v, base + i);
#pragma unroll
                for (int j = 0; j < 4; j++) v[j] += sums[j / 2][half * 2 + j % 2];
                ::store(y + i, v);
            }
        }
    }
{% endif %}
    __device__ __forceinline__ void read_slots() {
        if (threadIdx.x < TOKENS) {
            const u32 slot = threadIdx.x < tokens ? *(const volatile u32*)(step_slots + first + threadIdx.x) : 0;
            slots[threadIdx.x] = slot <= ADAPTERS ? slot : 0;
        }
        __syncthreads();
    }
    __device__ __forceinline__ void run() {
        bool any = false;
{% if not p.tensor_cores %}
        // An exception to reading nothing of a step before the wait: slots that are the step's input are there already. Where a kernel
        // makes them they may be stale, and then the wrong rows, of adapters that there are, come to the cache: slots are read again below.
        read_slots();
        ask_ahead();
        __syncthreads();
{% endif %}
        pdl_wait();
        read_slots();
        for (int t = 0; t < TOKENS; t++) any |= slots[t] != 0;
        if (any) {
{% if p.tensor_cores %}
            list_adapters();
{% endif %}
            {{ "multiply_tile" if p.tensor_cores else "multiply" }}();
            merge();
        }
        {{ "spread_tile" if p.tensor_cores else "spread" }}();
        if (any) close();
    }
    const {{ slots.type }}* step_slots;
};

extern "C" __global__ void {% if p.cluster > 1 %}__cluster_dims__({{ p.cluster }}, 1, 1) {% endif %}__launch_bounds__({{ block }}, 2) {{ kernel }}({{ params }}) {
    __shared__ float own[TOKENS][RANKS], low[TOKENS][RANKS];
    __shared__ u32 of_tokens[TOKENS];
{% if p.tensor_cores %}
    __shared__ u32 adapters[TOKENS + 1];
{% endif %}
    pdl_launch();
    LowRank op{x, base, y, { {% for q in parts %}{ {{ q.a.name }}, {{ q.b.name }} }, {% endfor %} }};
    op.own = own, op.low = low, op.slots = of_tokens, op.step_slots = slots;
{% if p.tensor_cores %}
    op.adapters = adapters, op.count = 0;
{% endif %}
    const int rows = {{ rows(base) }}, tiles = (rows + TOKENS - 1) / TOKENS;
    if (blockIdx.y >= tiles) {                         // all blocks of the cluster
        pdl_wait();
        return;
    }
    for (int tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
        op.first = tile * TOKENS;
        op.tokens = min(TOKENS, rows - op.first);
        op.run();
        __syncthreads();
    }
}
