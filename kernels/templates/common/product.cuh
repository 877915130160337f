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
// Weights that are packed codes (`Op::CODED`, of Op::Packed) come to the ring as they are, in pieces of eight rows by P::COLUMNS
// columns. A warp makes values of those of its 16 rows in registers, from which tensor cores take them: rounded as those of a
// decoded copy are, and in the same order.
//
// An `Op` says what becomes of sums:
//   X, K, N, PARTS        element type of x and w; columns and rows of w; rows of w of one output, 1 or
//                         2: with 2, a tile of 64 rows is the first ones of 32 outputs and then the second ones
//   BOX, row(q, part)     so many outputs from q on, a multiple of BOX, have their rows side by side, from there on
//   tokens
//   prepare()             a warpgroup keeps what finish() wants of the tokens, once
//   finish(q, t, a, b)    takes the sums of outputs q .. q + 7 of token t, b of their second rows
//   GROUPED               whether each token goes to one of many w: see experts.cuh. Rows of x are then gathered by GATHERS warps,
//                         from source(t); expert e has ROWS rows of w from e * ROWS on, second ones in a matrix of their own

template <class Op, int GROUPS, int TOKENS, int WEIGHTS, int ACTIVATIONS, int SPLIT> struct Product {
    static constexpr u32 W_BYTES = GROUPS * Op::TILE_BYTES, X_BYTES = TOKENS * 128;
    static constexpr int STEPS = Op::K / 64, STEP = Op::TILE_STEPS, W_STEPS = (STEPS + STEP - 1) / STEP;  // of x; of each stage of w; stages of w
    static constexpr int CHUNK = TOKENS > 64 ? 32 : TOKENS, SHARE = CHUNK / SPLIT;
    static constexpr int ROW = 68;                     // floats of a token's sums: 64, and 4 against bank conflicts
    static constexpr int OUTPUTS = 64 / Op::PARTS, ALL = Op::N / Op::PARTS, TILES = (ALL + OUTPUTS * GROUPS - 1) / (OUTPUTS * GROUPS);
    static constexpr int BOXES = GROUPS * 64 / Op::BOX;
    static constexpr bool MERGES = SPLIT > 1;
    static_assert(Op::K % 64 == 0 && Op::N % (8 * Op::PARTS) == 0 && TOKENS % CHUNK == 0 && CHUNK % SPLIT == 0 && W_STEPS >= SPLIT, "shape");
    // Sums of many tokens take more registers than all threads could have: those that fill rings give some of theirs away. Only
    // a whole warpgroup has enough: of a block with less, products would wait for registers that never come.
    static constexpr bool MANY = TOKENS > 128 && {{ block }} % 128 == 0;

    const Op& op;
    const TileMap *w_tiles, *x_tiles;                  // GROUPED: of first rows, and of second ones
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = blockIdx.x % SPLIT, w_begin = W_STEPS * rank / SPLIT, w_steps = W_STEPS * (rank + 1) / SPLIT - w_begin;
    const int begin = w_begin * STEP, steps = min(STEPS, (w_begin + w_steps) * STEP) - begin;
    const int first = blockIdx.x / SPLIT, stride = gridDim.x / SPLIT, token_tiles = tiles_of_tokens(), work = TILES * token_tiles;
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
            for (int i = 0; i < WEIGHTS; i++) barrier_init(w_full + i * 8, 1), barrier_init(w_empty + i * 8, GROUPS * (Op::CODED ? 4 : 1));
            for (int i = 0; i < ACTIVATIONS; i++) barrier_init(x_full + i * 8, arrivals()), barrier_init(x_empty + i * 8, GROUPS);
            for (int i = 0; i < GROUPS; i++) barrier_init(inbound_full + i * 8, 1), barrier_init(inbound_empty + i * 8, MERGES ? SPLIT - 1 : 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        if (MERGES) asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" ::: "memory");
        else __syncthreads();
    }

    __device__ __forceinline__ int tiles_of_tokens() const {
        if constexpr (Op::GROUPED) return op.token_tiles();
        else return (op.tokens + TOKENS - 1) / TOKENS;
    }
    // By which a tile of x is full: the copy engine's one, or of each thread that gathers.
    __device__ __forceinline__ static int arrivals() {
        if constexpr (Op::GROUPED) return 32 * Op::GATHERS;
        else return 1;
    }

    // The first output and token of an item, and where its tokens end. Blocks that run together share both: a band of up to 8
    // tiles of tokens takes all of w before the next one; an expert's tokens do, and then the next one's.
    struct Place { int output, token, end, expert; };
    __device__ __forceinline__ Place place(int item) const {
        if constexpr (Op::GROUPED) {
            const int e = op.expert_of(item / TILES), in = item - op.tiles[e] * TILES, tiles = op.tiles[e + 1] - op.tiles[e];
            return Place{in / tiles * (OUTPUTS * GROUPS), (int)op.rows[e] + in % tiles * TOKENS, (int)op.rows[e + 1], e};
        }
        const int band = item / (8 * TILES), width = min(8, token_tiles - 8 * band), in = item - band * 8 * TILES;
        return Place{in / width * (OUTPUTS * GROUPS), (8 * band + in % width) * TOKENS, op.tokens, 0};
    }

    // Fills the ring of w. Weights are constant: nothing needs to be waited for.
    __device__ __forceinline__ void fill_weights() {
        u64 once;                                      // they leave the rest of the cache alone
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
        int slot = 0;
        u32 round = 0;
        for (int item = first; item < work; item += stride) {
            const Place at = place(item);
            int rows[BOXES];
#pragma unroll
            for (int box = 0; box < BOXES; box++) {
                const int tile = box * Op::BOX / 64, in = box * Op::BOX % 64;
                rows[box] = Op::row(at.output + tile * OUTPUTS + in % OUTPUTS, in / OUTPUTS);
                if constexpr (Op::GROUPED) rows[box] += at.expert * Op::ROWS;
            }
#pragma unroll 1
            for (int step = 0; step < steps; step++) {
                if (round > 0) barrier_wait(w_empty + slot * 8, (round - 1) & 1);
                barrier_expect(w_full + slot * 8, W_BYTES);
#pragma unroll
                for (int box = 0; box < BOXES; box++)
                    copy_tile(w_ring + slot * W_BYTES + box * (Op::BOX * 128), Op::GROUPED && box * Op::BOX % 64 >= OUTPUTS ? x_tiles : w_tiles,
                              (begin + step) * 64, rows[box], w_full + slot * 8, once);
                if (++slot == WEIGHTS) slot = 0, round++;
            }
        }
    }
    // The same of codes: a lane has the pieces of eight rows copied.
    __device__ __forceinline__ void fill_codes() {
        typedef typename Op::Packed P;
        constexpr int EIGHTS = GROUPS * 8;
        static_assert(EIGHTS <= 32 && Op::BOX % 8 == 0, "a lane for eight rows");
        u64 once;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
        int slot = 0;
        u32 round = 0;
        for (int item = first; item < work; item += stride) {
            const Place at = place(item);
            const int output = at.output + lane / 8 * OUTPUTS + lane % 8 * 8 % OUTPUTS, part = lane % 8 * 8 / OUTPUTS;
            const u8* from = op.codes(Op::row(min(output, ALL - 8), part) / 8, part, at.expert) + (i64)w_begin * P::BYTES;
#pragma unroll 1
            for (int step = 0; step < w_steps; step++, from += P::BYTES) {
                if (round > 0) barrier_wait(w_empty + slot * 8, (round - 1) & 1);
                if (lane == 0) barrier_expect(w_full + slot * 8, W_BYTES);
                __syncwarp();
                if (lane < EIGHTS) copy_bytes(w_ring + slot * W_BYTES + lane * P::BYTES, from, P::BYTES, w_full + slot * 8, once);
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

    // The same of rows that lie apart: eight lanes copy 64 columns of one, in the order that the copy engine would give them.
    __device__ __forceinline__ void gather_activations() {
        constexpr int APART = 4 * Op::GATHERS, EACH = TOKENS / APART;
        static_assert(TOKENS % APART == 0, "rows in turn");
        const int row = (warp - GROUPS * 4 - 1) * 4 + lane / 8, chunk = lane % 8;
        int slot = 0;
        u32 round = 0;
        const typename Op::X *rows[EACH], *next[EACH];
        // Where an item's rows are; beyond the last token any one will do.
        const auto find = [&](int item) {
            const Place at = place(min(item, work - 1));
#pragma unroll
            for (int i = 0; i < EACH; i++) next[i] = op.x + op.source(min(at.token + row + i * APART, at.end - 1)) * Op::K + chunk * 8;
        };
        if (first < work) find(first);
        for (int item = first; item < work; item += stride) {
#pragma unroll
            for (int i = 0; i < EACH; i++) rows[i] = next[i];
#pragma unroll 1
            for (int step = 0; step < steps; step++) {
                if (step == steps / 2) find(item + stride);   // while the ring is full
                if (round > 0) barrier_wait(x_empty + slot * 8, (round - 1) & 1);
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    const int r = row + i * APART;
                    copy16_async(x_ring + slot * X_BYTES + r * 128 + (chunk ^ r % 8) * 16, rows[i] + step * 64);
                }
                barrier_arrive_copied(x_full + slot * 8);
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
                if constexpr (Op::GROUPED) fence_products();  // x did not come by the copy engine
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
            finish(sums, place(item), group, me, chunks);
        }
    }

    // The same of codes. What tensor cores take from registers stays there until a step later: `held` has two steps.
    struct State {
        typedef typename Op::Packed P;
        typedef typename Op::Coded V;
        float sums[TOKENS / 8][4];
        u32 held[2][4][4];
        typename V::Row rows[2];
        int w_slot = 0, x_slot = 0, x_before = 0, chunks = 0;
        u32 w_parity = 0, x_parity = 0;
    };
    __device__ __forceinline__ static void keep(const u32 (&a)[4][4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" ::"r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]) : "memory");
    }
    // Chunks of 128 columns from C on of the unit at `from`, which are steps from `step` on.
    template <int C, class S> __device__ __forceinline__ void chunks_of(S& s, u32 from, int step) {
        typedef typename S::V V;
        typedef typename S::P P;
        if constexpr (C * 128 < P::COLUMNS) {
            typename V::Chunk words[2];
#pragma unroll
            for (int r = 0; r < 2; r++) V::load(words[r], from + r * P::BYTES, C, lane);
            half<C, 0>(s, words, step);
            half<C, 1>(s, words, step + 1);
            chunks_of<C + 1>(s, from, step + 2);
        }
    }
    // Half H of a chunk: 64 columns.
    template <int C, int H, class S> __device__ __forceinline__ void half(S& s, const typename S::V::Chunk (&words)[2], int step) {
        typedef typename S::V V;
        if (STEPS % STEP != 0 && step >= steps) return;
        u32 (&a)[4][4] = s.held[H];
        V::template step<C, 2 * H, 0>(a[0], words, s.rows);
        V::template step<C, 2 * H, 1>(a[1], words, s.rows);
        V::template step<C, 2 * H + 1, 0>(a[2], words, s.rows);
        V::template step<C, 2 * H + 1, 1>(a[3], words, s.rows);
        barrier_wait(x_full + s.x_slot * 8, s.x_parity);
        if constexpr (Op::GROUPED) fence_products();
        const u64 x = descriptor(x_ring + s.x_slot * X_BYTES, 16, 1024);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) tile_product(s.sums, a[k], x + k * 2, step > 0 || k > 0);
        wgmma_commit();
        wgmma_wait<1>();
        keep(s.held[1 - H]);
        if (step > 0 && threadIdx.x % 128 == 32) barrier_arrive(x_empty + s.x_before * 8);
        s.x_before = s.x_slot;
        if (++s.x_slot == ACTIVATIONS) s.x_slot = 0, s.x_parity ^= 1;
    }
    __device__ __forceinline__ void multiply_codes() {
        typedef typename Op::Packed P;
        typedef typename Op::Coded V;
        const int group = warp / 4, me = threadIdx.x % 128;
        State s;
        for (int item = first; item < work; item += stride) {
#pragma unroll 1
            for (int step = 0; step < w_steps; step++) {
                barrier_wait(w_full + s.w_slot * 8, s.w_parity);
                const u32 from = w_ring + s.w_slot * W_BYTES + warp * 2 * P::BYTES;
#pragma unroll
                for (int r = 0; r < 2; r++) V::load_row(s.rows[r], from + r * P::BYTES, lane / 4);
                chunks_of<0>(s, from, step * STEP);
                __syncwarp();
                if (lane == 0) barrier_arrive(w_empty + s.w_slot * 8);
                if (++s.w_slot == WEIGHTS) s.w_slot = 0, s.w_parity ^= 1;
                if (step == w_steps / 2 && item == first) op.prepare();
            }
            wgmma_wait<0>();
            landed(s.sums);
            if (me == 32) barrier_arrive(x_empty + s.x_before * 8);
            finish(s.sums, place(item), group, me, s.chunks);
        }
    }

    // Sums go to shared memory, a token a row, so that what belongs together meets in one thread.
    __device__ __forceinline__ void finish(const float (&sums)[TOKENS / 8][4], Place at, int group, int me, int& chunks) {
        const int q0 = at.output + group * OUTPUTS;
        float* const own = (float*)(base + WEIGHTS * W_BYTES + ACTIVATIONS * X_BYTES) + group * (CHUNK * ROW * (MERGES ? 2 : 1));
        float* const inbound = own + CHUNK * ROW;      // SHARE tokens of each block of the cluster
        const auto together = [&]() { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); };
#pragma unroll
        for (int c = 0; c < TOKENS / CHUNK; c++, chunks++) {
            const int base_token = at.token + c * CHUNK, tokens = min(CHUNK, at.end - base_token);
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
                        const float* of = (s == rank ? own + t * ROW : inbound + (s * SHARE + t - from) * ROW) + q + part * 32;
                        const float4 a = *(const float4*)of, b = *(const float4*)(of + 4);
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
        if (warp >= GROUPS * 4) {
            if constexpr (MANY) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
            if (warp == GROUPS * 4) {
                if constexpr (Op::CODED) fill_codes();
                else if (lane == 0) fill_weights();
            } else {
                if constexpr (Op::GROUPED) gather_activations();
                else if (lane == 0 && warp == GROUPS * 4 + 1) fill_activations();
            }
        } else {
            if constexpr (MANY) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
            pdl_launch();
            pdl_wait();
            if constexpr (Op::CODED) multiply_codes();
            else multiply();
        }
        __syncwarp();
        // Others may still be reading or writing this block's memory.
        if (MERGES) asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    }
};
