// One token a sequence. The cache is read once, so bytes are the floor: the work is split evenly
// over a grid that is fixed at launch, from the contexts as they are when it runs.
//
// A unit of work is TILE rows of a sequence for HEADS neighbouring KV heads. Units are numbered by
// (sequence, head group, tile); block i takes units [i * share, (i + 1) * share), which cut into
// pieces of one (sequence, head group) each. A piece's tiles go round-robin to SPLIT warps a head,
// each with a pipeline of its own through shared memory that runs on across pieces. Pieces that
// are not a whole go to scratch, and the last block to arrive puts them together, in order.
constexpr int TILE = 16, WARPS = {{ p.warps }}, HEADS = {{ p.heads }}, STAGES = {{ p.stages }};
constexpr int SPLIT = WARPS / HEADS, HEAD_GROUPS = HKV / HEADS, QHEADS = HEADS * GROUP;
constexpr int NT = (GROUP + 7) / 8;                // tiles of 8 query heads
constexpr int K_ROW = D + 8, V_ROW = DV + 8;       // padded: the 8 rows of a matrix load differ in banks
constexpr int K_TILE = TILE * K_ROW, STAGE = K_TILE + TILE * V_ROW;
constexpr int OUT_ROW = DV + 4;
constexpr int PART = QHEADS * (DV + 2);            // floats of a piece in scratch: (m, l), then sums
constexpr int MAX_SEQUENCES = 1024;
static_assert(PAGE % TILE == 0 && WARPS % HEADS == 0 && HKV % HEADS == 0, "");
static_assert(D % 16 == 0 && DV % 16 == 0, "");

__shared__ int tiles_before[MAX_SEQUENCES + 1];    // tiles of the sequences before each
__shared__ float2 warp_ml[WARPS][NT * 8];
__shared__ int scan[WARPS], arrived;

struct Piece { int b, group, tile, end, left; };   // left: units after it

__device__ __forceinline__ int tiles_of(int b) { return tiles_before[b + 1] - tiles_before[b]; }
__device__ __forceinline__ int first_tile(int context) { return first_seen(context - 1) / TILE; }

__device__ __forceinline__ void plan(const Step* step) {
    const int B = step->B, each = (B + WARPS * 32 - 1) / (WARPS * 32), from = threadIdx.x * each;
    const int* context = step->context;
    int sum = 0;
    for (int b = from; b < min(from + each, B); b++) {
        const int rows = context[b], n = rows > 0 ? (rows + TILE - 1) / TILE - first_tile(rows) : 0;
        tiles_before[b + 1] = sum += n;
    }
    const int lane = threadIdx.x % 32;
    int before = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int x = __shfl_up_sync(0xffffffffu, before, d);
        if (lane >= d) before += x;
    }
    if (lane == 31) scan[threadIdx.x / 32] = before;
    before -= sum;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++) before += w < threadIdx.x / 32 ? scan[w] : 0;
    for (int b = from; b < min(from + each, B); b++) tiles_before[b + 1] += before;
    if (threadIdx.x == 0) tiles_before[0] = 0;
    __syncthreads();
}
__device__ __forceinline__ Piece first_piece(int B, int unit, int units) {
    int lo = 0, hi = B;                             // tiles_before[lo] * HEAD_GROUPS <= unit
    while (hi - lo > 1) {
        const int mid = (lo + hi) / 2;
        if (tiles_before[mid] * HEAD_GROUPS <= unit) lo = mid; else hi = mid;
    }
    const int n = tiles_of(lo), in = unit - tiles_before[lo] * HEAD_GROUPS;
    Piece p{lo, in / n, in % n, 0, 0};
    p.end = min(n, p.tile + units);
    p.left = units - (p.end - p.tile);
    return p;
}
__device__ __forceinline__ bool next_piece(Piece& p) {
    if (p.left <= 0) return false;
    if (++p.group == HEAD_GROUPS) {
        p.group = 0;
        do p.b++; while (tiles_of(p.b) == 0);
    }
    p.tile = 0;
    p.end = min(tiles_of(p.b), p.left);
    p.left -= p.end;
    return true;
}

