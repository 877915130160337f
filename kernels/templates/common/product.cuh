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
// With SLICES the warpgroups of a block have the same rows, and part each stage's columns between them: of few rows more warps have
// something to do, and only K / SLICES / SPLIT steps follow one another. With ONCE a block has one tile: its sums take the memory that
// its rings had, and meet in one go. Both are of sizes that fill the multiprocessors once, and leave nothing in memory for other blocks
// to add up.
//
// With SPLIT 0 blocks share the stages of w of all tiles evenly, wherever a share ends ("stream-K": Osama et al., 2023): so
// none waits where tiles are no multiple of the blocks. Clusters leave multiprocessors unused, too: those of four have to
// lie in one of the GPU's eight or so regions, whose sizes are no multiples of four. Blocks that share a tile leave their sums in
// memory, and the last one to do so adds them up, in the order of K.
//
// Weights that are packed codes (`Op::CODED`, of Op::Packed) come to the ring as they are, in units of eight rows by P::COLUMNS
// columns: by a tile's map, as the copy engine takes some 30 ns for each plain copy, however few its bytes. A warp makes values of those of its 16 rows in registers, from which tensor cores take them: rounded as those of a
// decoded copy are, and in the same order.
//
// Where x, too, is of 8-bit floats (`Op::EIGHT`, of `quantise_rows`), tensor cores take words of codes as they are. The order in which
// x's columns lie is that of a row of packed codes, as eights.cuh wants it, so that a lane takes its words from the four
// lanes of its row. A tile of x is 128 columns, and comes with its tokens' scales. What products of 128 columns come to is scaled and
// added in f32, for 64 tokens at a time: tensor cores keep fewer bits of sums of such products.
//
// An `Op` says what becomes of sums:
//   X, K, N, PARTS        element type of x and w; columns and rows of w; rows of w of one output, 1 or
//                         2: with 2, a tile of 64 rows is the first ones of 32 outputs and then the second ones
//   BOX, row(q, part)     so many outputs from q on, a multiple of BOX, have their rows side by side, from there on: whole eights; 256 are all of any tile's
//   tokens
//   prepare()             a warpgroup keeps what finish() wants of the tokens, once
//   Early, early(q, t)    what `finish` reads beside sums
//   finish(q, t, a, b, early)  takes the sums of outputs q .. q + 7 of token t, b of their second rows
//   GROUPED               whether each token goes to one of many w: see experts.cuh. Rows of x are then gathered by GATHERS warps,
//                         from source(t); expert e has ROWS rows of w from e * ROWS on, second ones in a matrix of their own
// With `adapts`, w's parts that adapters change, four warps more make low-rank parts, which are added to a tile's sums: adapted.cuh.

