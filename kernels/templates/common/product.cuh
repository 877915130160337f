// The product of tens to hundreds of tokens on Hopper, y[T, N] = x[T, K] · w[N, K]ᵀ.
//
// Rows of w are the tensor core's M and tokens its N, so that few tokens waste nothing. A block has a
// tile of 64 rows for each of GROUPS warpgroups, and TOKENS tokens. Two more warps have the copy engine
// fill two rings, WEIGHTS tiles of w and ACTIVATIONS tiles of x, 64 columns each: w's runs ahead, across
// tiles and before the kernel before this one has ended, and hides what products and sums take.
//
// The SPLIT blocks of a cluster part K between them; each sends the others the sums of their share of
// the tokens, and adds up its own in the order of K. Order of summation: chains of 16 columns in
// ascending order within a slice of K; then slices in ascending order.
//
// An `Op` says what becomes of sums:
//   X, K, N, PARTS        element type of x and w; columns and rows of w; rows of w of one output, 1 or
//                         2: with 2, a tile of 64 rows is the first ones of 32 outputs and then the second ones
//   BOX, row(q, part)     so many outputs from q on, a multiple of BOX, have their rows side by side, from there on
//   tokens
//   prepare()             a warpgroup keeps what finish() wants of the tokens, once
//   finish(q, t, a, b)    takes the sums of outputs q .. q + 7 of token t, b of their second rows

