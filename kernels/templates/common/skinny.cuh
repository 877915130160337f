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
//   x, w, norm, eps, offset, tokens
//   source(t)    row of x of token t
//   rows(q, a, b)         the rows of w of pair q; b < 0 if there is no second
//   emit(q, t, a, b, s)   takes the two sums; s is the head's factor, 1 without HEAD
//   added(q, i)           with HEAD: what is added to a sum before the head's norm (elsewhere emit does)
//   head_scale(q, ms)     with HEAD: factor for q's head, whose mean square is ms

// Eight values as floats.
template <class E> __device__ __forceinline__ void widen8(const E* p, float (&v)[8]) {
    const Vec16 a = load16(p);
#pragma unroll
    for (int i = 0; i < 4; i++) v[2 * i] = low<E>(a.w[i]), v[2 * i + 1] = high<E>(a.w[i]);
}
__device__ __forceinline__ void widen8(const float* p, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = p[i];
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
                sa += v * to_f32(op.w[(i64)a * Op::K + k]);
                if (b >= 0) sb += v * to_f32(op.w[(i64)b * Op::K + k]);
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
// waits for another warp. The ring runs across tiles, and is filled before pdl_wait(): while the
// kernel before drains, this one's weights are on their way. Half of an SM's shared memory and
// registers are left to that neighbour.
__device__ __forceinline__ void copy16_async(u32 to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
#endif
}
__device__ __forceinline__ void copy_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;");
#endif
}
template <int LEFT> __device__ __forceinline__ void copy_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}
__device__ __forceinline__ Vec16 load16_shared(u32 p) {
    Vec16 v;
    asm volatile("ld.shared.v4.u32 { %0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "r"(p));
    return v;
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, bf16) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %0,%1,%2,%3}, { %4,%5,%6,%7}, { %8,%9}, { %0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, f16) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %0,%1,%2,%3}, { %4,%5,%6,%7}, { %8,%9}, { %0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}
// f16 could overflow in x * norm before the row's scale is known: only then is that found beforehand.
template <class E> struct IsF16 { static constexpr bool value = false; };
template <> struct IsF16<f16> { static constexpr bool value = true; };

