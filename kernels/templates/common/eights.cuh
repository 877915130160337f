// The product of hundreds of tokens on Hopper where both sides are 8-bit floats, y[T, N] = x[T, K] · w[N, K]ᵀ: x of
// `quantise_rows`, w packed codes.
//
// Two warpgroups share a tile of 128 tokens, the tensor core's M, and ROWS rows of w, its N; a warp more has the copy
// engine fill a ring of STAGES such tiles, 128 columns each, with their scales. The two blocks of a cluster have the same rows
// of w and tokens beside one another: each brings half of w's tile for both. What products of 128 columns come to is scaled and
// added in f32 (tensor cores keep fewer bits of sums of such products), by one warpgroup while the other's run: they take turns.
// Left alone, tensor cores would take from both in turn, so that both had their sums at the same time, and nobody multiplied while
// these are scaled.
//
// Packed codes are eights of rows by 128 columns, whose two halves have 64 bytes of each row: the copy engine lays the eights of
// a tile side by side, row by row: rows 0 and 1 of all of them first. So a thread has eight neighbours of what it sums, and a
// scale is one of an eight. Order of summation: 32 columns after 32 columns, ascending, within 128; these, ascending.
//
// An `Op` is that of cooperative.cuh: X, K, N, PARTS, tokens, Early, early(q, t), finish(q, t, a, b, early).

