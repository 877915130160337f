// The product of hundreds of tokens on Hopper where both sides are 8-bit floats, y[T, N] = x[T, K] · w[N, K]ᵀ: x of
// `quantise_rows`, w packed codes.
//
// Two warpgroups share a tile of 128 tokens, the tensor core's M, and ROWS rows of w; a warp more has the copy
// engine fill a ring of STAGES such tiles, 128 columns each, with their scales. The two blocks of a cluster have the same rows
// of w and tokens beside one another: each brings half of w's tile for both. What products of 128 columns come to is scaled and
// added in f32 (tensor cores keep fewer bits of sums of such products), by one warpgroup while the other's run. They do not take turns:
// whoever waits for the other to be done leaves the tensor cores idle until its own products have been asked for.
//
// Packed codes are eights of rows by 128 columns, whose two halves have 64 bytes of each row: a half is four lines of 128 bytes,
// two rows in each. The copy engine lays the eights of a tile side by side, line by line: the first lines of all of them, then
// the second ones. The tensor core's N are such lines: products that begin at their first byte are of even rows, those that begin in the middle
// of odd ones. So a thread has eight neighbours of what it sums, and a scale is one of an eight. Order of summation: 32 columns after
// 32 columns, ascending, within 128; these, ascending.
//
// An `Op` is that of cooperative.cuh: X, K, N, PARTS, tokens, Early, early(q, t), finish(q, t, a, b, early). One that ROUNDS what it
// makes of sums has join(q, t, a, b) in place of `finish`, whose results stay in a, and round(q, t, all), which four lanes call with a
// group's, a row beyond the tokens too.