// The tiles of a warp in order, across pieces.
struct Tiles {
    Piece piece;
    int tile, context, first;
    bool more;
    __device__ __forceinline__ void enter(const Step* step, int slot) {
        tile = piece.tile + slot;
        context = step->context[piece.b];
        first = first_tile(context);
    }
    __device__ __forceinline__ void settle(const Step* step, int slot) {
        while (more && tile >= piece.end) {
            more = next_piece(piece);
            if (more) enter(step, slot);
        }
    }
};
struct Fetch { i64 row; int rows, head; };          // first row in the planes, valid rows, KV head

__device__ __forceinline__ Fetch next_fetch(Tiles& c, const Step* step, int slot, int head_in_group) {
    if (!c.more) return Fetch{0, 0, 0};
    const int i = (c.first + c.tile) * TILE;
    const Fetch f{cache_row(step, c.piece.b, i), c.context - i, c.piece.group * HEADS + head_in_group};
    c.tile += SPLIT;
    c.settle(step, slot);
    return f;
}
// DIM elements of each of a tile's rows, from a plane to shared memory.
template <int DIM> __device__ __forceinline__ void copy_tile(u32 to, const V* plane, const Fetch& f, int lane) {
    constexpr int CHUNKS = DIM / 8;
    const V* from = plane + (f.row * HKV + f.head) * DIM;
#pragma unroll
    for (int j = 0; j < (TILE * CHUNKS + 31) / 32; j++) {
        const int i = lane + 32 * j, r = i / CHUNKS, c = i % CHUNKS;
        if (TILE * CHUNKS % 32 == 0 || i < TILE * CHUNKS)
            copy16_async(to + (r * (DIM + 8) + c * 8) * 2, from + (i64)r * HKV * DIM + c * 8, r < f.rows);
    }
}
__device__ __forceinline__ void copy_tiles(u32 to, const V* k, const V* v, const Fetch& f, int lane) {
    if (f.rows > 0) {
        copy_tile<D>(to, k, f, lane);
        copy_tile<DV>(to + K_TILE * 2, v, f, lane);
    }
    copies_commit();
}
template <int DIM> __device__ __forceinline__ void prefetch_tile(const V* plane, const Fetch& f, int lane) {
    constexpr int LINES = (DIM * 2 + 127) / 128;
    for (int i = lane; i < TILE * LINES; i += 32)
        if (i / LINES < f.rows) prefetch_l2(plane + ((f.row + i / LINES) * HKV + f.head) * DIM + i % LINES * 64);
}

// A warp's softmax over the rows it has seen. Query heads are columns: lane 4r + i has heads 2i and
// 2i + 1 of each tile of 8. Tensor cores see rows of K and columns of V as the 16 side, so that a
// group of up to 8 heads fills the 8 side.
struct State {
    float m[NT][2], l[NT][2], acc[DV / 16][NT][4];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                m[n][j] = minus_infinity();
                l[n][j] = 0.0f;
            }
#pragma unroll
        for (int d = 0; d < DV / 16; d++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) acc[d][n][j] = 0.0f;
    }
    // Rows [from, to) of the tile at `stage` are seen.
    __device__ __forceinline__ void add(u32 stage, const u32 (&query)[NT][D / 16][2], int from, int to, int lane) {
        const u32 k = stage + ((lane % 16) * K_ROW + lane / 16 * 8) * 2;
        const u32 v = stage + (K_TILE + (lane % 8 + lane / 16 * 8) * V_ROW + lane / 8 % 2 * 8) * 2;
        float s[2][NT][4] = {};                     // two sums: half the chain of dependent products
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            u32 a[4];
            load_matrices(a, k + i * 32);
#pragma unroll
            for (int n = 0; n < NT; n++) mma(s[i % 2][n], a, query[n][i][0], query[n][i][1]);
        }
        bool grows = false;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int row = lane / 4 + j / 2 * 8;
                const float x = logit2(s[0][n][j] + s[1][n][j]);
                s[0][n][j] = row >= from && row < to ? x : minus_infinity();
                grows |= s[0][n][j] > m[n][j % 2];
            }
        if (__any_sync(0xffffffffu, grows)) rescale(s[0]);
        u32 p[NT][2];
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                s[0][n][j] = ex2(s[0][n][j] - m[n][j % 2]);
                l[n][j % 2] += s[0][n][j];
            }
            p[n][0] = transpose8x8(pack2<Q>(s[0][n][0], s[0][n][1]));
            p[n][1] = transpose8x8(pack2<Q>(s[0][n][2], s[0][n][3]));
        }