{% include "common/left_sums.cuh" %}
template <class Op, int GROUPS, int TOKENS, int WEIGHTS, int ACTIVATIONS, int SPLIT> struct Product {
    static constexpr u32 W_BYTES = GROUPS * Op::TILE_BYTES, X_BYTES = TOKENS * 128;
    static constexpr int SLICES = {{ p.slices if p.slices is defined else 1 }}, TALL = GROUPS / SLICES;   // of a tile: warpgroups that part its K, and others that part its rows
    static constexpr bool EIGHT = Op::EIGHT;
    static constexpr int COLUMNS = EIGHT ? 128 : 64;   // of a tile of x
    static constexpr u32 SCALES = EIGHT ? TOKENS * 4 : 0;   // bytes of scales that come with it
    // Tiles of x that come together: the two of a chunk of codes, if that leaves three stages or more, and those of each slice.
    static constexpr int TOGETHER = Op::CODED && !EIGHT && !Op::GROUPED && ACTIVATIONS >= 6 * SLICES && ACTIVATIONS % (2 * SLICES) == 0 ? 2 : 1;
    static constexpr int X_STAGES = ACTIVATIONS / (TOGETHER * SLICES);
    static constexpr int STEPS = Op::K / (COLUMNS * SLICES), STEP = Op::TILE_STEPS * 64 / COLUMNS, W_STEPS = (STEPS + STEP - 1) / STEP;  // of a slice: of x; of each stage of w; stages of w
    static constexpr bool STREAMS = SPLIT == 0, MERGES = SPLIT > 1;
    static constexpr int RANKS = MERGES ? SPLIT : 1;   // blocks of a cluster
    static constexpr bool ONCE = {{ "true" if p.once is defined and p.once else "false" }};   // a block has one tile: its sums take the memory of the rings
    static constexpr int CHUNK = {{ p.chunk if p.chunk is defined else "TOKENS > 64 ? 32 : TOKENS" }}, SHARE = CHUNK / RANKS;
    static constexpr int ROW = 68;                     // floats of a token's sums: 64, and 4 against bank conflicts
    static constexpr int OUTPUTS = 64 / Op::PARTS, ALL = Op::N / Op::PARTS, TILES = (ALL + OUTPUTS * TALL - 1) / (OUTPUTS * TALL);
    // Rows of w that come at once: of codes as many of a tile's part as lie side by side, otherwise of a warpgroup's.
    static constexpr int PART = Op::CODED ? OUTPUTS * TALL : OUTPUTS, BOX = Op::BOX < PART ? Op::BOX : PART, BOXES = TALL * 64 / BOX;
    static_assert(PART % BOX == 0, "a tile is whole boxes");
    static_assert(SLICES == 1 || (SLICES == GROUPS && Op::CODED && !STREAMS && Op::K % (SLICES * STEP * COLUMNS) == 0 && STEP % TOGETHER == 0), "slices");
    static_assert(Op::K % COLUMNS == 0 && Op::N % (8 * Op::PARTS) == 0 && TOKENS % CHUNK == 0 && CHUNK % RANKS == 0 && W_STEPS >= RANKS && !(STREAMS && Op::GROUPED), "shape");
    // Sums take more registers than all threads could have: those that fill rings give some of theirs away. Only
    // a whole warpgroup has enough: of a block with less, products would wait for registers that never come.
    static constexpr int THREADS = {{ block }};
    static constexpr bool MANY = THREADS % 128 == 0 && (TOKENS > 128 || GROUPS > 2);
    // A warp's registers come by 256, and warps' of all four parts of a multiprocessor are alike.
    static constexpr int ALLOTTED = 65536 / (THREADS / 32) / 256 * 8, KEPT = GROUPS > 3 ? 32 : 40;
    static constexpr int TAKEN = (ALLOTTED * THREADS - 128 * KEPT) / (128 * GROUPS) / 8 * 8;

    const Op& op;
    const TileMap *w_tiles, *x_tiles;                  // GROUPED: of first rows, and of second ones
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = blockIdx.x % RANKS, token_tiles = tiles_of_tokens(), work = TILES * token_tiles;
    const i64 all_stages = (i64)work * W_STEPS;
    u8* const scratch;                                 // STREAMS: two tiles' sums of each block, and how many blocks left those of a tile
    u8* base;
    u32 w_ring, x_ring, scales, w_full, w_empty, x_full, x_empty, inbound_full, inbound_empty;

    __device__ __forceinline__ Product(const Op& op, const TileMap* w_tiles, const TileMap* x_tiles, u8* scratch, u8* shared)
        : op(op), w_tiles(w_tiles), x_tiles(x_tiles), scratch(scratch) {
        __shared__ __align__(8) u64 barriers[2 * (WEIGHTS + ACTIVATIONS + GROUPS)];
        base = shared + (1024 - shared_at(shared) % 1024) % 1024;
        w_ring = shared_at(base);
        x_ring = w_ring + WEIGHTS * W_BYTES;
        scales = x_ring + ACTIVATIONS * X_BYTES;
        w_full = shared_at(barriers), w_empty = w_full + WEIGHTS * 8;
        x_full = w_empty + WEIGHTS * 8, x_empty = x_full + X_STAGES * 8;
        inbound_full = x_empty + X_STAGES * 8, inbound_empty = inbound_full + GROUPS * 8;
        if (threadIdx.x == 0) {
            for (int i = 0; i < WEIGHTS; i++) barrier_init(w_full + i * 8, 1), barrier_init(w_empty + i * 8, GROUPS * (Op::CODED ? 4 : 1));
            for (int i = 0; i < X_STAGES; i++) barrier_init(x_full + i * 8, arrivals()), barrier_init(x_empty + i * 8, GROUPS * (EIGHT ? 4 : 1));
            for (int i = 0; i < GROUPS; i++) barrier_init(inbound_full + i * 8, 1), barrier_init(inbound_empty + i * 8, MERGES ? RANKS - 1 : 1);
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
            return Place{in / tiles * (OUTPUTS * TALL), (int)op.rows[e] + in % tiles * TOKENS, (int)op.rows[e + 1], e};
        }
        const int band = item / (8 * TILES), width = min(8, token_tiles - 8 * band), in = item - band * 8 * TILES;
        return Place{in / width * (OUTPUTS * TALL), (8 * band + in % width) * TOKENS, op.tokens, 0};
    }

    // What a block does of an item in one go: stages of w from `w_begin` on. There is no more if `item` is `work`.
    struct Turn {
        int item, w_begin, w_steps;
        __device__ __forceinline__ int begin() const { return w_begin * STEP; }
        __device__ __forceinline__ int steps() const { return min(STEPS, (w_begin + w_steps) * STEP) - begin(); }
    };
    // Where a block's share of all stages begins, and whose share a stage belongs to.
    __device__ __forceinline__ int share(int block) const { return (int)(all_stages * block / gridDim.x); }
    __device__ __forceinline__ int block_of(int stage) const { return (int)(((i64)(stage + 1) * gridDim.x - 1) / all_stages); }
    __device__ __forceinline__ Turn turn_at(int stage) const {
        const int end = share(blockIdx.x + 1);
        if (stage >= end) return Turn{work, 0, 0};
        const int begin = stage % W_STEPS;
        return Turn{stage / W_STEPS, begin, min(W_STEPS - begin, end - stage)};
    }
    __device__ __forceinline__ Turn first() const {
        if constexpr (STREAMS) return turn_at(share(blockIdx.x));
        const int begin = W_STEPS * rank / RANKS;
        return Turn{(int)blockIdx.x / RANKS, begin, W_STEPS * (rank + 1) / RANKS - begin};
    }
    __device__ __forceinline__ Turn after(const Turn& turn) const {
        if constexpr (STREAMS) return turn_at((turn.item + 1) * W_STEPS);
        return Turn{turn.item + (int)gridDim.x / RANKS, turn.w_begin, turn.w_steps};
    }

    // A box of codes: unit `unit` across, of the eights of rows from `eight` on. Tiles of a map begin at multiples of 128 bytes, which
    // boxes of few units need not be: these come unit by unit, and what lies beyond w's rows is of the last ones.
    static constexpr bool BY_MAP = BOX / 8 * Op::UNIT % 128 == 0;
    __device__ __forceinline__ void fill_box(u32 to, const TileMap* map, int unit, int eight, u32 barrier, u64 policy) const {
        if constexpr (BY_MAP) {
            copy_units(to, map, unit, eight, barrier, policy);
        } else {
#pragma unroll 1
            for (int i = 0; i < BOX / 8; i++)
                copy_bytes(to + i * Op::UNIT, op.codes(min(eight + i, Op::N / 8 - 1), 0, 0) + (i64)unit * Op::UNIT, Op::UNIT, barrier, policy);
        }
    }
    // Fills the ring of w. Weights are constant: nothing needs to be waited for.
    __device__ __forceinline__ void fill_weights() {
        u64 once;                                      // they leave the rest of the cache alone
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
        int slot = 0;
        u32 round = 0;
        for (Turn turn = first(); turn.item < work; turn = after(turn)) {
            const Place at = place(turn.item);
            int rows[BOXES];
#pragma unroll
            for (int box = 0; box < BOXES; box++) {
                // Of codes all of a part come first, otherwise all of a warpgroup.
                const int part = box * BOX / PART, tile = Op::CODED ? 0 : part / Op::PARTS;
                rows[box] = Op::row(at.output + tile * OUTPUTS + box * BOX % PART, part % Op::PARTS);
                if constexpr (Op::GROUPED) rows[box] += at.expert * Op::ROWS;
            }
#pragma unroll 1
            for (int step = 0; step < turn.w_steps; step++) {
                if (round > 0) barrier_wait(w_empty + slot * 8, (round - 1) & 1);
                barrier_expect(w_full + slot * 8, W_BYTES);
#pragma unroll
                for (int box = 0; box < BOXES; box++) {
                    const u32 to = w_ring + slot * W_BYTES + box * (W_BYTES / (SLICES * BOXES));
                    if constexpr (Op::CODED) {
#pragma unroll (BY_MAP ? SLICES : 1)
                        for (int i = 0; i < SLICES; i++)
                            fill_box(to + i * Op::TILE_BYTES, Op::GROUPED && box > 0 ? x_tiles : w_tiles, (turn.w_begin + step) * SLICES + i, rows[box] / 8, w_full + slot * 8, once);
                    } else {
                        copy_tile(to, Op::GROUPED && box * BOX % 64 >= OUTPUTS ? x_tiles : w_tiles, (turn.w_begin + step) * 64, rows[box], w_full + slot * 8, once);
                    }
                }
                if (++slot == WEIGHTS) slot = 0, round++;
            }
        }
        if constexpr (Op::AHEAD) {
            pdl_wait();                                // what comes before has nothing to wait for
            op.ahead.bring(blockIdx.x, gridDim.x);
        }
    }
    __device__ __forceinline__ int slice() const { return SLICES == 1 ? 0 : warp / 4; }
    // Where a warpgroup's tiles of a stage of x begin.
    __device__ __forceinline__ u32 x_of(int slot) const { return x_ring + (slot * SLICES + slice()) * (TOGETHER * X_BYTES); }
    // Where a warp's two units of a stage of codes begin: those of a part are side by side, of all warpgroups.
    __device__ __forceinline__ u32 units_of_warp() const {
        return (Op::PARTS == 2 && SLICES == 1 ? warp % 4 / 2 * (GROUPS * 4) + warp / 4 * 4 + warp % 2 * 2 : warp * 2) * Op::UNIT;
    }
    __device__ __forceinline__ void fill_activations() {
        u64 again;                                     // every tile of rows reads them
        asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(again));
        int slot = 0;
        u32 round = 0;
        pdl_wait();
        for (Turn turn = first(); turn.item < work; turn = after(turn)) {
            const int t0 = place(turn.item).token, begin = turn.begin(), steps = turn.steps();
            const int stride = (op.tokens + 3) / 4 * 4;   // of scales, from 128 columns to the next
            const u32 bytes = EIGHT ? min(TOKENS, stride - t0) * 4 : 0;
#pragma unroll 1
            for (int step = 0; step < steps; step += TOGETHER) {
                if (round > 0) barrier_wait(x_empty + slot * 8, (round - 1) & 1);
                barrier_expect(x_full + slot * 8, SLICES * (TOGETHER * X_BYTES + bytes));
#pragma unroll
                for (int slice = 0; slice < SLICES; slice++) {
                    const int at = SLICES == 1 ? begin + step : ((begin + step) / STEP * SLICES + slice) * STEP + (begin + step) % STEP;
                    const u32 to = slot * SLICES + slice;
                    if constexpr (EIGHT) {
                        const float* const from = (const float*)(op.x + (i64)op.tokens * Op::K) + (i64)at * stride + t0;
                        copy_bytes(scales + to * SCALES, from, bytes, x_full + slot * 8, again);
                    }
#pragma unroll
                    for (int i = 0; i < TOGETHER; i++)     // columns beyond K are zeros
                        copy_tile(x_ring + (to * TOGETHER + i) * X_BYTES, x_tiles, (at + i) * COLUMNS, t0, x_full + slot * 8, again);
                }
                if (++slot == X_STAGES) slot = 0, round++;
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
        Turn turn = first();
        if (turn.item < work) find(turn.item);
        for (; turn.item < work; turn = after(turn)) {
#pragma unroll
            for (int i = 0; i < EACH; i++) rows[i] = next[i];
#pragma unroll 1
            for (int step = 0; step < STEPS; step++) {
                if (step == STEPS / 2) find(after(turn).item);   // while the ring is full
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
        bool prepared = false;
        for (Turn turn = first(); turn.item < work; turn = after(turn)) {
            const int steps = turn.steps();
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
                if (step == steps / 2 && !prepared) op.prepare(), prepared = true;  // the ring of weights has run dry, and fills again
                w_before = w_slot, x_before = x_slot;
                if (++w_slot == WEIGHTS) w_slot = 0, w_parity ^= 1;
                if (++x_slot == ACTIVATIONS) x_slot = 0, x_parity ^= 1;
            }
            wgmma_wait<0>();
            landed(sums);
            release();
            if (collect(sums, turn, group, me)) finish(sums, place(turn.item), group, me, chunks);
        }
    }

{% if p.after is defined and p.after %}
{% include "common/product_after.cuh" %}
{% endif %}
    // The same of codes. What tensor cores take from registers stays there until a step later: `held` has two steps.
    struct State {
        typedef typename Op::Packed P;
        typedef typename Op::Coded V;
        float sums[TOKENS / 8][4];
        u32 held[2][4][4];
        typename V::Row rows[2];
        int steps, w_slot = 0, x_slot = 0, x_before = 0, chunks = 0;
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
    // Half H of a chunk: 64 columns. Those of a unit that lie beyond K are left out.
    template <int C, int H, class S> __device__ __forceinline__ void half(S& s, const typename S::V::Chunk (&words)[2], int step) {
        typedef typename S::V V;
        constexpr bool BEGINS = H == 0 || TOGETHER == 1, ENDS = H == 1 || TOGETHER == 1;   // of a stage of x
        if (STEPS % STEP != 0 && step - (BEGINS ? 0 : 1) >= s.steps) return;
        if (STEPS % STEP == 0 || step < s.steps) {
            u32 (&a)[4][4] = s.held[H];
            V::template step<C, 2 * H, 0>(a[0], words, s.rows);
            V::template step<C, 2 * H, 1>(a[1], words, s.rows);
            V::template step<C, 2 * H + 1, 0>(a[2], words, s.rows);
            V::template step<C, 2 * H + 1, 1>(a[3], words, s.rows);
            if (BEGINS) barrier_wait(x_full + s.x_slot * 8, s.x_parity);
            if constexpr (Op::GROUPED) fence_products();
            const u64 x = descriptor(x_of(s.x_slot) + (BEGINS ? 0 : X_BYTES), 16, 1024);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++) tile_product(s.sums, a[k], (x & 0xffffffff00000000) | ((u32)x + k * 2), 1);   // no carry: one word stays
            wgmma_commit();
            wgmma_wait<1>();
            keep(s.held[1 - H]);
        }
        if (BEGINS && step > 0 && threadIdx.x % 128 == 32) barrier_arrive(x_empty + s.x_before * 8);
        if (ENDS) {
            s.x_before = s.x_slot;
            if (++s.x_slot == X_STAGES) s.x_slot = 0, s.x_parity ^= 1;
        }
    }
    __device__ __forceinline__ void multiply_codes() {
        typedef typename Op::Packed P;
        typedef typename Op::Coded V;
        const int group = warp / 4, me = threadIdx.x % 128;
        State s;
        bool prepared = false;
        for (Turn turn = first(); turn.item < work; turn = after(turn)) {
            s.steps = turn.steps();
#pragma unroll
            for (int j = 0; j < TOKENS / 8; j++) s.sums[j][0] = s.sums[j][1] = s.sums[j][2] = s.sums[j][3] = 0;
#pragma unroll 1
            for (int step = 0; step < turn.w_steps; step++) {
                barrier_wait(w_full + s.w_slot * 8, s.w_parity);
                const u32 from = w_ring + s.w_slot * W_BYTES + units_of_warp();
#pragma unroll
                for (int r = 0; r < 2; r++) V::load_row(s.rows[r], from + r * P::BYTES, lane / 4);
                chunks_of<0>(s, from, step * STEP);
                __syncwarp();
                if (lane == 0) barrier_arrive(w_empty + s.w_slot * 8);
                if (++s.w_slot == WEIGHTS) s.w_slot = 0, s.w_parity ^= 1;
                if (step == turn.w_steps / 2 && !prepared) op.prepare(), prepared = true;
            }
            wgmma_wait<0>();
            landed(s.sums);
            if (me == 32) barrier_arrive(x_empty + s.x_before * 8);
            if (collect(s.sums, turn, group, me)) finish(s.sums, place(turn.item), group, me, s.chunks);
        }
    }

    // The same of codes and activations of 8 bits. Warpgroups take turns at the tensor cores: one scales sums meanwhile.
    __device__ __forceinline__ void multiply_eights() {
        typedef typename Op::Packed P;
        typedef typename Op::Coded V;
        constexpr int PIECE = {{ p.piece if p.piece is defined else 64 }};
        const int group = warp / 4, me = threadIdx.x % 128;
        int w_slot = 0, x_slot = 0, chunks = 0;
        u32 w_parity = 0, x_parity = 0;
        bool prepared = false;
        for (Turn turn = first(); turn.item < work; turn = after(turn)) {
            float sums[TOKENS / 8][4] = {};
#pragma unroll 1
            for (int step = 0; step < turn.w_steps; step++) {
                barrier_wait(w_full + w_slot * 8, w_parity);
                const u32 from = w_ring + w_slot * W_BYTES + units_of_warp();
                u32 words[4][4];                       // of 32 columns: of both rows, first and second sixteen
                float scale[2];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    typename V::Scale row;
                    const u32 own = from + r * P::BYTES + P::AT0 + lane / 4 * 64 + lane % 4 * 4;
                    // Rows that share banks begin with another sixteenth each, and put them in order afterwards.
                    const int turn = lane / 8;
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        u32 v[4], w[4];
#pragma unroll
                        for (int i = 0; i < 4; i++) v[i] = load4_shared(own + half * 512 + (i + turn) % 4 * 16);
#pragma unroll
                        for (int i = 0; i < 4; i++) w[i] = turn % 2 ? v[(i + 3) % 4] : v[i];
#pragma unroll
                        for (int i = 0; i < 4; i++) words[half * 2 + i / 2][i % 2 * 2 + r] = turn / 2 ? w[(i + 2) % 4] : w[i];
                    }
                    row.load(from + r * P::BYTES, lane / 4);
                    scale[r] = row.template get<0>();
                }
                barrier_wait(x_full + x_slot * 8, x_parity);
                const u64 x = descriptor(x_of(x_slot), 16, 1024);
                const u32 of_tokens = scales + (x_slot * SLICES + slice()) * SCALES + lane % 4 * 8;
#pragma unroll
                for (int piece = 0; piece < TOKENS / PIECE; piece++) {
                    float some[PIECE / 8][4];
                    wgmma_fence();
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        const u32 low = (u32)x + piece * (PIECE * 128 / 16) + k * 2;   // no carry: one word stays
                        tile_product_eight(some, words[k], (x & 0xffffffff00000000) | low, k > 0);
                    }
                    wgmma_commit();
                    wgmma_wait<0>();
                    landed(some);
#pragma unroll
                    for (int j = 0; j < PIECE / 8; j++) {
                        u32 by[2];                     // scales of two tokens
                        load8_shared(of_tokens + (piece * PIECE + j * 8) * 4, by[0], by[1]);
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            float& sum = sums[piece * (PIECE / 8) + j][i];
                            sum = fmaf(some[j][i], scale[i / 2] * __uint_as_float(by[i % 2]), sum);
                        }
                    }
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(w_empty + w_slot * 8);
                if (lane == 0) barrier_arrive(x_empty + x_slot * 8);
                if (++w_slot == WEIGHTS) w_slot = 0, w_parity ^= 1;
                if (++x_slot == X_STAGES) x_slot = 0, x_parity ^= 1;
                if (step == turn.w_steps / 2 && !prepared) op.prepare(), prepared = true;
            }
            if (collect(sums, turn, group, me)) finish(sums, place(turn.item), group, me, chunks);
        }
    }

{% include "common/product_sums.cuh" %}
{% if adapts is defined %}
{% include "common/product_adapted.cuh" %}
{% endif %}
    __device__ __forceinline__ void run() {
        if (warp >= GROUPS * 4) {
            if constexpr (MANY) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(KEPT));
            if (warp == GROUPS * 4) {
                if (lane == 0) fill_weights();
            } else {
                if constexpr (Op::GROUPED) gather_activations();
{% if adapts is defined %}
                else if (warp > GROUPS * 4 + 1) adapt();
{% endif %}
                else if (lane == 0 && warp == GROUPS * 4 + 1) fill_activations();
            }
        } else {
            if constexpr (MANY) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(TAKEN));
            pdl_launch();
            pdl_wait();
            if constexpr (EIGHT) multiply_eights();
            else if constexpr (Op::CODED) {{ "multiply_after" if p.after is defined and p.after else "multiply_codes" }}();
            else multiply();
        }
        __syncwarp();
        // Others may still be reading or writing this block's memory.
        if (MERGES) asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    }
};