template <class Op, int ROWS, int STAGES> struct Eights {
    typedef typename Op::Packed P;
    typedef typename Op::Early Early;
    static constexpr int GROUPS = 2, TOKENS = 64 * GROUPS, PAIR = 2, BAND = 8, LINES = ROWS / 2;
    static constexpr u32 X_BYTES = TOKENS * 128, W_BYTES = ROWS * 128, TILE = X_BYTES + W_BYTES;
    static constexpr u32 X_SCALES = TOKENS * 4, W_SCALES = ROWS / 8 * 4;  // four bytes of each eight
    static constexpr int STEPS = Op::K / 128, OUTPUTS = ROWS / Op::PARTS, ALL = Op::N / Op::PARTS, TILES = (ALL + OUTPUTS - 1) / OUTPUTS;
    static constexpr int SIDE = ROWS / 8 / Op::PARTS, EACH = SIDE / 4;  // eights of a part of w's tile; those of a thread
    // Even and odd rows are multiplied together where registers hold both.
    static constexpr int TOGETHER = ROWS <= 128 ? 2 : 1;
    static_assert(P::COLUMNS == 128 && P::SCALE_OUTER < 0 && Op::K % 128 == 0 && SIDE % 8 == 0 && ALL % 8 == 0, "shape");

    const Op& op;
    const TileMap *w_tiles, *x_tiles;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % PAIR;
    const int first = blockIdx.x / PAIR, stride = gridDim.x / PAIR;
    const int pairs = (op.tokens + PAIR * TOKENS - 1) / (PAIR * TOKENS), work = TILES * pairs;
    u32 ring, scales, full, empty;

    __device__ __forceinline__ Eights(const Op& op, const TileMap* w_tiles, const TileMap* x_tiles, u8* shared)
        : op(op), w_tiles(w_tiles), x_tiles(x_tiles) {
        __shared__ __align__(8) u64 barriers[2 * STAGES];
        ring = (shared_at(shared) + 1023) / 1024 * 1024;
        scales = ring + STAGES * TILE;
        full = shared_at(barriers), empty = full + STAGES * 8;
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; i++) barrier_init(full + i * 8, P::ROW_SCALES ? 1 : 33), barrier_init(empty + i * 8, PAIR * GROUPS * 4);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        cluster_sync();
    }

    // The first output and token of an item: see cooperative.cuh.
    struct Place { int output, token; };
    __device__ __forceinline__ Place place(int item) const {
        const int band = item / (BAND * TILES), width = min(BAND, pairs - BAND * band), in = item - band * BAND * TILES;
        return Place{in / width * OUTPUTS, ((BAND * band + in % width) * PAIR + rank) * TOKENS};
    }
    __device__ __forceinline__ static const u8* unit(const Op& op, int row, int step) { return op.codes(min(row, Op::N - 8) / 8, 0, 0) + (i64)step * P::BYTES; }

    // Fills the ring. Weights are constant: those of the first stages are asked for before the kernel before this one has ended.
    __device__ __forceinline__ void fill() {
        u64 policy;
        asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
        const int scale_stride = (op.tokens + 3) / 4 * 4;   // of x, from 128 columns to the next
        const auto weights = [&](int slot, int step, const Place& at) {
            const u32 bytes = max(0, min(TOKENS, scale_stride - at.token)) * 4, barrier = full + slot * 8;
            if (lane == 0) {
                barrier_expect(barrier, TILE + bytes);
#pragma unroll
                for (int part = 0; part < Op::PARTS; part++)
                    copy_coded_tile(3, ring + slot * TILE + X_BYTES + rank * (W_BYTES / 2) + part * (SIDE * 512), w_tiles, rank, step, (at.output + part * ALL) / 8, barrier, policy);
            }
            __syncwarp();
            // An eight's scale a lane: the engine takes as long for four bytes as for five hundred.
            if constexpr (!P::ROW_SCALES) {
                if (lane < ROWS / 8)
                    copy4_async(scales + slot * (X_SCALES + W_SCALES) + X_SCALES + lane * 4, unit(op, at.output + lane / SIDE * ALL + lane % SIDE * 8, step) + P::SCALE_AT);
                barrier_arrive_copied(barrier);
            }
        };
        const auto activations = [&](int slot, int step, const Place& at) {
            const u32 bytes = max(0, min(TOKENS, scale_stride - at.token)) * 4, barrier = full + slot * 8;
            if (lane != 0) return;
            copy_tile(ring + slot * TILE, x_tiles, step * 128, at.token, barrier, policy);
            const float* const from = (const float*)(op.x + (i64)op.tokens * Op::K) + (i64)step * scale_stride + at.token;
            if (bytes > 0) copy_bytes(scales + slot * (X_SCALES + W_SCALES), from, bytes, barrier, policy);
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
                activations(slot, step, at);
                if (++slot == STAGES) slot = 0, round++;
            }
        }
    }

    __device__ __forceinline__ void multiply() {
        const int group = warp / 4, row = group * 64 + warp % 4 * 16 + lane / 4;
        int slot = 0;
        u32 parity = 0;
        for (int item = first; item < work; item += stride) {
            float sums[2][LINES / 8][4] = {};              // of even rows, and of odd ones
#pragma unroll 1
            for (int step = 0; step < STEPS; step++) {
                barrier_wait(full + slot * 8, parity);
                const u64 x = descriptor(ring + slot * TILE + group * 8192, 16, 1024);
                const u64 w = descriptor(ring + slot * TILE + X_BYTES, 16, 1024);
                const u32 own = scales + slot * (X_SCALES + W_SCALES);
                float of_rows[2];
#pragma unroll
                for (int r = 0; r < 2; r++) of_rows[r] = __uint_as_float(load4_shared(own + (row + r * 8) * 4));
#pragma unroll
                for (int odd = 0; odd < 2; odd += TOGETHER) {
                    float some[TOGETHER][LINES / 8][4];
                    wgmma_fence();
#pragma unroll
                    for (int o = 0; o < TOGETHER; o++)
#pragma unroll
                        for (int k = 0; k < 4; k++)
                            tile_product_eight(some[o], x + k * 2, w + (k / 2 * (W_BYTES / 2) + (odd + o) * 64) / 16 + k % 2 * 2, k > 0);
                    wgmma_commit();
                    // Of two neighbouring eights each time, a thread's.
                    float by[LINES / 32][2][2];
#pragma unroll
                    for (int i = 0; i < LINES / 32; i++) {
                        u32 bits[2] = {};
                        if constexpr (!P::ROW_SCALES) load8_shared(own + X_SCALES + (i * 8 + lane % 4 * 2) * 4, bits[0], bits[1]);
#pragma unroll
                        for (int r = 0; r < 2; r++)
#pragma unroll
                            for (int b = 0; b < 2; b++) by[i][r][b] = P::ROW_SCALES ? of_rows[r] : of_rows[r] * widened(bits[b], P::SCALE);
                    }
                    wgmma_wait<0>();
#pragma unroll
                    for (int o = 0; o < TOGETHER; o++) {
                        landed(some[o]);
#pragma unroll
                        for (int j = 0; j < LINES / 8; j++)
#pragma unroll
                            for (int i = 0; i < 4; i++)
                                sums[odd + o][j][i] = fmaf(some[o][j][i], by[j / (SIDE / 2) * (SIDE / 8) + j % (SIDE / 8)][i / 2][i % 2], sums[odd + o][j][i]);
                    }
                }
                __syncwarp();
                if (lane < PAIR) barrier_arrive_at(empty + slot * 8, lane);
                if (++slot == STAGES) slot = 0, parity ^= 1;
            }
            const Place at = place(item);
#pragma unroll
            for (int r = 0; r < 2; r++) finish(sums, r, at, at.token + row + r * 8);
        }
    }
    // Multiplies the sums of eight rows by their scales.
    __device__ __forceinline__ void scale(float (&v)[8], int row) const {
        if constexpr (P::ROW_SCALES) {
            const u8* const from = unit(op, row, 0) + P::SCALE_AT;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const u8* const one = from + i * bytes_of(P::SCALE);
                v[i] *= widened(bytes_of(P::SCALE) == 4 ? *(const u32*)one : *(const u16*)one, P::SCALE);
            }
        }
    }
    __device__ __forceinline__ void finish(const float (&sums)[2][LINES / 8][4], int r, const Place& at, int t) const {
        // A thread has every fourth pair of eights, line by line of their four.
        const auto output = [&](int n) { return at.output + (n / 2 * 8 + lane % 4 * 2 + n % 2) * 8; };
        const auto take = [&](float (&v)[8], int part, int n) {
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = sums[i % 2][part * (SIDE / 2) + i / 2 * (SIDE / 8) + n / 2][r * 2 + n % 2];
            scale(v, output(n) + part * ALL);
        };
        if constexpr (Op::ROUNDS) {
            static_assert(Op::PARTS == 2 && OUTPUTS == 128 && ALL % 128 == 0, "a tile is a group");
            float all[EACH][8];
#pragma unroll
            for (int n = 0; n < EACH; n++) {
                float b[8];
                take(all[n], 0, n);
                take(b, 1, n);
                op.join(output(n), t, all[n], b);
            }
            op.round(at.output, t, all);
        } else {
            // What `finish` reads beside sums is asked for some outputs ahead: registers do not hold that of all.
            constexpr int AHEAD = 2;
#pragma unroll
            for (int first = 0; first < EACH; first += AHEAD) {
                Early early[AHEAD];
#pragma unroll
                for (int n = first; n < first + AHEAD; n++)
                    if (t < op.tokens && output(n) < ALL) early[n - first] = op.early(output(n), t);
#pragma unroll
                for (int n = first; n < first + AHEAD; n++) {
                    if (t >= op.tokens || output(n) >= ALL) continue;
                    float a[8], b[8] = {};
                    take(a, 0, n);
                    if (Op::PARTS == 2) take(b, 1, n);
                    op.finish(output(n), t, a, b, early[n - first]);
                }
                asm volatile("" ::: "memory");
            }
        }
    }
    __device__ __forceinline__ void run() {
        if (warp >= GROUPS * 4) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
            if (warp == GROUPS * 4) fill();
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
