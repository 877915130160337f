// Matmuls of few tokens: y = x · wᵀ, whose time is the time of reading w once.
//
// A result is computed in *pairs* of rows of w (gate and up of a feature, the two halves that rope
// turns, or merely neighbours), so that what is done to a pair happens in one thread. An `Op` says
// which rows make a pair and what becomes of a pair's two sums; both bodies below serve every op:
//
//   X, W, V      element types of x, w and of the norm's weight
//   K, PAIRS     columns of w; pairs of its rows
//   NORM         0: x as it is, 1: RMSNorm without weight, 2: with weight `norm`
//   HEAD         pairs of a head if heads are normed (no such op has an odd one), else 0
//   Weights      how w is read: dense_rows.cuh, or a loader like it
//   x, w, norm, eps, offset, tokens
//   source(t)    row of x of token t
//   rows(q, a, b)         the rows of w of pair q; b < 0 if there is no second
//   emit(q, t, a, b, s)   takes the two sums; s is the head's factor, 1 without HEAD
//   added(q, i)           with HEAD: what is added to a sum before the head's norm (elsewhere emit does)
//   head_scale(q, ms)     with HEAD: factor for q's head, whose mean square is ms

// Eight values as they are stored, so that several loads are under way, and as floats.
template <class E> struct Eight {
    Vec16 a;
    __device__ __forceinline__ explicit Eight(const E* p) : a(load16(p)) {}
    Eight() = default;
    __device__ __forceinline__ void widen(float (&v)[8]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) v[2 * i] = low<E>(a.w[i]), v[2 * i + 1] = high<E>(a.w[i]);
    }
};
template <> struct Eight<float> {
    Vec16 a, b;
    __device__ __forceinline__ explicit Eight(const float* p) : a(load16(p)), b(load16(p + 4)) {}
    Eight() = default;
    __device__ __forceinline__ void widen(float (&v)[8]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = __uint_as_float(a.w[i]), v[4 + i] = __uint_as_float(b.w[i]);
    }
};
// Eight weights of an op's norm, or nothing where it has none.
template <class Op, int NORM> struct NormWeights {
    __device__ __forceinline__ void load(const Op&, int) {}
    __device__ __forceinline__ void widen(float (&v)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = 1;
    }
};
template <class E> __device__ __forceinline__ Eight<E> eight_of(const E* p) { return Eight<E>(p); }
template <class Op> struct NormWeights<Op, 2> {
    decltype(eight_of(((const Op*)nullptr)->norm)) of;
    __device__ __forceinline__ void load(const Op& op, int k) { of = eight_of(op.norm + k); }
    __device__ __forceinline__ void widen(float (&v)[8]) const {
        of.widen(v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] += Op::offset;
    }
};

// Of eight values of 16 bits: the sum of squares; their products with v, rounded.
template <class E> __device__ __forceinline__ float sum_squares(const Vec16& x) {
    float s = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) s += low<E>(x.w[i]) * low<E>(x.w[i]) + high<E>(x.w[i]) * high<E>(x.w[i]);
    return s;
}
template <class E> __device__ __forceinline__ void scale8(Vec16& x, const float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) x.w[i] = pack2<E>(low<E>(x.w[i]) * v[2 * i], high<E>(x.w[i]) * v[2 * i + 1]);
}

