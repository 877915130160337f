// One token a sequence: the cache is read once, so bytes are the floor, until there are so many heads that products are. Contexts
// are cut into pieces, of whole tiles counted from position 0, as attention_pieces.cuh says.
constexpr int TILE = COLS, RESIDENT = {{ p.resident }}, PIECES = {{ p.pieces }}, SPLIT = 1, LEAST_PIECE = 256 / TILE;
constexpr int QHEADS = GROUP, PART = GROUP * (R + 2);   // floats of a piece in scratch: (m, l), then sums
// Bytes of both. A block is taken to read what others have put into L2 six times as fast as it gets through a tile: an estimate,
// of a kernel that took 20 us for 16 tiles in pieces of four, where one tile took 11.
constexpr float MERGE = PART * 4 / (TILE * D * 2 * 6.0f);
constexpr int MAX_SEQUENCES = 1024;
{% include "common/attention_pieces.cuh" %}

// The first tiles of a piece on their way to L2, while the kernel before may still write the newest row there.
__device__ __forceinline__ void prefetch_rows(const Step* step, const Piece& piece, const V* latents, const V* keys) {
    constexpr int LINES = (R * 2 + 127) / 128, EACH = LINES + (P * 2 + 127) / 128;
    const int begin = (first_tile(piece.context) + piece.tile) * TILE, rows = min(piece.context - begin, min(piece.end - piece.tile, {{ 2 if p.wgmma else p.stages }}) * TILE);
    for (int i = threadIdx.x; i < rows * EACH; i += THREADS) {
        const i64 row = cache_row(step, piece.b, begin + i / EACH);
        const int line = i % EACH;
        prefetch_l2(line < LINES ? latents + row * R + line * 64 : keys + row * P + (line - LINES) * 64);
    }
}

extern "C" __global__ void __launch_bounds__({{ block }}, RESIDENT) {{ kernel }}({{ params }}) {
    extern __shared__ __align__(128) u8 shared[];
    u32* const counters = (u32*)scratch;            // first, as launches with other grids share them
    float* const parts = (float*)(counters + MAX_SEQUENCES * HEAD_GROUPS);
    Attend attend(shared);
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
        const int t = step->first[piece.b], head0 = piece.group * GROUP, tile0 = first_tile(piece.context);
        if (is_first) {
            prefetch_rows(step, piece, latents, keys);
            pdl_wait();
            pdl_launch();
        } else {
            __syncthreads();                        // all have read what the block published before
        }
        attend.run(step, Work{piece.b, t, 1, piece.context - 1, piece.group, tile0 + piece.tile, tile0 + piece.end},
                   q_latent, q_rope, latents, keys);
        float* const part = parts + (i64)id * PART;
        attend.each([&](int r, int d, float x, float y) {
            if (r >= GROUP || head0 + r >= H) return;
            const float2 end = attend.end(r);
            if (piece.pieces == 1) {
                const float f = row_factor(end.x, end.y);
                *(u32*)(mixed + ((i64)t * H + head0 + r) * R + d) = pack_pair(x * f, y * f);
            } else {
                if (d == 0) ((float2*)part)[r] = end;
                *(float2*)(part + QHEADS * 2 + r * R + d) = make_float2(x, y);
            }
        });
        if (piece.pieces == 1) {
            if (PIECES) continue;
            return;
        }
        if (!comes_last(counters + piece.b * HEAD_GROUPS + piece.group, piece.pieces)) {
            if (PIECES) continue;
            return;
        }
        const float* const first = parts + ((i64)id - piece.k * HEAD_GROUPS) * PART;
        // What the sums of each piece and head are multiplied by, where queries and rows were.
        float* const factors = (float*)shared;
        for (int r = threadIdx.x / 32; r < GROUP; r += WARPS) {
            const auto end = [&](int k) { return __ldcg((const float2*)(first + (i64)k * HEAD_GROUPS * PART) + r); };
            float top = minus_infinity(), sum = 0.0f;
            for (int k = threadIdx.x % 32; k < piece.pieces; k += 32) top = fmaxf(top, end(k).x);
            top = warp_max(top);
            for (int k = threadIdx.x % 32; k < piece.pieces; k += 32) {
                const float f = ex2(end(k).x - top);
                factors[k * GROUP + r] = f;
                sum += f * end(k).y;
            }
            const float f = row_factor(top, warp_sum(sum));
            for (int k = threadIdx.x % 32; k < piece.pieces; k += 32) factors[k * GROUP + r] *= f;
        }
        __syncthreads();
        constexpr int PAIRS = GROUP * R / 2, EACH = 8;     // of a thread, whose latencies overlap
        for (int i0 = threadIdx.x; i0 < PAIRS; i0 += THREADS * EACH) {
            float2 sums[EACH] = {};
#pragma unroll 2
            for (int k = 0; k < piece.pieces; k++) {
                const float2* const from = (const float2*)(first + (i64)k * HEAD_GROUPS * PART + QHEADS * 2);
                float2 v[EACH];
#pragma unroll
                for (int e = 0; e < EACH; e++) v[e] = __ldcg(from + min(i0 + e * THREADS, PAIRS - 1));
#pragma unroll
                for (int e = 0; e < EACH; e++) {
                    const float f = factors[k * GROUP + min(i0 + e * THREADS, PAIRS - 1) / (R / 2)];
                    sums[e].x += f * v[e].x, sums[e].y += f * v[e].y;
                }
            }
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const int i = i0 + e * THREADS, r = i / (R / 2), d = i % (R / 2) * 2;
                if (i < PAIRS && head0 + r < H) *(u32*)(mixed + ((i64)t * H + head0 + r) * R + d) = pack_pair(sums[e].x, sums[e].y);
            }
        }
        if (!PIECES) return;
    }
}