// WARPS split K; STAGES steps of MT tiles of 8 pairs are in flight in each; NT tiles of 8 tokens;
// BATCH steps' activations are asked for together. Shared memory in bytes:
// WARPS * (STAGES * MT * 2048 + MT * NT * 512 + NT * 32).
template <class Op, int WARPS, int STAGES, int MT, int NT, int BATCH> struct Skinny {
    typedef typename Op::X E;
    static constexpr int STEPS = Op::K / 64;
    static constexpr int MINE = (STEPS + WARPS - 1) / WARPS;        // steps of a warp
    static constexpr int PASSES = (Op::PAIRS + MT * 8 - 1) / (MT * 8);
    static constexpr int STAGE = MT * 2048;                         // bytes
    static constexpr bool KEEP = MINE <= BATCH;                     // x stays in registers
    static constexpr bool PRE = Op::NORM != 0 && IsF16<E>::value;
    static_assert(Op::K % 64 == 0, "K is not a multiple of 64");
    static_assert(Op::HEAD == 0 || MT * 8 == Op::HEAD, "a pass is a head");

    const Op& op;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    u32 ring;
    float *red, *squares_of;
    Vec16 x[BATCH][NT][2];
    float squares[NT];

    // The flow of weights into the ring, ahead of their use.
    int flow_left, flow_pass, flow_step = 0, flow_slot = 0;
    int row[MT * 4];

    __device__ __forceinline__ Skinny(const Op& op, u8* shared) : op(op) {
        ring = (u32)__cvta_generic_to_shared(shared) + warp * STAGES * STAGE;
        red = (float*)(shared + WARPS * STAGES * STAGE);
        squares_of = red + WARPS * MT * NT * 128;
    }

    __device__ __forceinline__ void flow() {
        if (flow_left > 0) {
            if (flow_step == 0) {
#pragma unroll
                for (int i = 0; i < MT * 4; i++) {
                    const int r = i % 4 * 4 + lane / 8;             // row of the tile
                    int a, b;
                    op.rows(min((flow_pass * MT + i / 4) * 8 + r % 8, Op::PAIRS - 1), a, b);
                    row[i] = r < 8 || b < 0 ? a : b;
                }
            }
            const int step = flow_step * WARPS + warp;
            if (step < STEPS) {
                // Swizzled so that the 8 lanes of a read, two rows of 4, meet all banks.
                const int r = lane / 8, unit = lane % 8;
                const u32 to = ring + flow_slot * STAGE + r * 128 + (unit ^ (r & 1) << 2) * 16;
#pragma unroll
                for (int i = 0; i < MT * 4; i++)
                    copy16_async(to + i * 512, op.w + (i64)row[i] * Op::K + step * 64 + unit * 8);
            }
            flow_left--;
            if (++flow_step == MINE) {
                flow_step = 0;
                flow_pass += gridDim.x;
                if (flow_pass >= PASSES) flow_pass = blockIdx.x;
            }
            if (++flow_slot == STAGES) flow_slot = 0;
        }
        copy_commit();
    }

    // Activations of steps first .. first + BATCH of the tokens from t0 on, times the norm's weight.
    __device__ __forceinline__ void load_x(int first, int t0) {
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            const int step = (first + j) * WARPS + warp;
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const int t = t0 + n * 8 + group;
                const bool there = first + j < MINE && step < STEPS && t < op.tokens;
                const E* from = op.x + (there ? op.source(t) * Op::K + step * 64 + quad * 8 : 0);
#pragma unroll
                for (int h = 0; h < 2; h++) x[j][n][h] = there ? load16(from + h * 32) : Vec16{};
            }
        }
        if constexpr (Op::NORM != 0) {
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                const int step = (first + j) * WARPS + warp;
                if (first + j < MINE && step < STEPS) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        float v[8];
                        if constexpr (Op::NORM == 2) widen8(op.norm + step * 64 + h * 32 + quad * 8, v);
#pragma unroll
                        for (int n = 0; n < NT; n++) norm_x(x[j][n][h], v, n);
                    }
                }
            }
        }
    }
    __device__ __forceinline__ void norm_x(Vec16& x, const float (&v)[8], int n) {
        const float scale = PRE ? squares_of[n * 8 + group] : 1.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float a = low<E>(x.w[i]), b = high<E>(x.w[i]);
            squares[n] += a * a + b * b;
            if (Op::NORM == 2 || PRE) {
                const float va = Op::NORM == 2 ? v[2 * i] + op.offset : 1.0f;
                const float vb = Op::NORM == 2 ? v[2 * i + 1] + op.offset : 1.0f;
                x.w[i] = pack2<E>(a * scale * va, b * scale * vb);
            }
        }
    }
    // The rows' scales, before all else.
    __device__ __forceinline__ void pre_norm(int t0) {
        __syncthreads();
        for (int i = warp; i < NT * 8 && t0 + i < op.tokens; i += WARPS) {
            const E* from = op.x + op.source(t0 + i) * Op::K;
            float sum = 0;
            for (int k = lane * 8; k < Op::K; k += 256) {
                float v[8];
                widen8(from + k, v);
#pragma unroll
                for (int j = 0; j < 8; j++) sum += v[j] * v[j];
            }
            sum = warp_sum(sum);
            if (lane == 0) squares_of[i] = rsqrtf(sum / Op::K + op.eps);
        }
        __syncthreads();
    }

    // Sums over the block's warps, and their way out.
    __device__ __forceinline__ float total(int pair, int t, int second) {
        const float* from = red + ((pair / 8 * NT + t / 8) * 16 + second * 8 + pair % 8) * 8 + t % 8;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += from[w * MT * NT * 128];
        return sum;
    }
    __device__ __forceinline__ float row_scale(int t) {
        if (Op::NORM == 0 || PRE) return 1;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += squares_of[w * NT * 8 + t];
        return rsqrtf(sum / Op::K + op.eps);
    }
    __device__ __forceinline__ void finish(const float (&acc)[MT][NT][4], int pass, int t0) {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++) {
                float2* to = (float2*)(red + ((warp * MT + m) * NT + n) * 128 + group * 8 + quad * 2);
                to[0] = make_float2(acc[m][n][0], acc[m][n][1]);
                to[32] = make_float2(acc[m][n][2], acc[m][n][3]);
            }
        if (Op::NORM != 0 && !PRE) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
                float s = squares[n];
                s += __shfl_xor_sync(0xffffffffu, s, 1);
                s += __shfl_xor_sync(0xffffffffu, s, 2);
                if (quad == 0) squares_of[warp * NT * 8 + n * 8 + group] = s;
            }
        }
        __syncthreads();
        if constexpr (Op::HEAD != 0) {
            for (int t = warp; t < NT * 8 && t0 + t < op.tokens; t += WARPS) {
                constexpr int EACH = (MT * 8 + 31) / 32;
                const float scale = row_scale(t);
                float a[EACH], b[EACH], s = 0;
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    const int pair = i * 32 + lane, q = pass * MT * 8 + pair;
                    if (pair >= MT * 8) continue;
                    a[i] = total(pair, t, 0) * scale + op.added(q, 0);
                    b[i] = total(pair, t, 1) * scale + op.added(q, 1);
                    s += a[i] * a[i] + b[i] * b[i];
                }
                s = op.head_scale(pass * MT * 8, warp_sum(s) / (MT * 16));
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    if (i * 32 + lane < MT * 8) op.emit(pass * MT * 8 + i * 32 + lane, t0 + t, a[i], b[i], s);
            }
        } else {
            for (int i = threadIdx.x; i < MT * NT * 64; i += WARPS * 32) {
                const int pair = i % (MT * 8), t = i / (MT * 8), q = pass * MT * 8 + pair;
                if (q >= Op::PAIRS || t0 + t >= op.tokens) continue;
                const float scale = row_scale(t);
                op.emit(q, t0 + t, total(pair, t, 0) * scale, total(pair, t, 1) * scale, 1.0f);
            }
        }
        __syncthreads();
    }

    __device__ __forceinline__ void run() {
        const int passes = blockIdx.x < PASSES ? (PASSES - 1 - blockIdx.x) / gridDim.x + 1 : 0;
        flow_left = (op.tokens + NT * 8 - 1) / (NT * 8) * passes * MINE;
        flow_pass = blockIdx.x;
        for (int i = 0; i < STAGES; i++) flow();
        pdl_launch();
        pdl_wait();
        int slot = 0;
        const u32 here = ring + group * 128 + quad * 16;
        for (int t0 = 0; t0 < op.tokens; t0 += NT * 8) {
            if constexpr (PRE) pre_norm(t0);
            if constexpr (KEEP) {
#pragma unroll
                for (int n = 0; n < NT; n++) squares[n] = 0;
                load_x(0, t0);
            }
            for (int pass = blockIdx.x; pass < PASSES; pass += gridDim.x) {
                float acc[MT][NT][4] = {};
                if constexpr (!KEEP) {
#pragma unroll
                    for (int n = 0; n < NT; n++) squares[n] = 0;
                }
                for (int first = 0; first < MINE; first += BATCH) {
                    if constexpr (!KEEP) load_x(first, t0);
#pragma unroll
                    for (int j = 0; j < BATCH; j++) {
                        if (first + j >= MINE) break;
                        copy_wait<STAGES - 1>();
                        __syncwarp();
                        if ((first + j) * WARPS + warp < STEPS) multiply(acc, x[j], here + slot * STAGE);
                        __syncwarp();
                        if (++slot == STAGES) slot = 0;
                        flow();
                    }
                }
                finish(acc, pass, t0);
            }
        }
    }
    __device__ __forceinline__ void multiply(float (&acc)[MT][NT][4], const Vec16 (&x)[NT][2], u32 from) {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 at = from + m * 2048 + (h ^ (group & 1)) * 64;
                const Vec16 a = load16_shared(at), b = load16_shared(at + 1024);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const Vec16& v = x[n][h];
                    mma(acc[m][n], a.w[0], b.w[0], a.w[1], b.w[1], v.w[0], v.w[1], E{});
                    mma(acc[m][n], a.w[2], b.w[2], a.w[3], b.w[3], v.w[2], v.w[3], E{});
                }
            }
    }
};