// ---- any shape and type: a block takes GROUP pairs of a token, a warp one pair at a time.
template <class Op> __device__ __forceinline__ void plain_linear(const Op& op) {
    constexpr int GROUP = Op::HEAD ? Op::HEAD : 16;
    __shared__ float sums[2 * GROUP], scratch[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    pdl_launch();
    pdl_wait();
    for (int t = blockIdx.y; t < op.tokens; t += gridDim.y) {
        const auto* x = op.x + op.source(t) * Op::K;
        float scale = 1;
        if (Op::NORM) {
            float squares = 0;
            for (int k = threadIdx.x; k < Op::K; k += blockDim.x) squares += to_f32(x[k]) * to_f32(x[k]);
            scale = rsqrtf(block_sum(squares, scratch) / Op::K + op.eps);
        }
        for (int i = warp; i < GROUP && blockIdx.x * GROUP + i < Op::PAIRS; i += warps) {
            int a, b;
            op.rows(blockIdx.x * GROUP + i, a, b);
            float sa = 0, sb = 0;
            for (int k = lane; k < Op::K; k += 32) {
                float v = to_f32(x[k]) * scale;
                if constexpr (Op::NORM == 2) v *= to_f32(op.norm[k]) + op.offset;
                sa += v * Op::template Weights<Op, 1>::value(op, a, k);
                if (b >= 0) sb += v * Op::template Weights<Op, 1>::value(op, b, k);
            }
            sa = warp_sum(sa), sb = warp_sum(sb);
            if (lane == 0) sums[2 * i] = sa, sums[2 * i + 1] = sb;
        }
        __syncthreads();
        float s = 1;
        if constexpr (Op::HEAD != 0) {
            float squares = 0;
            for (int i = threadIdx.x; i < 2 * GROUP; i += blockDim.x) {
                const int q = blockIdx.x * GROUP + i / 2;
                if (q < Op::PAIRS) sums[i] += op.added(q, i % 2);
                squares += sums[i] * sums[i];
            }
            s = op.head_scale(blockIdx.x * GROUP, block_sum(squares, scratch) / (2 * GROUP));
        }
        for (int i = threadIdx.x; i < GROUP; i += blockDim.x) {
            const int q = blockIdx.x * GROUP + i;
            if (q < Op::PAIRS) op.emit(q, t, sums[2 * i], sums[2 * i + 1], s);
        }
        __syncthreads();
    }
}

// ---- tensor cores: 16-bit types, K a multiple of 64.
//
// w is the A of mma.m16n8k16 (8 pairs: first rows are rows 0..7 of the tile, second rows 8..15), the
// tokens are its B, 8 to a tile. The order of k is free as long as both agree, so a lane takes 16
// contiguous bytes of each as the fragments of two mma steps.
//
// The warps of a block share the rows and split K, 64 columns a step; sums meet in shared memory.
// Each warp streams its weights through a ring of its own with cp.async, so nothing in the main loop
// waits for another warp. The ring runs across tiles and is filled before pdl_wait(), so that weights
// arrive while the kernel before drains.
//
// The main loop is not unrolled: a kernel runs for microseconds, and so does fetching its code.
{% include "common/mma.cuh" %}

// What products of few tokens have in common, however weights are read: activations that are normed into shared memory, and
// sums over a block's warps. WARPS split K; a pass is MT tiles of 8 pairs by NT tiles of 8 tokens. ROWS tokens' activations
// are in shared memory; with ROWS = 0 none are. RING bytes of shared memory lie before, for weights; with them, it takes
// RING + WARPS * MT * NT * 128 * COLS + ROWS * K * 2, and ROWS * K / Weights::SPAN * 4 where it sums activations. The RANKS blocks of a cluster share rows and split K too: where a pass is
// a head there are fewer passes than multiprocessors.
template <class Op, int WARPS, int RING, int MT, int NT, int ROWS, int RANKS = 1> struct FewTokens {
    typedef typename Op::X E;
    typedef typename Op::template Weights<Op, MT> Weights;
    static constexpr int K = Op::K;
    static constexpr int PASSES = (Op::PAIRS + MT * 8 - 1) / (MT * 8);
    static constexpr int TOKENS = ROWS ? ROWS : NT * 8;             // of a sweep over w
    static constexpr int COLS = ROWS && ROWS < 8 ? ROWS : 8;        // tokens of a tile that are looked at
    static constexpr int RED = WARPS * MT * NT * 16 * COLS;         // floats
    static constexpr bool SCALED = ROWS == 1 && Weights::SCALES_ROW;   // as scaled_row.cuh has activations
    static_assert(ROWS ? (ROWS & (ROWS - 1)) == 0 && ROWS <= NT * 8 : true, "ROWS is a power of 2");
    static_assert(Op::HEAD == 0 || MT * 8 == Op::HEAD, "a pass is a head");
    static_assert(RANKS == 1 || ROWS, "each block norms all of x");

    const Op& op;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    // Places in the cluster, and among clusters.
    __device__ __forceinline__ static int rank() { return RANKS > 1 ? blockIdx.x % RANKS : 0; }
    __device__ __forceinline__ static u32 block() { return blockIdx.x / RANKS; }
    __device__ __forceinline__ static u32 blocks() { return gridDim.x / RANKS; }
    const int xrow = group % COLS;
    u32 xs, sums;                                                   // sums of SPAN columns, a token's beside the next one's
    float* red;
    u8* x_shared;
    float squares[NT];                                              // of the lane's part of x, with ROWS = 0

    __device__ __forceinline__ FewTokens(const Op& op, u8* shared) : op(op) {
        red = (float*)(shared + RING);
        x_shared = shared + RING + 2 * RED * 4;
        xs = (u32)__cvta_generic_to_shared(shared) + RING + 2 * RED * 4 + xrow * K * 2;
        sums = (u32)__cvta_generic_to_shared(x_shared) + ROWS * K * 2;
    }

    // Warps of a token as activations are staged, and 16 bytes of each lane.
    static constexpr int SHARE = ROWS != 0 && WARPS > ROWS ? WARPS / ROWS : 1, EACH = (K / 8 + 32 * SHARE - 1) / (32 * SHARE);
    // Has the norm's weights come near, while the kernel before this one still runs. They are constants.
    __device__ __forceinline__ void warm_norm() const {
        if constexpr (Op::NORM == 2 && ROWS != 0) {
#pragma unroll 4
            for (int i = 0; i < EACH; i++) {
                const int u = warp % SHARE * 32 + lane + i * SHARE * 32;
                if (u < K / 8) asm volatile("{ .reg .b32 unused; ld.global.ca.b32 unused, [%0]; }" ::"l"(op.norm + u * 8) : "memory");
            }
        }
    }

    // What a row is multiplied by to be normed, of a lane's sum of squares: SHARE warps have a row.
    __device__ __forceinline__ float norm_scale(float sum) const {
        __shared__ float partial[WARPS];
        sum = warp_sum(sum);
        if constexpr (SHARE > 1) {
            if (lane == 0) partial[warp] = sum;
            __syncthreads();
            sum = 0;
#pragma unroll
            for (int i = 0; i < SHARE; i++) sum += partial[warp / SHARE * SHARE + i];
        }
        return rsqrtf(sum / K + op.eps);
    }

    // Brings the activations of tokens t0 .. t0 + ROWS to shared memory, normed and rounded.
    __device__ __forceinline__ void stage_x(int t0) {
        if constexpr (Weights::BY_LANES) stage_by_lanes(t0);
        else stage_in_order(t0);
    }
    // As lanes multiply them, with their sums. Many loads are in flight at once: one takes as long as all of them.
    __device__ __forceinline__ void stage_by_lanes(int t0) {
        constexpr int MOST = WARPS <= 8 ? 16 : 8, HELD = EACH <= MOST ? EACH : 8, NORMS = EACH <= 2 ? 1 : HELD < 8 ? HELD : 8;
#pragma unroll 1
        for (int r0 = 0; r0 < ROWS; r0 += WARPS / SHARE) {
            const int r = r0 + warp / SHARE, mine = warp % SHARE * 32 + lane;
            const bool there = r < ROWS && t0 + r < op.tokens;
            // Any row where there is none: ptxas 13.0 lets a choice between an offset and 0 be read before the 0 is there.
            const E* from = op.x + op.source(min(t0 + r, op.tokens - 1)) * K;
            Vec16 held[HELD];
            const auto load = [&](int i0) {
#pragma unroll
                for (int i = 0; i < HELD; i++) held[i] = load16(from + min(mine + (i0 + i) * SHARE * 32, K / 8 - 1) * 8);
            };
            const auto inside = [&](int i) { return there && mine + i * SHARE * 32 < K / 8; };
            float scale = 1;
            if constexpr (Op::NORM != 0) {
                float sum = 0;
#pragma unroll 1
                for (int i0 = 0; i0 < EACH; i0 += HELD) {
                    load(i0);
#pragma unroll
                    for (int i = 0; i < HELD; i++) sum += inside(i0 + i) ? sum_squares<E>(held[i]) : 0.0f;
                }
                scale = norm_scale(sum);
            }
#pragma unroll 1
            for (int i0 = 0; i0 < EACH; i0 += HELD) {
                if (Op::NORM == 0 || EACH > HELD) load(i0);
                Norm norms[NORMS];
#pragma unroll
                for (int i = 0; i < HELD; i++) {
                    const int u = mine + (i0 + i) * SHARE * 32;
                    if (i % NORMS == 0)
#pragma unroll
                        for (int j = 0; j < NORMS; j++) norms[j].load(op, min(u + j * SHARE * 32, K / 8 - 1) * 8);
                    Vec16 x = held[i];
                    if constexpr (Op::NORM != 0) norm_x(x, scale, norms[i % NORMS]);
                    if (!inside(i0 + i)) x = Vec16{};
{% if w.packing %}
                    if constexpr (SCALED) {
                        store_scaled<typename Weights::Packed, E>(x_shared, (float*)(x_shared + K * 2), x, u, inside(i0 + i), Weights::scaled_factor());
                        continue;
                    }
{% endif %}
                    if constexpr (Weights::SPAN != 0) sum_x(x, r, u);
                    if (!inside(i0 + i)) continue;
                    u8* const to = x_shared + r * K * 2;
                    deal(to + (u / 8 * 8 + (u / 4 ^ r) % 2 * 4) * 16, u, x);
                }
            }
        }
        __syncthreads();
    }
    // As they are, k in any order: a load at a time, since kernels that read weights as they are spill with more on some GPUs.
    __device__ __forceinline__ void stage_in_order(int t0) {
        constexpr int HELD = EACH <= 2 ? EACH : 1;
#pragma unroll 1
        for (int r0 = 0; r0 < ROWS; r0 += WARPS / SHARE) {
            const int r = r0 + warp / SHARE, mine = warp % SHARE * 32 + lane;
            const bool there = r < ROWS && t0 + r < op.tokens;
            const E* from = op.x + op.source(min(t0 + r, op.tokens - 1)) * K;
            Vec16 held[HELD];
            float scale = 1;
            if constexpr (HELD == EACH) {
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    held[i] = there && mine + i * SHARE * 32 < K / 8 ? load16(from + (mine + i * SHARE * 32) * 8) : Vec16{};
            }
            if constexpr (Op::NORM != 0) {
                float sum = 0;
#pragma unroll 8
                for (int i = 0; i < EACH; i++) {
                    const int u = mine + i * SHARE * 32;
                    if (HELD == EACH) sum += sum_squares<E>(held[i % HELD]);
                    else if (there && u < K / 8) sum += sum_squares<E>(load16(from + u * 8));
                }
                scale = norm_scale(sum);
            }
#pragma unroll 4
            for (int i = 0; i < EACH; i++) {
                const int u = mine + i * SHARE * 32;
                if (!there || u >= K / 8) continue;
                Vec16 x = HELD == EACH ? held[i % HELD] : load16(from + u * 8);
                if constexpr (Op::NORM != 0) {
                    Norm norm;
                    norm.load(op, u * 8);
                    norm_x(x, scale, norm);
                }
                u8* const to = x_shared + r * K * 2;
                store16(to + (u ^ (r & 1) << 2) * 16, x);
            }
        }
        __syncthreads();
    }
    // The sum of a span's activations, of which x is a lane's part, or zeros where there are none.
    __device__ __forceinline__ void sum_x(const Vec16& x, int r, int u) {
        constexpr int LANES = Weights::SPAN / 8;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) sum += low<E>(x.w[i]) + high<E>(x.w[i]);
#pragma unroll
        for (int d = 1; d < LANES; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
        if (u % LANES == 0 && u < K / 8 && r < ROWS) ((float*)(x_shared + ROWS * K * 2))[u / LANES * ROWS + r] = sum * Weights::sum_factor();
    }
    // Eight columns, u of all, of which four lanes multiply two each: to where these find what they have of 32 in 16 bytes. Lanes
    // that store side by side begin with different pairs, and so meet all banks.
    __device__ __forceinline__ static void deal(u8* to, int u, Vec16 x) {
        const int turn = u / 8 % 4;
        if (turn & 1) x = Vec16{ {x.w[1], x.w[2], x.w[3], x.w[0]} };
        if (turn & 2) x = Vec16{ {x.w[2], x.w[3], x.w[0], x.w[1]} };
#pragma unroll
        for (int i = 0; i < 4; i++) *(u32*)(to + (i + turn) % 4 * 16 + u % 4 * 4) = x.w[i];
    }
    typedef NormWeights<Op, Op::NORM> Norm;
    __device__ __forceinline__ static void norm_x(Vec16& x, float scale, const Norm& norm) {
        float v[8];
        norm.widen(v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= scale;
        scale8<E>(x, v);
    }

    // The scale of a token's row, with ROWS = 0, once the sums of squares are in shared memory.
    __device__ __forceinline__ static float row_scale(const float* sums, int t) {
        if (Op::NORM == 0 || ROWS != 0) return 1;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += sums[w * NT * 8 + t];
        return rsqrtf(sum / K + Op::eps);
    }

    // Sums over the block's warps, and their way out. `red` is one of two buffers, so that a warp may
    // go on to the next pass while others read this one's.
    __device__ __forceinline__ float total(const float* red, int q0, int pair, int t, int second) const {
        const float* from = red + ((pair / 8 * NT + t / 8) * 16 + Weights::place(op, q0 + pair, second)) * COLS + t % 8;
        float sum = 0;
        if constexpr (RANKS == 1) {
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += from[w * MT * NT * 16 * COLS];
        } else {
#pragma unroll
            for (int i = 0; i < RANKS * WARPS; i++) sum += cluster_load(from + i % WARPS * MT * NT * 16 * COLS, i / WARPS);
        }
        return sum;
    }
    __device__ __forceinline__ void finish(const float (&acc)[MT][NT][4], int pass, int t0, float* red) {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++) {
                float* to = red + ((warp * MT + m) * NT + n) * 16 * COLS + group * COLS;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (quad * 2 + i % 2 < COLS) to[i / 2 * 8 * COLS + quad * 2 + i % 2] = acc[m][n][i];
            }
        __shared__ float row_sums[Op::NORM && !ROWS ? WARPS * NT * 8 : 1];
        if (Op::NORM && !ROWS && pass == block()) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
                float s = squares[n];
                s += __shfl_xor_sync(0xffffffffu, s, 1);
                s += __shfl_xor_sync(0xffffffffu, s, 2);
                if (quad == 0) row_sums[warp * NT * 8 + n * 8 + group] = s;
            }
        }
        if constexpr (RANKS > 1) cluster_sync();
        else __syncthreads();
        const int q0 = pass * MT * 8, tokens = min(TOKENS, op.tokens - t0);
        if constexpr (Op::HEAD != 0) {
            constexpr int EACH = (MT * 8 + 31) / 32;
            for (int t = rank() * WARPS + warp; t < tokens; t += RANKS * WARPS) {
                const float scale = row_scale(row_sums, t);
                float a[EACH], b[EACH], s = 0;
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    const int pair = i * 32 + lane;
                    if (pair >= MT * 8) continue;
                    a[i] = total(red, q0, pair, t, 0) * scale + op.added(q0 + pair, 0);
                    b[i] = total(red, q0, pair, t, 1) * scale + op.added(q0 + pair, 1);
                    s += a[i] * a[i] + b[i] * b[i];
                }
                s = op.head_scale(q0, warp_sum(s) / (MT * 16));
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    if (i * 32 + lane < MT * 8) op.emit(q0 + i * 32 + lane, t0 + t, a[i], b[i], s);
            }
        } else {
#pragma unroll 1
            for (int i = rank() * WARPS * 32 + threadIdx.x; i < tokens * MT * 8; i += RANKS * WARPS * 32) {
                const int pair = i % (MT * 8), t = i / (MT * 8);
                if (q0 + pair >= Op::PAIRS) continue;
                const float scale = row_scale(row_sums, t);
                op.emit(q0 + pair, t0 + t, total(red, q0, pair, t, 0) * scale, total(red, q0, pair, t, 1) * scale, 1.0f);
            }
        }
    }
};

