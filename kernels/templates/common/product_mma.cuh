// The product of tens of tokens to any number, y[T, N] = x[T, K] · w[N, K]ᵀ, by `mma.sync`: on GPUs without Hopper's
// instructions, and on it beside product.cuh.
//
// Rows of w are the tensor core's M and tokens its N. A block has ROWS rows of w and TOKENS tokens; ROW_WARPS by
// TOKEN_WARPS warps share the tile, and read both operands from a ring of STAGES steps of 64 columns that all threads
// fill ahead of their use. Rows in shared memory are of 128 bytes, their 16-byte chunks exchanged by the row's number
// modulo 8, so that neither copies nor `ldmatrix` meet a bank twice. Before 8.0 there are no copies that a thread does
// not wait for: the next step passes through registers while this one is multiplied (STAGES is 2).
//
// Order of summation: 16 columns after 16 columns (before 8.0: 8 after 8), ascending, over all of K.
//
// An `Op` is that of product.cuh: X, K, N, PARTS, tokens, source(t), finish(q, t, a, b); and ROW, from one row of x to the next.
// Shared memory in bytes: STAGES * (ROWS + TOKENS) * 128, in which sums lie afterwards.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

template <class Op, int ROWS, int TOKENS, int ROW_WARPS, int TOKEN_WARPS, int STAGES> struct ProductMma {
    typedef typename Op::X E;
    static constexpr int K = Op::K, STEPS = K / 64, THREADS = ROW_WARPS * TOKEN_WARPS * 32;
    static constexpr int ALL = Op::N / Op::PARTS, OUTPUTS = ROWS / Op::PARTS, TILES = (ALL + OUTPUTS - 1) / OUTPUTS;
    static constexpr int STAGE = (ROWS + TOKENS) * 128, W_EACH = ROWS * 8 / THREADS, X_EACH = TOKENS * 8 / THREADS;
    static constexpr int MT = ROWS / ROW_WARPS / 16, NT = TOKENS / TOKEN_WARPS / 16; // tiles of 16 of a warp
    static constexpr int SUMS = ROWS + 4;              // floats of a token's sums: 4 against bank conflicts
    static_assert(K % 64 == 0 && ALL % 8 == 0 && OUTPUTS % 8 == 0 && Op::NORM == 0, "shape");
    static_assert(MT * ROW_WARPS * 16 == ROWS && NT * TOKEN_WARPS * 16 == TOKENS, "tiles of warps");
    static_assert(W_EACH * THREADS == ROWS * 8 && X_EACH * THREADS == TOKENS * 8, "copies of threads");
    static_assert(TOKENS * SUMS * 4 <= STAGES * STAGE, "sums lie where the ring was");

    const Op& op;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u8* const shared;
    u32 ring, copy_at, w_at, x_at;
    const E* w_from[W_EACH];
    const E* x_from[X_EACH];
#if __CUDA_ARCH__ < 800
    Vec16 held[W_EACH + X_EACH];
#endif

    __device__ __forceinline__ ProductMma(const Op& op, u8* shared) : op(op), shared(shared) {
        ring = (u32)__cvta_generic_to_shared(shared);
        const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
        copy_at = row * 128 + (chunk ^ (row & 7)) * 16;
        // Lanes name the rows of a load's four 8 x 8 matrices: of w, rows 0-7 and 8-15 of columns 0-7, then of 8-15; of
        // x, columns 0-7 and 8-15 of tokens 0-7, then of 8-15.
        w_at = (warp / TOKEN_WARPS * (ROWS / ROW_WARPS) + lane % 16) * 128;
        x_at = ROWS * 128 + (warp % TOKEN_WARPS * (TOKENS / TOKEN_WARPS) + lane % 8 + lane / 16 * 8) * 128;
    }
    // Rows that a thread copies: every THREADS / 8th; one beyond the last is the last.
    __device__ __forceinline__ void weights_of(int q0) {
#pragma unroll
        for (int j = 0; j < W_EACH; j++) {
            const int r = threadIdx.x / 8 + j * (THREADS / 8);
            const int n = min(q0 + r % OUTPUTS, ALL - 1) + r / OUTPUTS * ALL;
            w_from[j] = op.w + (i64)n * K + threadIdx.x % 8 * 8;
        }
    }
    __device__ __forceinline__ void activations_of(int t0) {
#pragma unroll
        for (int j = 0; j < X_EACH; j++) {
            const int t = min(t0 + (int)threadIdx.x / 8 + j * (THREADS / 8), op.tokens - 1);
            x_from[j] = op.x + op.source(t) * Op::ROW + threadIdx.x % 8 * 8;
        }
    }
    __device__ __forceinline__ void fetch_weights(int step, int slot) {
#pragma unroll
        for (int j = 0; j < W_EACH; j++) {
#if __CUDA_ARCH__ >= 800
            copy16_async(ring + slot * STAGE + copy_at + j * (THREADS * 16), w_from[j] + step * 64);
#else
            held[j] = load16(w_from[j] + step * 64);
#endif
        }
    }
    __device__ __forceinline__ void fetch_activations(int step, int slot) {
#pragma unroll
        for (int j = 0; j < X_EACH; j++) {
#if __CUDA_ARCH__ >= 800
            copy16_async(ring + slot * STAGE + ROWS * 128 + copy_at + j * (THREADS * 16), x_from[j] + step * 64);
#else
            held[W_EACH + j] = load16(x_from[j] + step * 64);
#endif
        }
    }
    // What passes through registers arrives in its slot.
    __device__ __forceinline__ void settle(int slot) {
#if __CUDA_ARCH__ < 800
#pragma unroll
        for (int j = 0; j < W_EACH + X_EACH; j++)
            store16(shared + slot * STAGE + copy_at + (j < W_EACH ? j * (THREADS * 16) : ROWS * 128 + (j - W_EACH) * (THREADS * 16)), held[j]);
#endif
    }
    struct Fragments { u32 w[MT][4], x[NT][4]; };
    __device__ __forceinline__ void load(Fragments& f, u32 at, int k) {
        const u32 w = at + w_at + ((2 * k + lane / 16) ^ (lane & 7)) * 16, x = at + x_at + ((2 * k + lane / 8 % 2) ^ (lane & 7)) * 16;
#pragma unroll
        for (int m = 0; m < MT; m++) load_matrices(f.w[m], w + m * 2048);
#pragma unroll
        for (int n = 0; n < NT; n++) load_matrices(f.x[n], x + n * 2048);
    }
    __device__ __forceinline__ void multiply(float (&sums)[MT][2 * NT][4], u32 at) {
        Fragments f[2];
        load(f[0], at, 0);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (k < 3) load(f[(k + 1) % 2], at, k + 1);
            const Fragments& a = f[k % 2];
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < 2 * NT; n++)
                    mma(sums[m][n], a.w[m][0], a.w[m][1], a.w[m][2], a.w[m][3], a.x[n / 2][n % 2 * 2], a.x[n / 2][n % 2 * 2 + 1], E{});
        }
    }
    // Sums go to shared memory, a token a row, so that neighbours and both halves of w meet in one thread.
    __device__ __forceinline__ void finish(const float (&sums)[MT][2 * NT][4], int q0, int t0) {
        float* const all = (float*)shared;
        const int row0 = warp / TOKEN_WARPS * (ROWS / ROW_WARPS) + lane / 4, token0 = warp % TOKEN_WARPS * (TOKENS / TOKEN_WARPS) + lane % 4 * 2;
        __syncthreads();                               // the ring has been read
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < 2 * NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    all[(token0 + n * 8 + i % 2) * SUMS + row0 + m * 16 + i / 2 * 8] = sums[m][n][i];
        __syncthreads();
        const int tokens = min(TOKENS, op.tokens - t0);
#pragma unroll 1
        for (int i = threadIdx.x; i < tokens * (OUTPUTS / 8); i += THREADS) {
            const int t = i / (OUTPUTS / 8), q = i % (OUTPUTS / 8) * 8;
            if (q0 + q >= ALL) continue;
            float v[2][8] = {};
#pragma unroll
            for (int part = 0; part < Op::PARTS; part++) {
                const float* at = all + t * SUMS + part * OUTPUTS + q;
                const float4 a = *(const float4*)at, b = *(const float4*)(at + 4);
                v[part][0] = a.x, v[part][1] = a.y, v[part][2] = a.z, v[part][3] = a.w;
                v[part][4] = b.x, v[part][5] = b.y, v[part][6] = b.z, v[part][7] = b.w;
            }
            op.finish(q0 + q, t0 + t, v[0], v[1]);
        }
    }
    __device__ __forceinline__ void run() {
        // Blocks that run together share rows and tokens: a band of up to 8 tiles of tokens takes all of w before the next.
        const int token_tiles = (op.tokens + TOKENS - 1) / TOKENS, band = blockIdx.x / (8 * TILES);
        const int width = min(8, token_tiles - 8 * band), in = blockIdx.x - band * 8 * TILES;
        if ((int)blockIdx.x >= TILES * token_tiles) {
            pdl_wait();
            return;
        }
        const int q0 = in / width * OUTPUTS, t0 = (8 * band + in % width) * TOKENS;
        constexpr bool AHEAD = STAGES > 2;             // weights do not wait for the kernel before
        weights_of(q0);
        if constexpr (AHEAD) {
#pragma unroll
            for (int s = 0; s < STAGES - 1; s++)
                if (s < STEPS) fetch_weights(s, s);
        }
        pdl_launch();
        pdl_wait();
        activations_of(t0);
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) {
            if (s < STEPS) {
                if constexpr (!AHEAD) fetch_weights(s, s);
                fetch_activations(s, s);
                settle(s);
            }
            copy_commit();
        }
        float sums[MT][2 * NT][4] = {};
        int slot = 0, next = STAGES - 1;
#pragma unroll 1
        for (int step = 0; step < STEPS; step++) {
            copy_wait<STAGES - 2>();
            __syncthreads();                           // it has landed, and the step before has been read
            const bool more = step + STAGES - 1 < STEPS;
            if (more) fetch_weights(step + STAGES - 1, next), fetch_activations(step + STAGES - 1, next);
            copy_commit();
            multiply(sums, ring + slot * STAGE);
            if (more) settle(next);
            if (++slot == STAGES) slot = 0;
            if (++next == STAGES) next = 0;
        }
        copy_wait<0>();
        finish(sums, q0, t0);
    }
};
