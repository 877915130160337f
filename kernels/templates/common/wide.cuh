// Matmuls of tens of tokens, for `Op`s of skinny.cuh. Unlike there, the warps of a block split rows,
// 16 * MT each, and share the activations, which come through shared memory 64 columns at a time; K
// is split over the SPLIT blocks of a cluster, whose sums meet in distributed shared memory. So a
// block of 128 rows reads T * K / SPLIT activations, where one of 16 would read T * K.
// STAGES steps of 64 columns are in flight in each warp. Shared memory in bytes:
// WARPS * MT * (STAGES * 2048 + NT * 512) + NT * 2048.
template <class Op, int WARPS, int STAGES, int MT, int NT, int SPLIT> struct Wide {
    typedef typename Op::X E;
    static constexpr int K = Op::K, STEPS = K / 64, MINE = (STEPS + SPLIT - 1) / SPLIT;
    static constexpr int THREADS = WARPS * 32, TOKENS = NT * 8, TILE = WARPS * MT * 8;
    static constexpr int PASSES = (Op::PAIRS + TILE - 1) / TILE, STAGE = MT * 2048, X_STAGE = TOKENS * 128;
    static constexpr int EACH = TOKENS * 8 / THREADS;               // 16-byte units of x of a thread and step
    static constexpr int PER = TILE / SPLIT;                        // pairs whose sums this block finishes
    static_assert(K % 64 == 0 && Op::HEAD == 0 && EACH * THREADS == TOKENS * 8 && PER * SPLIT == TILE, "shape");

    const Op& op;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const int part = threadIdx.x % 8, first_token = threadIdx.x / 8; // of the units of x
    const int rank = blockIdx.x % SPLIT, begin = rank * MINE, count = min(MINE, STEPS - begin);
    const int tile0 = blockIdx.x / SPLIT, tiles = gridDim.x / SPLIT;
    u32 ring, xs;
    u8* x_shared;
    float* red;
    Vec16 x[2][EACH], norm[2];
    float squares[EACH];
    int flow_left, flow_tile, flow_step = 0, flow_slot = 0;
    int row[MT * 4];

    __device__ __forceinline__ Wide(const Op& op, u8* shared) : op(op) {
        const u32 base = (u32)__cvta_generic_to_shared(shared);
        ring = base + warp * STAGES * STAGE;
        x_shared = shared + WARPS * STAGES * STAGE;
        xs = base + WARPS * STAGES * STAGE + group * 128 + quad * 16;
        red = (float*)(x_shared + 2 * X_STAGE);
    }
    // As in Skinny, a step of all the warp's tiles.
    __device__ __forceinline__ void flow() {
        if (flow_left > 0) {
            const int r = lane / 8, unit = lane % 8;
            if (flow_step == 0) {
#pragma unroll
                for (int i = 0; i < MT * 4; i++) {
                    const int at = i % 4 * 4 + r;
                    int a, b;
                    op.rows(min(flow_tile * TILE + (warp * MT + i / 4) * 8 + at % 8, Op::PAIRS - 1), a, b);
                    row[i] = at < 8 || b < 0 ? a : b;
                }
            }
            const u32 to = ring + flow_slot * STAGE + r * 128 + (unit ^ (r & 1) << 2) * 16;
#pragma unroll
            for (int i = 0; i < MT * 4; i++)
                copy16_async(to + i * 512, op.w + (i64)row[i] * K + (begin + flow_step) * 64 + unit * 8);
            if (++flow_step == count) {
                flow_step = 0;
                flow_tile += tiles;
                if (flow_tile >= PASSES) flow_tile = tile0;
            }
            if (++flow_slot == STAGES) flow_slot = 0;
            flow_left--;
        }
        copy_commit();
    }
    // Activations go through registers, asked for two steps before use, to be normed on the way.
    __device__ __forceinline__ void load_x(Vec16 (&x)[EACH], Vec16& norm, int step, int t0) {
        if (step >= count) return;
        const int k = (begin + step) * 64 + part * 8;
#pragma unroll
        for (int j = 0; j < EACH; j++)
            x[j] = load16(op.x + op.source(min(t0 + first_token + j * (THREADS / 8), op.tokens - 1)) * K + k);
        if constexpr (Op::NORM == 2) norm = load16(op.norm + k);
    }
    __device__ __forceinline__ void store_x(Vec16 (&x)[EACH], const Vec16& norm, int step, bool sum) {
        if (step >= count) return;
        float v[8];
#pragma unroll
        for (int i = 0; i < 4; i++) v[2 * i] = low<E>(norm.w[i]) + Op::offset, v[2 * i + 1] = high<E>(norm.w[i]) + Op::offset;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int t = first_token + j * (THREADS / 8);
            if (Op::NORM != 0 && sum) squares[j] += sum_squares<E>(x[j]);
            if constexpr (Op::NORM == 2) scale8<E>(x[j], v);
            store16(x_shared + step % 2 * X_STAGE + t * 128 + (part ^ (t & 1) << 2) * 16, x[j]);
        }
    }
    __device__ __forceinline__ void multiply(float (&acc)[MT][NT][4], u32 x_at, u32 from) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            Vec16 a[MT], b[MT];
            const u32 half = (h ^ (group & 1)) * 64;