template <class Op, int ROWS, int STAGES> struct Eights {
    typedef typename Op::Packed P;
    typedef typename Op::Early Early;
    static constexpr int GROUPS = 2, TOKENS = 64 * GROUPS, PAIR = 2, BAND = 8, PIECE = {{ p.piece }};
    static constexpr u32 X_BYTES = TOKENS * 128, W_BYTES = ROWS * 128, TILE = X_BYTES + W_BYTES;
    static constexpr u32 X_SCALES = TOKENS * 4, W_SCALES = ROWS / 8 * 16;  // sixteen bytes of each eight
    static constexpr int STEPS = Op::K / 128, OUTPUTS = ROWS / Op::PARTS, ALL = Op::N / Op::PARTS, TILES = (ALL + OUTPUTS - 1) / OUTPUTS;
    static constexpr int SIDE = ROWS / 16, EACH = SIDE / 4;  // eights of a block's half of w's tile; those of a thread
    static constexpr int FINISHED = Op::PARTS == 2 ? EACH : 2 * EACH;
    static_assert(P::COLUMNS == 128 && P::SCALE_OUTER < 0 && Op::K % 128 == 0 && ROWS % 64 == 0 && ROWS % PIECE == 0 && ALL % 8 == 0, "shape");

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
            for (int i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, PAIR * GROUPS * 4);
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
    // The row of w with which a side of a tile begins: with two parts, sides are of one each.
    __device__ __forceinline__ static int side(const Place& at, int side) { return at.output + side * (Op::PARTS == 2 ? ALL : ROWS / 2); }
    __device__ __forceinline__ static const u8* unit(const Op& op, int row, int step) { return op.codes(min(row, Op::N - 8) / 8, 0, 0) + (i64)step * P::BYTES; }

    // Fills the ring. Weights are constant: those of the first stages are asked for before the kernel before this one has ended.
    __device__ __forceinline__ void fill() {
        u64 policy;
        asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
        const int scale_stride = (op.tokens + 3) / 4 * 4;   // of x, from 128 columns to the next
        const auto weights = [&](int slot, int step, const Place& at) {
            const u32 bytes = max(0, min(TOKENS, scale_stride - at.token)) * 4, barrier = full + slot * 8;
            if (lane == 0) {
                barrier_expect(barrier, TILE + bytes + (P::ROW_SCALES ? 0 : W_SCALES));
#pragma unroll
                for (int half = 0; half < 2; half++)
                    copy_coded_tile(3, ring + slot * TILE + X_BYTES + half * (W_BYTES / 2) + rank * (W_BYTES / 4), w_tiles, half, step, side(at, rank) / 8, barrier, policy);
            }
            __syncwarp();
            if constexpr (!P::ROW_SCALES) {
                if (lane < ROWS / 8) {
                    const u8* const from = unit(op, side(at, lane / SIDE) + lane % SIDE * 8, step);
                    copy_bytes(scales + slot * (X_SCALES + W_SCALES) + X_SCALES + lane * 16, from + P::SCALE_AT, 16, barrier, policy);
                }
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
        // Barrier 1 + g is group g's turn: it waits there, and the other one arrives.
        const auto pass = [&]() { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); };
        if (group == 1) pass();
        int slot = 0;
        u32 parity = 0;
        for (int item = first; item < work; item += stride) {
            float sums[ROWS / 8][4] = {};
#pragma unroll 1
            for (int step = 0; step < STEPS; step++) {
                barrier_wait(full + slot * 8, parity);
                const u64 x = descriptor(ring + slot * TILE + group * 8192, 16, 1024);
                const u64 w = descriptor64(ring + slot * TILE + X_BYTES, 512);
                const u32 own = scales + slot * (X_SCALES + W_SCALES);
                float of_rows[2];
#pragma unroll
                for (int r = 0; r < 2; r++) of_rows[r] = __uint_as_float(load4_shared(own + (row + r * 8) * 4));
#pragma unroll
                for (int piece = 0; piece < ROWS / PIECE; piece++) {
                    float some[PIECE / 8][4];
                    asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
                    wgmma_fence();
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        tile_product_eight(some, x + k * 2, w + (k / 2 * (W_BYTES / 2) + piece * (PIECE * 64)) / 16 + k % 2 * 2, k > 0);
                    wgmma_commit();
                    // Of the thread's eights, of which a piece has so many.
                    constexpr int EIGHTS = PIECE / 32;
                    float by[EIGHTS][2];
#pragma unroll
                    for (int i = 0; i < EIGHTS; i++) {
                        const int eight = piece * EIGHTS + i;
                        float of_eight = 1;
                        if constexpr (!P::ROW_SCALES)
                            of_eight = widened(load4_shared(own + X_SCALES + (eight / EACH * SIDE + eight % EACH * 4 + lane % 4) * 16), P::SCALE);
                        by[i][0] = of_rows[0] * of_eight, by[i][1] = of_rows[1] * of_eight;
                    }
                    wgmma_wait<0>();
                    pass();
                    landed(some);
#pragma unroll
                    for (int j = 0; j < PIECE / 8; j++) {
                        const int at = piece * (PIECE / 8) + j, eight = at / SIDE * EACH + at % EACH - piece * EIGHTS;
#pragma unroll
                        for (int i = 0; i < 4; i++) sums[at][i] = fmaf(some[j][i], by[eight][i / 2], sums[at][i]);
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
    __device__ __forceinline__ void finish(const float (&sums)[ROWS / 8][4], int r, const Place& at, int t) const {
        const auto output = [&](int n) { return at.output + n / EACH * (ROWS / 2) + (n % EACH * 4 + lane % 4) * 8; };
        // What `finish` reads beside sums is asked for some outputs ahead: registers do not hold that of all.
        constexpr int AHEAD = FINISHED < 2 ? FINISHED : 2;
#pragma unroll
        for (int first = 0; first < FINISHED; first += AHEAD) {
            Early early[AHEAD];
#pragma unroll
            for (int n = first; n < first + AHEAD; n++)
                if (t < op.tokens && output(n) < ALL) early[n - first] = op.early(output(n), t);
#pragma unroll
            for (int n = first; n < first + AHEAD; n++) {
                const int q = output(n);
                if (t >= op.tokens || q >= ALL) continue;
                float a[8], b[8] = {};
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const int in = n % EACH + EACH * (i / 2);  // a pair of rows of each eight after those of all others
                    a[i] = sums[n / EACH * SIDE + in][r * 2 + i % 2];
                    if (Op::PARTS == 2) b[i] = sums[SIDE + in][r * 2 + i % 2];
                }
                scale(a, q);
                if (Op::PARTS == 2) scale(b, q + ALL);
                op.finish(q, t, a, b, early[n - first]);
            }
            asm volatile("" ::: "memory");
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