// WARPS split K, with STAGES stages (16 rows, 64 columns, 2 KiB) in flight in each; a pass is MT tiles
// of 8 pairs by NT tiles of 8 tokens. ROWS tokens' activations are normed into shared memory; with
// ROWS = 0 they come from the L2 cache, pass by pass, and the norm's row scale is applied to the sums
// (x * weight is rounded before: for f16 it might overflow). Shared memory in bytes:
// WARPS * (STAGES * 2048 + MT * NT * 128 * COLS) + ROWS * K * 2.
template <class Op, int WARPS, int STAGES, int MT, int NT, int ROWS, int RANKS> struct Skinny
    : FewTokens<Op, WARPS, WARPS * STAGES * Op::template Weights<Op, MT>::BYTES, MT, NT, ROWS, RANKS> {
    typedef FewTokens<Op, WARPS, WARPS * STAGES * Op::template Weights<Op, MT>::BYTES, MT, NT, ROWS, RANKS> Base;
    typedef typename Op::X E;
    typedef typename Base::Weights Weights;
    using Base::K, Base::PASSES, Base::TOKENS, Base::RED, Base::op, Base::warp, Base::lane, Base::group, Base::quad, Base::xrow, Base::xs, Base::rank, Base::block, Base::blocks,
        Base::red, Base::squares;
    static constexpr int STEPS = K / 64;
    static constexpr int MINE = (STEPS + WARPS * RANKS - 1) / (WARPS * RANKS);   // steps of a warp
    static constexpr bool AHEAD = ROWS == 0 && NT <= 2;             // fragments are asked for a step before use
    static_assert(K % 64 == 0, "K is not a multiple of 64");
    static_assert(STAGES % MT == 0, "a tile keeps its stages");

    u32 ring;

    // The flow of weights into the ring, ahead of their use.
    int flow_left, flow_pass, flow_step = 0, flow_slot = 0;
    typename Weights::Rows row;

    __device__ __forceinline__ Skinny(const Op& op, u8* shared) : Base(op, shared) {
        ring = (u32)__cvta_generic_to_shared(shared) + warp * STAGES * Weights::BYTES;
    }

    // Asks for the next stage, tile m of its step.
    __device__ __forceinline__ void flow(int m) {
        if (flow_left > 0) {
            if (flow_step == 0) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int r = i * 4 + lane / 8;                 // row of the tile
                    row[m * 4 + i] = Weights::row_of(op, r, (flow_pass * MT + m) * 8);
                }
            }
            const int step = (flow_step * RANKS + rank()) * WARPS + warp;
            if (step < STEPS) Weights::fetch(op, row, m, ring, flow_slot, step, lane);
            if (m == MT - 1 && ++flow_step == MINE) {
                flow_step = 0;
                flow_pass += blocks();
                if (flow_pass >= PASSES) flow_pass = block();
            }
            if (++flow_slot == STAGES) flow_slot = 0;
            flow_left--;
            if constexpr (Op::AHEAD) {
                if (flow_left == 0) op.ahead.bring((lane * gridDim.x + blockIdx.x) * WARPS + warp, 32 * gridDim.x * WARPS);
            }
        }
        copy_commit();
    }

    // The activations' fragments of a step: from shared memory, or from global memory ahead of use.
    __device__ __forceinline__ void load_x(Vec16 (&x)[NT][2], int step, int t0) {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if constexpr (ROWS != 0)
                    x[n][h] = load16_shared(xs + quad * 16 + n * 8 * K * 2 + min(step, STEPS - 1) * 128 + (h ^ (xrow & 1)) * 64);
                else
                    x[n][h] = load16(op.x + op.source(min(t0 + n * 8 + group, op.tokens - 1)) * K + min(step, STEPS - 1) * 64 + h * 32 + quad * 8);
            }
    }
    // Norms a step's fragments but for the row's scale.
    __device__ __forceinline__ void norm_fragments(Vec16 (&x)[NT][2], int step, bool sum) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float v[8];
            typename Base::Norm norm;
            norm.load(op, step * 64 + h * 32 + quad * 8);
            norm.widen(v);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                if (sum) squares[n] += sum_squares<E>(x[n][h]);
                if constexpr (Op::NORM == 2) scale8<E>(x[n][h], v);
            }
        }
    }
    __device__ __forceinline__ void multiply(float (&acc)[NT][4], const Vec16 (&x)[NT][2], u32 from) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            Vec16 a, b;
            Weights::fragments(from, h, lane, a, b);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const Vec16& v = x[n][h];
                mma(acc[n], a.w[0], b.w[0], a.w[1], b.w[1], v.w[0], v.w[1], E{});
                mma(acc[n], a.w[2], b.w[2], a.w[3], b.w[3], v.w[2], v.w[3], E{});
            }
        }
    }

    __device__ __forceinline__ void run() {
        const int passes = block() < PASSES ? (PASSES - 1 - block()) / blocks() + 1 : 0;
        flow_left = (op.tokens + TOKENS - 1) / TOKENS * passes * MINE * MT;
        flow_pass = block();
        for (int i = 0; i < STAGES; i += MT)
#pragma unroll
            for (int m = 0; m < MT; m++) flow(m);
        pdl_launch();
        pdl_wait();
        int slot = 0, parity = 0;
#pragma unroll 1
        for (int t0 = 0; t0 < op.tokens; t0 += TOKENS) {
            Vec16 ahead[NT][2];
            if constexpr (ROWS != 0) {
                this->stage_x(t0);
            } else {
                if (Op::NORM && t0 > 0) __syncthreads();            // row_sums is free again
#pragma unroll
                for (int n = 0; n < NT; n++) squares[n] = 0;
                if constexpr (AHEAD) load_x(ahead, warp, t0);
            }
#pragma unroll 1
            for (int pass = block(); pass < PASSES; pass += blocks()) {
                float acc[MT][NT][4] = {};
#pragma unroll 1
                for (int i = 0; i < MINE; i++) {
                    const int step = (i * RANKS + rank()) * WARPS + warp;
                    Vec16 x[NT][2];
                    if constexpr (!AHEAD) {
                        load_x(x, step, t0);
                    } else {
#pragma unroll
                        for (int n = 0; n < NT; n++) x[n][0] = ahead[n][0], x[n][1] = ahead[n][1];
                        load_x(ahead, i + 1 < MINE ? step + WARPS * RANKS : warp, t0);
                    }
                    if (Op::NORM && !ROWS && step < STEPS) norm_fragments(x, step, pass == block());
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        copy_wait<STAGES - 1>();
                        __syncwarp();
                        if (step < STEPS) multiply(acc[m], x, ring + slot * Weights::BYTES);
                        __syncwarp();
                        if (++slot == STAGES) slot = 0;
                        flow(m);
                    }
                }
                this->finish(acc, pass, t0, red + parity * RED);
                parity ^= 1;
            }
        }
        if constexpr (RANKS > 1) cluster_sync();                    // others may still read this block's sums
    }
};
