// One token a sequence. The cache is read once, so bytes are the floor. Contexts are read when it
// runs, as graphs are replayed while they grow, and may be wildly unequal.
//
// An item is a sequence and HEADS neighbouring KV heads. Items of more than `limit` tiles of TILE
// rows are cut evenly into pieces; a block takes one piece, its warps the tiles of it in turn (SPLIT
// to a head), each with a pipeline of its own through shared memory. Pieces of cut items go to
// scratch, and the last block of an item to arrive puts them together, always in the same order.
//
// Every warp plans for itself, so that nothing waits: `limit` is such that about as many blocks have
// work as fit the device at once, and that items of equal length are not cut if they fill it. With PIECES, an item
// is cut by its own length alone, into at most so many pieces, and blocks take pieces in turn: a row's result does
// not depend on what else is in the step.
constexpr int TILE = 16, WARPS = {{ p.warps }}, HEADS = {{ p.heads }}, STAGES = {{ p.stages }}, THREADS = WARPS * 32;
constexpr int RESIDENT = {{ p.resident }};         // blocks on a multiprocessor
constexpr int PIECES = {{ p.pieces }};            // 0: cut as it is best for the step
constexpr int LEAST_PIECE = 1024 / TILE;           // tiles; an item of fewer is one piece
constexpr int SPLIT = WARPS / HEADS, HEAD_GROUPS = HKV / HEADS, QHEADS = HEADS * GROUP;
constexpr float MERGE = 0.0f;
constexpr int NT = (GROUP + 7) / 8;                // tiles of 8 query heads
constexpr int OUT_ROW = DV + 4;
constexpr int PART = QHEADS * (DV + 2);            // floats of a piece in scratch: (m, l), then sums
constexpr int MAX_SEQUENCES = 1024;
static_assert(PAGE % TILE == 0 && WARPS % HEADS == 0 && HKV % HEADS == 0, "");

__shared__ float2 warp_ml[WARPS][NT * 8];

{% include "common/attention_pieces.cuh" %}
{% if k_state.quantised %}
{% include "common/attention_decode_codes.cuh" %}
{% else %}
{% include "common/attention_decode_rows.cuh" %}
{% endif %}

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
        float s[2][NT][4] = {};
        add_scores(s, stage, query, lane);
        const Scales scales(stage, from, to, lane);
        bool grows = false;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int row = lane / 4 + j / 2 * 8;
                const float x = logit2((s[0][n][j] + s[1][n][j]) * scales.key(j / 2));
                s[0][n][j] = row >= from && row < to ? x : minus_infinity();
                grows |= s[0][n][j] > m[n][j % 2];
            }
        if (__any_sync(0xffffffffu, grows)) rescale(s[0]);
        Probabilities p;
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                s[0][n][j] = ex2(s[0][n][j] - m[n][j % 2]);
                l[n][j % 2] += s[0][n][j];
                s[0][n][j] *= scales.value(j / 2);
            }
            p.set(n, s[0][n]);
        }
        add_values(acc, stage, p, lane);
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
                    out[head * OUT_ROW + d * 16 + column_of(0, lane)] = acc[d][n][j];
                    out[head * OUT_ROW + d * 16 + column_of(1, lane)] = acc[d][n][j + 2];
                }
            }
    }
};