#pragma unroll
        for (int d = 0; d < DV / 16; d++) {
            u32 a[4];
            load_matrices_transposed(a, v + d * 32);
#pragma unroll
            for (int n = 0; n < NT; n++) mma(acc[d][n], a, p[n][0], p[n][1]);
        }
    }
    __device__ __forceinline__ void rescale(const float (&s)[NT][4]) {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float top = fmaxf(m[n][j], fmaxf(s[n][j], s[n][j + 2]));
#pragma unroll
                for (int x = 4; x < 32; x *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, x));
                const float shrink = ex2(m[n][j] - top);
                m[n][j] = top;
                l[n][j] *= shrink;
#pragma unroll
                for (int d = 0; d < DV / 16; d++) {
                    acc[d][n][j] *= shrink;
                    acc[d][n][j + 2] *= shrink;
                }
            }
    }
    // To shared memory, for the block to add up: warp_ml, and [head, DV] floats at `out`.
    __device__ __forceinline__ void publish(float* out, int warp, int lane) {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int head = n * 8 + lane % 4 * 2 + j;
#pragma unroll
                for (int x = 4; x < 32; x *= 2) l[n][j] += __shfl_xor_sync(0xffffffffu, l[n][j], x);
                if (lane < 4) warp_ml[warp][head] = make_float2(m[n][j], l[n][j]);
#pragma unroll
                for (int d = 0; d < DV / 16; d++) {
                    out[head * OUT_ROW + d * 16 + lane / 4] = acc[d][n][j];
                    out[head * OUT_ROW + d * 16 + lane / 4 + 8] = acc[d][n][j + 2];
                }
            }
    }
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

extern "C" __global__ void __launch_bounds__({{ block }}, 1) {{ kernel }}({{ params }}) {
    extern __shared__ __align__(128) u8 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slot = warp / HEADS, in_group = warp % HEADS;
    float* const outs = (float*)(shared + WARPS * STAGES * STAGE * 2);
    const u32 stages = shared_address(shared) + warp * STAGES * STAGE * 2;
    float* const parts = (float*)scratch;
    u32* const counters = (u32*)(parts + (i64)gridDim.x * 2 * PART);

    plan(step);
    const int B = step->B, units = tiles_before[B] * HEAD_GROUPS;
    // Less than a tile a warp would only add pieces to put together.
    const int share = max((units + (int)gridDim.x - 1) / (int)gridDim.x, SPLIT);
    const int begin = min((int)blockIdx.x * share, units), count = min(share, units - begin);
    if (count <= 0) {
        pdl_wait();
        pdl_launch();
        return;
    }
    Tiles ahead{first_piece(B, begin, count), 0, 0, 0, true};
    Piece piece = ahead.piece;
    ahead.enter(step, slot);
    ahead.settle(step, slot);
    Fetch fetch[STAGES];
#pragma unroll
    for (int s = 0; s < STAGES; s++) fetch[s] = next_fetch(ahead, step, slot, in_group);
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        prefetch_tile<D>(k_state, fetch[s], lane);
        prefetch_tile<DV>(v_state, fetch[s], lane);
    }
    pdl_wait();
    pdl_launch();