#pragma unroll
            for (int m = 0; m < MT; m++) {
                a[m] = load16_shared(from + m * 2048 + group * 128 + quad * 16 + half);
                b[m] = load16_shared(from + m * 2048 + 1024 + group * 128 + quad * 16 + half);
            }
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const Vec16 v = load16_shared(x_at + n * 1024 + half);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma(acc[m][n], a[m].w[0], b[m].w[0], a[m].w[1], b[m].w[1], v.w[0], v.w[1], E{});
                    mma(acc[m][n], a[m].w[2], b[m].w[2], a[m].w[3], b[m].w[3], v.w[2], v.w[3], E{});
                }
            }
        }
    }
    // A float of `red` or `row_sums`, summed over the cluster.
    __device__ __forceinline__ static float total(const float* p) {
        if (SPLIT == 1) return *p;
        float sum = 0;
#pragma unroll
        for (int c = 0; c < SPLIT; c++) sum += cluster_load(p, c);
        return sum;
    }
    __device__ __forceinline__ void finish(const float (&acc)[MT][NT][4], int tile, int t0) {
        __shared__ float row_sums[TOKENS];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++) {
                float2* to = (float2*)(red + ((warp * MT + m) * NT + n) * 128 + group * 8 + quad * 2);
                to[0] = make_float2(acc[m][n][0], acc[m][n][1]);
                to[32] = make_float2(acc[m][n][2], acc[m][n][3]);
            }
        if (Op::NORM != 0 && tile == tile0) {
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                float s = squares[j];
#pragma unroll
                for (int d = 4; d > 0; d >>= 1) s += __shfl_xor_sync(0xffffffffu, s, d);
                if (part == 0) row_sums[first_token + j * (THREADS / 8)] = s;
            }
        }
        if (SPLIT > 1) cluster_sync();
        else __syncthreads();
        const int tokens = min(TOKENS, op.tokens - t0);
#pragma unroll 1
        for (int i = threadIdx.x; i < tokens * PER; i += THREADS) {
            const int pair = rank * PER + i % PER, t = i / PER, q = tile * TILE + pair;
            if (q >= Op::PAIRS) continue;
            const float* at = red + ((pair / 8 * NT + t / 8) * 16 + pair % 8) * 8 + t % 8;
            float scale = 1;
            if constexpr (Op::NORM != 0) scale = rsqrtf(total(row_sums + t) / K + Op::eps);
            op.emit(q, t0 + t, total(at) * scale, total(at + 64) * scale, 1.0f);
        }
        if (SPLIT > 1) cluster_sync();                              // before others' sums are overwritten, or gone
    }
    __device__ __forceinline__ void run() {
        const int passes = tile0 < PASSES ? (PASSES - 1 - tile0) / tiles + 1 : 0;
        flow_left = (op.tokens + TOKENS - 1) / TOKENS * passes * max(count, 0);
        flow_tile = tile0;
        for (int i = 0; i < STAGES; i++) flow();
        pdl_launch();
        pdl_wait();
        int slot = 0;
#pragma unroll 1
        for (int t0 = 0; t0 < op.tokens; t0 += TOKENS) {
#pragma unroll
            for (int j = 0; j < EACH; j++) squares[j] = 0;
#pragma unroll 1
            for (int tile = tile0; tile < PASSES; tile += tiles) {
                const bool sum = tile == tile0;
                float acc[MT][NT][4] = {};
                load_x(x[0], norm[0], 0, t0);
                load_x(x[1], norm[1], 1, t0);
                store_x(x[0], norm[0], 0, sum);
                load_x(x[0], norm[0], 2, t0);
                __syncthreads();
#pragma unroll 1
                for (int i = 0; i < count; i += 2) {
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        if (i + j >= count) break;
                        store_x(x[1 - j], norm[1 - j], i + j + 1, sum);
                        load_x(x[1 - j], norm[1 - j], i + j + 3, t0);
                        copy_wait<STAGES - 1>();
                        __syncwarp();
                        multiply(acc, xs + j * X_STAGE, ring + slot * STAGE);
                        __syncthreads();
                        if (++slot == STAGES) slot = 0;
                        flow();
                    }
                }
                finish(acc, tile, t0);
            }
        }
    }
};