extern "C" __global__ void __launch_bounds__({{ block }}, RESIDENT) {{ kernel }}({{ params }}) {
    extern __shared__ __align__(128) u8 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slot = warp / HEADS, in_group = warp % HEADS;
    float* const outs = (float*)(shared + WARPS * STAGES * STAGE);
    const u32 stages = shared_address(shared) + warp * STAGES * STAGE;
    const Output output{ {{ output }}, step};
    u32* const counters = (u32*)scratch;            // first, as launches with other grids share them
    float* const parts = (float*)(counters + MAX_SEQUENCES * HEAD_GROUPS);

#pragma unroll 1
    for (int id = blockIdx.x;; id += gridDim.x) {
        const bool is_first = id == blockIdx.x;
        const Piece piece = plan(step, id);
        if (piece.tile >= piece.end) {
            if (is_first) {
                pdl_wait();
                pdl_launch();
            }
            return;
        }
        const int t = step->first[piece.b], context = piece.context, head = piece.group * HEADS + in_group;
        const int* const table = step->blocks + (i64)piece.b * step->block_stride;
        // The warp's tiles: rows of the context from row0 on, every SPLIT-th tile. Lanes know where in
        // the cache 32 of them lie, and the 32 after those.
        const int row0 = (first_tile(context) + piece.tile + slot) * TILE, tiles = (piece.end - piece.tile - slot + SPLIT - 1) / SPLIT;
        const auto context_row = [&](int i) { return row0 + i * (SPLIT * TILE); };
        const auto where = [&](int i) { return i < tiles ? table[context_row(i) / PAGE] * PAGE + context_row(i) % PAGE : 0; };
        int rows = where(lane), later = where(lane + 32);
#pragma unroll
        for (int i = 0; i < STAGES; i++)
            if (i < tiles) {
                const int row = __shfl_sync(0xffffffffu, rows, i);
                prefetch(k_state, v_state, row, context - context_row(i), head, lane);
            }
        if (is_first) {
            pdl_wait();
            pdl_launch();
        } else {
            __syncthreads();                            // all have read what the block published before
        }
        const auto copy = [&](int i, u32 to) {
            if (i < tiles) {
                if (i > 0 && i % 32 == 0) {
                    rows = later;
                    later = where(i + 32 + lane);
                }
                const int row = __shfl_sync(0xffffffffu, rows, i % 32);
                copy_stage(to, k_state, v_state, row, context - context_row(i), head, lane);
            }
            copies_commit();
        };
#pragma unroll
        for (int i = 0; i < STAGES; i++) copy(i, stages + i * STAGE);
        u32 query[NT][D / 16][2];
        load_query(query, q + ((i64)t * H + head * GROUP) * D, lane);
        State state;
        state.clear();
        const int seen = first_seen(context - 1);
        for (int i = 0, stage = 0; i < tiles; i++, stage = stage + 1 == STAGES ? 0 : stage + 1) {
            const u32 at = stages + stage * STAGE;
            copies_wait<STAGES - 1>();
            __syncwarp();
            state.add(at, query, seen - context_row(i), context - context_row(i), lane);
            __syncwarp();
            copy(i + STAGES, at);
        }
        copies_wait<0>();
        state.publish(outs + warp * NT * 8 * OUT_ROW, warp, lane);
        __syncthreads();

        const int head0 = piece.group * QHEADS;
        constexpr int COLUMNS = Output::COLUMNS;
        const auto finish = [&](int h, int d, Sums<COLUMNS>& s) {
            const float f = row_factor(s.m, s.l SINKS_ARG(head0 + h));
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) s.v[j] *= f;
            output.put((i64)t * H + head0 + h, d, s.v);
        };
        float* const part = parts + (i64)id * PART;
        for (int i = threadIdx.x; i < QHEADS * DV / COLUMNS; i += THREADS) {
            const int h = i / (DV / COLUMNS), d = i % (DV / COLUMNS) * COLUMNS;
            Sums<COLUMNS> s{minus_infinity(), 0.0f, {}};
#pragma unroll
            for (int k = 0; k < SPLIT; k++) s.m = fmaxf(s.m, warp_ml[k * HEADS + h / GROUP][h % GROUP].x);
#pragma unroll
            for (int k = 0; k < SPLIT; k++) {
                const int w = k * HEADS + h / GROUP;
                const float2 ml = warp_ml[w][h % GROUP];
                const auto v = *(const Pack<float, COLUMNS>*)(outs + (w * NT * 8 + h % GROUP) * OUT_ROW + d);
                const float f = ex2(ml.x - s.m);
                s.l += f * ml.y;
#pragma unroll
                for (int j = 0; j < COLUMNS; j++) s.v[j] += f * v.v[j];
            }
            if (piece.pieces == 1) {
                finish(h, d, s);
            } else {
                if (d == 0) ((float2*)part)[h] = make_float2(s.m, s.l);
#pragma unroll
                for (int j = 0; j < COLUMNS; j += 2) *(float2*)(part + QHEADS * 2 + h * DV + d + j) = make_float2(s.v[j], s.v[j + 1]);
            }
        }
        if (piece.pieces == 1) {
            if (PIECES) continue;
            return;
        }
        if (!comes_last(counters + piece.b * HEAD_GROUPS + piece.group, piece.pieces)) {
            if (PIECES) continue;
            return;
        }
        const float* const first = parts + ((i64)id - piece.k * HEAD_GROUPS) * PART;
        for (int i = threadIdx.x; i < QHEADS * DV / COLUMNS; i += THREADS) {
            const int h = i / (DV / COLUMNS), d = i % (DV / COLUMNS) * COLUMNS;
            Sums<COLUMNS> s = join<COLUMNS>(first, (i64)HEAD_GROUPS * PART, piece.pieces, h, d);
            finish(h, d, s);
        }
        if (!PIECES) return;
    }
}