#pragma unroll
    for (int s = 0; s < STAGES; s++) copy_tiles(stages + s * STAGE * 2, k_state, v_state, fetch[s], lane);
    Fetch next = next_fetch(ahead, step, slot, in_group);

    int stage = 0;
    bool more = true;
    while (more) {
        const int t = step->first[piece.b], context = step->context[piece.b], tiles = tiles_of(piece.b);
        const int head0 = piece.group * QHEADS, seen = first_seen(context - 1), first = first_tile(context);
        u32 query[NT][D / 16][2];
        load_query(query, q + ((i64)t * H + head0 + in_group * GROUP) * D, lane);
        State state;
        state.clear();
        for (int tile = piece.tile + slot; tile < piece.end; tile += SPLIT) {
            const u32 at = stages + stage * STAGE * 2;
            const int base = (first + tile) * TILE;
            copies_wait<STAGES - 1>();
            __syncwarp();
            state.add(at, query, seen - base, context - base, lane);
            __syncwarp();
            copy_tiles(at, k_state, v_state, next, lane);
            next = next_fetch(ahead, step, slot, in_group);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        state.publish(outs + warp * NT * 8 * OUT_ROW, warp, lane);
        __syncthreads();
        const bool whole = piece.end - piece.tile == tiles;
        float* const part = parts + ((i64)blockIdx.x * 2 + (piece.tile == 0)) * PART;
        for (int i = threadIdx.x; i < QHEADS * DV / 2; i += WARPS * 32) {
            const int head = i / (DV / 2), d = i % (DV / 2) * 2, w0 = head / GROUP, h = head % GROUP;
            float m = minus_infinity(), l = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
            for (int s = 0; s < SPLIT; s++) m = fmaxf(m, warp_ml[w0 + s * HEADS][h].x);
#pragma unroll
            for (int s = 0; s < SPLIT; s++) {
                const int w = w0 + s * HEADS;
                const float2 ml = warp_ml[w][h], v = *(const float2*)(outs + (w * NT * 8 + h) * OUT_ROW + d);
                const float f = ex2(ml.x - m);
                l += f * ml.y;
                x += f * v.x;
                y += f * v.y;
            }
            if (whole) {
                const float f = row_factor(m, l SINKS_ARG(head0 + head));
                *(u32*)(mixed + ((i64)t * H + head0 + head) * DV + d) = pack2<V>(x * f, y * f);
            } else {
                if (d == 0) ((float2*)part)[head] = make_float2(m, l);
                *(float2*)(part + QHEADS * 2 + head * DV + d) = make_float2(x, y);
            }
        }
        if (!whole) {
            const int unit = tiles_before[piece.b] * HEAD_GROUPS + piece.group * tiles;
            const int from = unit / share, to = (unit + tiles - 1) / share;
            u32* const counter = counters + piece.b * HEAD_GROUPS + piece.group;
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) arrived = (int)atomicAdd(counter, 1);
            __syncthreads();
            if (arrived == to - from) {
                __threadfence();
                if (threadIdx.x == 0) *counter = 0;
                for (int i = threadIdx.x; i < QHEADS * DV / 2; i += WARPS * 32) {
                    const int head = i / (DV / 2), d = i % (DV / 2) * 2;
                    float m = minus_infinity(), l = 0.0f, x = 0.0f, y = 0.0f;
                    for (int k0 = from; k0 <= to; k0 += 8) {   // 8 at a time: their latencies overlap
                        float2 ml[8], v[8];
                        float top = m;
#pragma unroll
                        for (int k = 0; k < 8; k++) {
                            const bool there = k0 + k <= to;   // the first begins at tile 0: a second part
                            const float* part = parts + ((i64)(k0 + k) * 2 + (k0 + k == from)) * PART;
                            ml[k] = there ? __ldcg((const float2*)part + head) : make_float2(minus_infinity(), 0.0f);
                            v[k] = there ? __ldcg((const float2*)(part + QHEADS * 2 + head * DV + d)) : make_float2(0.0f, 0.0f);
                        }
#pragma unroll
                        for (int k = 0; k < 8; k++) top = fmaxf(top, ml[k].x);
                        const float old = ex2(m - top);
                        m = top;
                        l *= old;
                        x *= old;
                        y *= old;
#pragma unroll
                        for (int k = 0; k < 8; k++) {
                            const float f = ex2(ml[k].x - m);
                            l += f * ml[k].y;
                            x += f * v[k].x;
                            y += f * v[k].y;
                        }
                    }
                    const float f = row_factor(m, l SINKS_ARG(head0 + head));
                    *(u32*)(mixed + ((i64)t * H + head0 + head) * DV + d) = pack2<V>(x * f, y * f);
                }
            }
        }
        more = next_piece(piece);
        if (more) __syncthreads();                  // `outs` is free again
    }
    copies_wait<0>();
}