template <class Op, int GROUPS, int TOKENS, int WEIGHTS, int ACTIVATIONS, int SPLIT> struct Product {
    static constexpr u32 W_BYTES = GROUPS * 64 * 128, X_BYTES = TOKENS * 128;
    static constexpr int STEPS = Op::K / 64, CHUNK = TOKENS > 64 ? 32 : TOKENS, SHARE = CHUNK / SPLIT;
    static constexpr int ROW = 68;                     // floats of a token's sums: 64, and 4 against bank conflicts
    static constexpr int OUTPUTS = 64 / Op::PARTS, ALL = Op::N / Op::PARTS, TILES = (ALL + OUTPUTS * GROUPS - 1) / (OUTPUTS * GROUPS);
    static constexpr int BOXES = GROUPS * 64 / Op::BOX;
    static constexpr bool MERGES = SPLIT > 1;
    static_assert(Op::K % 64 == 0 && Op::N % (8 * Op::PARTS) == 0 && TOKENS % CHUNK == 0 && CHUNK % SPLIT == 0 && STEPS >= SPLIT, "shape");

    const Op& op;
    const TileMap *w_tiles, *x_tiles;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = blockIdx.x % SPLIT, begin = STEPS * rank / SPLIT, steps = STEPS * (rank + 1) / SPLIT - begin;
    const int first = blockIdx.x / SPLIT, stride = gridDim.x / SPLIT, token_tiles = (op.tokens + TOKENS - 1) / TOKENS, work = TILES * token_tiles;
    u8* base;
    u32 w_ring, x_ring, w_full, w_empty, x_full, x_empty, inbound_full, inbound_empty;

    __device__ __forceinline__ Product(const Op& op, const TileMap* w_tiles, const TileMap* x_tiles, u8* shared)
        : op(op), w_tiles(w_tiles), x_tiles(x_tiles) {
        __shared__ __align__(8) u64 barriers[2 * (WEIGHTS + ACTIVATIONS + GROUPS)];
        base = shared + (1024 - shared_at(shared) % 1024) % 1024;
        w_ring = shared_at(base);
        x_ring = w_ring + WEIGHTS * W_BYTES;
        w_full = shared_at(barriers), w_empty = w_full + WEIGHTS * 8;
        x_full = w_empty + WEIGHTS * 8, x_empty = x_full + ACTIVATIONS * 8;
        inbound_full = x_empty + ACTIVATIONS * 8, inbound_empty = inbound_full + GROUPS * 8;
        if (threadIdx.x == 0) {
            for (int i = 0; i < WEIGHTS; i++) barrier_init(w_full + i * 8, 1), barrier_init(w_empty + i * 8, GROUPS);
            for (int i = 0; i < ACTIVATIONS; i++) barrier_init(x_full + i * 8, 1), barrier_init(x_empty + i * 8, GROUPS);
            for (int i = 0; i < GROUPS; i++) barrier_init(inbound_full + i * 8, 1), barrier_init(inbound_empty + i * 8, MERGES ? SPLIT - 1 : 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        if (MERGES) asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" ::: "memory");
        else __syncthreads();
    }

    // The first output and token of an item. Blocks that run together share both: a band of up to 8 tiles of
    // tokens takes all of w before the next one.
    struct Place { int output, token; };
    __device__ __forceinline__ Place place(int item) const {
        const int band = item / (8 * TILES), width = min(8, token_tiles - 8 * band), in = item - band * 8 * TILES;
        return Place{in / width * (OUTPUTS * GROUPS), (8 * band + in % width) * TOKENS};
    }

    // Fills the ring of w. Weights are constant: nothing needs to be waited for.
    __device__ __forceinline__ void fill_weights() {
        u64 once;                                      // they leave the rest of the cache alone
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
        int slot = 0;
        u32 round = 0;
        for (int item = first; item < work; item += stride) {
            const int output = place(item).output;
            int rows[BOXES];
#pragma unroll
            for (int box = 0; box < BOXES; box++) {
                const int tile = box * Op::BOX / 64, in = box * Op::BOX % 64;
                rows[box] = Op::row(output + tile * OUTPUTS + in % OUTPUTS, in / OUTPUTS);
            }
#pragma unroll 1
            for (int step = 0; step < steps; step++) {
                if (round > 0) barrier_wait(w_empty + slot * 8, (round - 1) & 1);
                barrier_expect(w_full + slot * 8, W_BYTES);
#pragma unroll
                for (int box = 0; box < BOXES; box++)
                    copy_tile(w_ring + slot * W_BYTES + box * (Op::BOX * 128), w_tiles, (begin + step) * 64, rows[box], w_full + slot * 8, once);
                if (++slot == WEIGHTS) slot = 0, round++;
            }
        }
    }
    __device__ __forceinline__ void fill_activations() {
        u64 again;                                     // every tile of rows reads them
        asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(again));
        int slot = 0;
        u32 round = 0;
        pdl_wait();
        for (int item = first; item < work; item += stride) {
            const int t0 = place(item).token;
#pragma unroll 1
            for (int step = 0; step < steps; step++) {
                if (round > 0) barrier_wait(x_empty + slot * 8, (round - 1) & 1);
                barrier_expect(x_full + slot * 8, X_BYTES);
                copy_tile(x_ring + slot * X_BYTES, x_tiles, (begin + step) * 64, t0, x_full + slot * 8, again);
                if (++slot == ACTIVATIONS) slot = 0, round++;
            }
        }
    }

    // A warpgroup's sums, one tile after the other.
    __device__ __forceinline__ void multiply() {
        const int group = warp / 4, me = threadIdx.x % 128;
        int w_slot = 0, x_slot = 0, chunks = 0;
        u32 w_parity = 0, x_parity = 0;
        for (int item = first; item < work; item += stride) {
            float sums[TOKENS / 8][4];
            int w_before = 0, x_before = 0;
            const auto release = [&]() {
                if (me == 0) barrier_arrive(w_empty + w_before * 8);
                if (me == 32) barrier_arrive(x_empty + x_before * 8);
            };
#pragma unroll 1
            for (int step = 0; step < steps; step++) {
                barrier_wait(w_full + w_slot * 8, w_parity);
                barrier_wait(x_full + x_slot * 8, x_parity);
                const u64 w = descriptor(w_ring + w_slot * W_BYTES + group * 8192, 16, 1024);
                const u64 x = descriptor(x_ring + x_slot * X_BYTES, 16, 1024);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; k++) tile_product(sums, w + k * 2, x + k * 2, step > 0 || k > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (step > 0) release();               // the step before has been read
                if (step == steps / 2 && item == first) op.prepare();  // the ring of weights has run dry, and fills again
                w_before = w_slot, x_before = x_slot;
                if (++w_slot == WEIGHTS) w_slot = 0, w_parity ^= 1;
                if (++x_slot == ACTIVATIONS) x_slot = 0, x_parity ^= 1;
            }
            wgmma_wait<0>();
            landed(sums);
            release();
            const Place at = place(item);
            finish(sums, at.output + group * OUTPUTS, at.token, group, me, chunks);
        }
    }
    // Sums go to shared memory, a token a row, so that what belongs together meets in one thread.
    __device__ __forceinline__ void finish(const float (&sums)[TOKENS / 8][4], int q0, int t0, int group, int me, int& chunks) {
        float* const own = (float*)(base + WEIGHTS * W_BYTES + ACTIVATIONS * X_BYTES) + group * (CHUNK * ROW * (MERGES ? 2 : 1));
        float* const inbound = own + CHUNK * ROW;      // SHARE tokens of each block of the cluster
        const auto together = [&]() { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); };
#pragma unroll
        for (int c = 0; c < TOKENS / CHUNK; c++, chunks++) {
            const int base_token = t0 + c * CHUNK, tokens = min(CHUNK, op.tokens - base_token);
            if (!MERGES) together();                   // all have read the chunk before
            else if (chunks > 0) barrier_wait(inbound_empty + group * 8, (chunks - 1) & 1);
#pragma unroll
            for (int j = 0; j < CHUNK / 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    own[(j * 8 + lane % 4 * 2 + i % 2) * ROW + warp % 4 * 16 + lane / 4 + i / 2 * 8] = sums[c * (CHUNK / 8) + j][i];
            if (MERGES) fence_products();
            together();
            if (MERGES) {
                const u32 full = inbound_full + group * 8;
                if (me == 0) barrier_expect(full, (SPLIT - 1) * SHARE * ROW * 4);
                if (me < SPLIT && me != rank) send(shared_at(inbound + rank * SHARE * ROW), shared_at(own + me * SHARE * ROW), SHARE * ROW * 4, full, me);
                barrier_wait(full, chunks & 1);
            }
            const int from = MERGES ? rank * SHARE : 0, to = MERGES ? min(tokens, from + SHARE) : tokens;
#pragma unroll 4
            for (int i = me + from * (OUTPUTS / 8); i < to * (OUTPUTS / 8); i += 128) {
                const int t = i / (OUTPUTS / 8), q = i % (OUTPUTS / 8) * 8;
                if (q0 + q >= ALL) continue;
                float v[2][8] = {};
#pragma unroll
                for (int part = 0; part < Op::PARTS; part++)
#pragma unroll
                    for (int s = 0; s < SPLIT; s++) {
                        const float* at = (s == rank ? own + t * ROW : inbound + (s * SHARE + t - from) * ROW) + q + part * 32;
                        const float4 a = *(const float4*)at, b = *(const float4*)(at + 4);
                        v[part][0] += a.x, v[part][1] += a.y, v[part][2] += a.z, v[part][3] += a.w;
                        v[part][4] += b.x, v[part][5] += b.y, v[part][6] += b.z, v[part][7] += b.w;
                    }
                op.finish(q0 + q, base_token + t, v[0], v[1]);
            }
            if (MERGES) {
                together();
                if (me < SPLIT && me != rank) barrier_arrive_at(inbound_empty + group * 8, me);
            }
        }
    }
    __device__ __forceinline__ void run() {
        if (warp == GROUPS * 4) {
            if (lane == 0) fill_weights();
        } else if (warp > GROUPS * 4) {
            if (lane == 0) fill_activations();
        } else {
            pdl_launch();
            pdl_wait();
            multiply();
        }
        __syncwarp();
        // Others may still be reading or writing this block's memory.
        if (MERGES) asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    }
};
