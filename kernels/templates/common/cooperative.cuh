// The product of hundreds of tokens and more on Hopper, y[T, N] = x[T, K] · w[N, K]ᵀ.
//
// Two warpgroups share a tile of 128 tokens, the tensor core's M, and ROWS rows of w, its N; a thread of a third
// has the copy engine fill a ring of STAGES such tiles, 64 columns each. The two blocks of a cluster have the same rows
// of w and tokens beside one another: each brings half of w's tile for both, so that a block reads two thirds of what
// it would need alone. Order of summation: one chain of 16 columns after 16 columns, ascending.
//
// An `Op` says what becomes of sums:
//   X, K, N, PARTS        element type of x and w; columns and rows of w; rows of w of one output, 1 or
//                         2: with 2, the first half of a tile's rows is of the first half of w, the other of the second
//   tokens
//   Early, early(q, t)    what `finish` reads beside sums, asked for while the last products run
//   finish(q, t, a, b, early)  takes the sums of outputs q .. q + 7 of token t, b of the second half's rows

template <class Op, int ROWS, int STAGES> struct Cooperative {
    static constexpr int GROUPS = 2, TOKENS = 64 * GROUPS, PAIR = 2, BAND = 8;
    static constexpr u32 X_BYTES = TOKENS * 128, W_BYTES = ROWS * 128, STAGE = X_BYTES + W_BYTES;
    static constexpr int STEPS = Op::K / 64, OUTPUTS = ROWS / Op::PARTS, ALL = Op::N / Op::PARTS, TILES = (ALL + OUTPUTS - 1) / OUTPUTS;
    static constexpr int EIGHTS = OUTPUTS / 32;        // that a thread has of a token's outputs
    typedef typename Op::Early Early;
    static_assert(Op::K % 64 == 0 && OUTPUTS % 32 == 0 && ALL % 32 == 0, "shape");

    const Op& op;
    const TileMap *w_tiles, *x_tiles;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % PAIR;
    const int first = blockIdx.x / PAIR, stride = gridDim.x / PAIR;
    const int pairs = (op.tokens + PAIR * TOKENS - 1) / (PAIR * TOKENS), work = TILES * pairs;
    u32 ring, full, empty;

    __device__ __forceinline__ Cooperative(const Op& op, const TileMap* w_tiles, const TileMap* x_tiles, u8* shared)
        : op(op), w_tiles(w_tiles), x_tiles(x_tiles) {
        __shared__ __align__(8) u64 barriers[2 * STAGES];
        ring = (shared_at(shared) + 1023) / 1024 * 1024;
        full = shared_at(barriers), empty = full + STAGES * 8;
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, PAIR * GROUPS);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        cluster_sync();
    }

    // The first output and token of an item. Pairs that run together share both: a band of up to BAND pairs of tiles of
    // tokens takes all of w before the next one.
    struct Place { int output, token; };
    __device__ __forceinline__ Place place(int item) const {
        const int band = item / (BAND * TILES), width = min(BAND, pairs - BAND * band), in = item - band * BAND * TILES;
        return Place{in / width * OUTPUTS, ((BAND * band + in % width) * PAIR + rank) * TOKENS};
    }

    // Fills the ring. Weights are constant: those of the first stages are asked for before the kernel before this one
    // has ended.
    __device__ __forceinline__ void fill() {
        u64 policy;
        asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
        const auto weights = [&](int slot, int step, const Place& at) {
            // This block's half of the rows: those of one part, if there are two.
            const int row = at.output + rank * (Op::PARTS == 2 ? ALL : ROWS / 2);
            barrier_expect(full + slot * 8, STAGE);
            copy_dealt_tile(3, ring + slot * STAGE + X_BYTES + rank * (W_BYTES / 2), w_tiles, step * 64, row, full + slot * 8, policy);
        };
        const int ahead = min(STAGES, STEPS);
        if (first < work)
            for (int step = 0; step < ahead; step++) weights(step, step, place(first));
        pdl_wait();
        int slot = 0;
        u32 round = 0;
        for (int item = first; item < work; item += stride) {
            const Place at = place(item);
#pragma unroll 1
            for (int step = 0; step < STEPS; step++) {
                if (round > 0) barrier_wait(empty + slot * 8, (round - 1) & 1);
                if (item > first || step >= ahead) weights(slot, step, at);
                copy_tile(ring + slot * STAGE, x_tiles, step * 64, at.token, full + slot * 8, policy);
                if (++slot == STAGES) slot = 0, round++;
            }
        }
    }

    __device__ __forceinline__ void multiply() {
        const int group = warp / 4, me = threadIdx.x % 128;
        int slot = 0;
        u32 parity = 0;
        for (int item = first; item < work; item += stride) {
            float sums[ROWS / 8][4];
            int before = 0;
            const auto release = [&]() {
                if (me < PAIR) barrier_arrive_at(empty + before * 8, me);
            };
#pragma unroll 1
            for (int step = 0; step < STEPS; step++) {
                barrier_wait(full + slot * 8, parity);
                const u64 x = descriptor(ring + slot * STAGE + group * 8192, 16, 1024);
                const u64 w = descriptor(ring + slot * STAGE + X_BYTES, 16, 1024);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; k++) tile_product(sums, x + k * 2, w + k * 2, step > 0 || k > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (step > 0) release();               // the step before has been read
                before = slot;
                if (++slot == STAGES) slot = 0, parity ^= 1;
            }
            const Place at = place(item);
            const int q = at.output + lane % 4 * 8, t = at.token + group * 64 + warp % 4 * 16 + lane / 4;
            Early early[2][EIGHTS];
            fetch(early[0], q, t);
            wgmma_wait<0>();
            landed(sums);
            release();
            fetch(early[1], q, t + 8);
            finish(sums, early[0], 0, q, t);
            finish(sums, early[1], 1, q, t + 8);
        }
    }
    __device__ __forceinline__ bool is_there(int q, int t) const { return t < op.tokens && q < ALL; }
    __device__ __forceinline__ void fetch(Early (&early)[EIGHTS], int q, int t) const {
#pragma unroll
        for (int j = 0; j < EIGHTS; j++)
            if (is_there(q + j * 32, t)) early[j] = op.early(q + j * 32, t);
    }
    // The copy engine dealt the rows of w so that a thread's sums of 32 rows are of eight neighbours.
    __device__ __forceinline__ void finish(const float (&sums)[ROWS / 8][4], const Early (&early)[EIGHTS], int r, int q, int t) const {
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) {
            float a[8], b[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                a[i] = sums[j * 4 + i / 2][r * 2 + i % 2];
                b[i] = sums[(Op::PARTS - 1) * (OUTPUTS / 8) + j * 4 + i / 2][r * 2 + i % 2];
            }
            if (is_there(q + j * 32, t)) op.finish(q + j * 32, t, a, b, early[j]);
        }
    }
    __device__ __forceinline__ void run() {
        if (warp >= GROUPS * 4) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
            if (warp == GROUPS * 4 && lane == 0) fill();
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
            pdl_launch();
            pdl_wait();
            multiply();
        }
        __syncwarp();
        cluster_sync();                                // the other may still be writing to this block's memory
    }
};
