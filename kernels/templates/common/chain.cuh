// The product of one token on Hopper in the order of product.cuh without SPLIT: a chain of 16 columns in ascending
// order over all of K. So warps cannot part K: each has 16 rows of w to itself, from a ring of its own that the copy
// engine fills, BOXES times 64 columns a stage. Tiles are dealt to multiprocessors in turn, and there to warps, so that
// all read the same number of bytes.
//
// An `Op` of skinny.cuh says what becomes of sums: rows of w that lie 8 apart in a tile are neighbours in N where
// PARTS is 1 (`store`), and a pair's two rows where it is 2 (`emit`).
// Shared memory in bytes: 1024 + WARPS * STAGES * BOXES * 2048 + K * 2.
template <class Op, int WARPS, int STAGES, int BOXES> struct Chain {
    typedef typename Op::X E;
    static constexpr int K = Op::K, STEPS = K / (64 * BOXES), BYTES = 2048 * BOXES;
    static constexpr int ALL = Op::N / Op::PARTS, OUTPUTS = 16 / Op::PARTS, TILES = (ALL + OUTPUTS - 1) / OUTPUTS;
    static_assert(K % (64 * BOXES) == 0, "shape");

    const Op& op;
    const TileMap* w_tiles;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = blockIdx.x + gridDim.x * warp, stride = gridDim.x * WARPS;
    u32 ring, full, xs;
    u8* x_shared;
    u64 once;
    int flow_tile, flow_step = 0, flow_slot = 0;       // what the ring is asked for next

    __device__ __forceinline__ Chain(const Op& op, const TileMap* w_tiles, u8* shared) : op(op), w_tiles(w_tiles), flow_tile(first) {
        __shared__ __align__(8) u64 barriers[WARPS * STAGES];
        u8* const base = shared + (1024 - shared_at(shared) % 1024) % 1024;
        ring = shared_at(base) + warp * STAGES * BYTES;
        x_shared = base + WARPS * STAGES * BYTES;
        xs = shared_at(x_shared) + lane % 4 * 16;
        full = shared_at(barriers) + warp * STAGES * 8;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
        if (lane == 0) {
            for (int i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
    }
    // Asks for the next stage.
    __device__ __forceinline__ void flow() {
        if (flow_tile >= TILES) return;
        if (lane == 0) {
            const u32 to = ring + flow_slot * BYTES, at = full + flow_slot * 8;
            barrier_expect(at, BYTES);
#pragma unroll
            for (int box = 0; box < BOXES; box++)
#pragma unroll
                for (int part = 0; part < Op::PARTS; part++)
                    copy_tile(to + box * 2048 + part * 1024, w_tiles, (flow_step * BOXES + box) * 64, flow_tile * OUTPUTS + part * ALL, at, once);
        }
        if (++flow_slot == STAGES) flow_slot = 0;
        if (++flow_step == STEPS) flow_step = 0, flow_tile += stride;
    }
    // Activations, as the tensor core's operands of 32 columns, which four lanes have; all tokens of its 8 are the one.
    __device__ __forceinline__ void stage_x() {
        for (int i = threadIdx.x; i < K / 8; i += WARPS * 32) {
            const Vec16 x = load16(op.x + op.source(0) * K + i * 8);
#pragma unroll
            for (int q = 0; q < 4; q++)                // columns 2q and 2q + 1 of 8
                *(u32*)(x_shared + (i / 4 * 4 + q) * 16 + i % 4 * 4) = x.w[q];
        }
        __syncthreads();
    }
    struct Fragments { u32 w[4 * BOXES][4]; Vec16 x[2 * BOXES]; };
    __device__ __forceinline__ void load(Fragments& f, int slot, int step) {
        // Lanes 0-7, 8-15, .. name the rows of the four 8 x 8 matrices of 16 columns.
        const int row = lane % 16, half = lane / 16;
        const u32 at = ring + slot * BYTES + row * 128;
#pragma unroll
        for (int k = 0; k < 4 * BOXES; k++)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
                         : "=r"(f.w[k][0]), "=r"(f.w[k][1]), "=r"(f.w[k][2]), "=r"(f.w[k][3]) : "r"(at + k / 4 * 2048 + ((2 * (k % 4) + half) ^ (row & 7)) * 16) : "memory");
#pragma unroll
        for (int h = 0; h < 2 * BOXES; h++) f.x[h] = load16_shared(xs + (step * 2 * BOXES + h) * 64);
    }
    __device__ __forceinline__ void multiply(float (&sums)[4], const Fragments& f) {
#pragma unroll
        for (int k = 0; k < 4 * BOXES; k++)
            mma(sums, f.w[k][0], f.w[k][1], f.w[k][2], f.w[k][3], f.x[k / 2].w[k % 2 * 2], f.x[k / 2].w[k % 2 * 2 + 1], E{});
    }
    __device__ __forceinline__ void finish(const float (&sums)[4], int tile) {
        if (lane % 4 != 0) return;                     // others have the same sums
        const int n = tile * OUTPUTS + lane / 4;
        if constexpr (Op::PARTS == 2) {
            if (n < ALL) op.emit(n, 0, sums[0], sums[2], 1.0f);
        } else {
            if (n < ALL) op.store(n, 0, sums[0]);
            if (n + 8 < ALL) op.store(n + 8, 0, sums[2]);
        }
    }
    __device__ __forceinline__ void run() {
        for (int i = 0; i < STAGES; i++) flow();
        pdl_launch();
        pdl_wait();
        stage_x();
        int slot = 0;
        u32 parity = 0;
        for (int tile = first; tile < TILES; tile += stride) {
            float sums[4] = {};
            // A step's operands are read while the tensor core is at the step before.
            Fragments f[2];
            barrier_wait(full + slot * 8, parity);
            load(f[0], slot, 0);
#pragma unroll 1
            for (int step = 0; step < STEPS; step += 2) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if (step + i >= STEPS) break;
                    if (++slot == STAGES) slot = 0, parity ^= 1;
                    if (step + i + 1 < STEPS) {
                        barrier_wait(full + slot * 8, parity);
                        load(f[1 - i], slot, step + i + 1);
                    }
                    multiply(sums, f[i]);
                    __syncwarp();
                    flow();                            // into the slot that was read the step before
                }
            }
            finish(sums, tile);
        }
    }
};
