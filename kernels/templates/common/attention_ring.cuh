// Prefill on wgmma, by warpgroups of two trades. One more than GROUPS copies tiles of the cache to a ring of STAGES of them. The others
// multiply what lies there, each for 64 query rows: while a warpgroup is at the softmax of tile j + 1, its tensor cores multiply tile j's
// probabilities with its values, or another warpgroup's. (To have warpgroups ask for products in turn was no faster, nor were queries in
// registers by more than 1 %.) A block goes from query tile to query tile, and what it wants of the next one is there before it is done
// with the last.
//
// The ring has K 0, then K 1, V 0, K 2, V 1, .. and the last V, which is the order of use, and goes on with the next query tile's K 0.
constexpr int STAGES = {{ p.stages }}, QUERIES = {{ p.queries }}, CHUNKS = D / 8, APART = 128 / CHUNKS;   // rows that are copied at a time
constexpr u32 TILE_BYTES = COLS * D * 2;
// Registers of those who copy and of the others: what a block of this size gets, parted in another way.
constexpr int ALLOTTED = 65536 / ((GROUPS + 1) * 4) / 256 * 8, KEPT = GROUPS == 2 ? 40 : 32, TAKEN = (ALLOTTED * (GROUPS + 1) - KEPT) / GROUPS / 8 * 8;
static_assert(D == DV && STAGES >= 2 && COLS % APART == 0 && TAKEN <= 255, "");

// One tile of queries and one head of the cache.
struct Work { QueryTile tile; int kv; bool last; };

// A block's works. All are numbered from 0 on, the longest first. Of every gridDim.x it has one, from the front and from the back in
// turn: what is long in one turn is short in the next.
struct Works {
    const Step* step;
    int tiles, turn = 0;
    __device__ __forceinline__ explicit Works(const Step* step) : step(step), tiles(step->first[step->seqs] / TOKENS + (int)step->seqs) {}
    // Called by whole warps. No tokens: there are no more.
    __device__ __forceinline__ Work next() {
        const int blocks = gridDim.x, count = tiles * HKV;
        for (; turn * blocks < count; turn++) {
            const int at = turn * blocks + (turn % 2 ? blocks - 1 - (int)blockIdx.x : (int)blockIdx.x);
            const QueryTile tile = find_tile_by_warp(step, tiles - 1 - at / HKV);
            if (at >= count || tile.tokens == 0) continue;
            turn++;
            return Work{tile, at % HKV, false};
        }
        return Work{};
    }
};

// Where things are in shared memory. Each stage of the ring and each place for queries has two barriers, at which those who copy
// say that it is full and the others, a warp each, that it is free.
struct Places {
    u32 queries, ring, full, free, queries_full, queries_free;
    __device__ __forceinline__ u32 tile(int slot) const { return ring + slot * TILE_BYTES; }
    __device__ __forceinline__ u32 query_tile(int slot) const { return queries + slot * Q_BYTES; }
};
// Which of N places is next, and the parity of the phase in which it becomes full.
template <int N> struct Turn {
    int n = 0;                           // of two rounds: one register
    __device__ __forceinline__ int slot() const { return n < N ? n : n - N; }
    __device__ __forceinline__ u32 parity() const { return n < N ? 0 : 1; }
    __device__ __forceinline__ void next() { n = n + 1 < 2 * N ? n + 1 : 0; }
};

// What the warpgroup that copies does.
struct Copier {
    const Places& at;
    Work* const works;
    const int me = threadIdx.x % 128, row = me / CHUNKS, chunk = me % CHUNKS;
    Turn<STAGES> stage;
    Turn<QUERIES> query;

    // In the first round the phase before the first counts as over: nothing is waited for.
    __device__ __forceinline__ void copy_queries(const Q* q, const Work& work) {
        barrier_wait(at.queries_free + query.slot() * 8, query.parity() ^ 1);
        if (me == 0) {
            works[query.slot()] = work;
            barrier_arrive(at.queries_full + query.slot() * 8);
        }
        const Q* from = q + ((i64)work.tile.token * H + work.kv * GROUP) * D + chunk * 8;
#pragma unroll 4
        for (int i = 0; i < ROWS / APART; i++) {
            const int r = i * APART + row;
            const bool valid = r < work.tile.tokens * GROUP;
            copy16_async(at.query_tile(query.slot()) + r / 64 * (64 * D * 2) + swizzled<64>(r % 64, chunk),
                         valid ? from + query_row(r) * D : from, valid);
        }
        barrier_arrive_copied(at.queries_full + query.slot() * 8);
        query.next();
    }
    // COLS rows of a plane, of which those from `first` on and before `left` are there; `block` is, in lane i, the cache row at which the
    // i-th 16 of them begin.
    __device__ __forceinline__ void copy_tile_of(const V* plane, int kv, int block, int first, int left) {
        barrier_wait(at.free + stage.slot() * 8, stage.parity() ^ 1);
        const V* from = plane + ((i64)(row % 16) * HKV + kv) * D + chunk * 8;
        const u32 to = at.tile(stage.slot()) + swizzled<COLS>(row, chunk);   // APART is a multiple of 8: chunks of later rows are exchanged alike
#pragma unroll
        for (int i = 0; i < COLS / APART; i++) {
            const int r = i * APART + row;
            const i64 begins = __shfl_sync(0xffffffffu, block, i * APART / 16) + i * APART % 16;
            copy16_async(to + i * APART * 128, from + begins * (HKV * D), (!WINDOW || r >= first) && r < left);
        }
        barrier_arrive_copied(at.full + stage.slot() * 8);
        stage.next();
    }
    __device__ __forceinline__ void run(const Step* step, Works& all, Work work, const Q* q, const V* k_state, const V* v_state) {
        for (;;) {
            const QueryTile tile = work.tile;
            const int seen = first_seen(tile.position), end = tile.position + tile.tokens;
            const auto block_of = [&](int base) {
                const int i = base + me % 32 % (COLS / 16) * 16;
                return i < end ? (int)cache_row(step, tile.b, i) : 0;
            };
            int base = seen / COLS * COLS, block = block_of(base);
            const Work next = all.next();
            work.last = next.tile.tokens == 0;
            copy_queries(q, work);
            copy_tile_of(k_state, work.kv, block, seen - base, end - base);
#pragma unroll 1
            for (; base < end; base += COLS) {
                const int before = block;
                if (base + COLS < end) {
                    block = block_of(base + COLS);
                    copy_tile_of(k_state, work.kv, block, seen - base - COLS, end - base - COLS);
                }
                copy_tile_of(v_state, work.kv, before, seen - base, end - base);
            }
            if (work.last) return;
            work = next;
        }
    }
};

// What each of the other warpgroups does.
struct Multiplier {
    const Places& at;
    const Work* const works;
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
    Turn<STAGES> stage;
    Turn<QUERIES> query;

    __device__ __forceinline__ void meet() const { asm volatile("barrier.sync %0, 128;" ::"r"(1 + group) : "memory"); }
    // The next tile, once it is there.
    __device__ __forceinline__ Turn<STAGES> take() {
        const Turn<STAGES> taken = stage;
        barrier_wait(at.full + taken.slot() * 8, taken.parity());
        stage.next();
        return taken;
    }
    // The warp's part of products that read it has ended.
    __device__ __forceinline__ void release(const Turn<STAGES>& taken) const {
        if (lane == 0) barrier_arrive(at.free + taken.slot() * 8);
    }
    __device__ __forceinline__ void attend(Rows& own, u32 queries, const QueryTile& tile) {
        const int end = tile.position + tile.tokens, position = tile.position + group * 64 / GROUP;
        // Tiles begin at multiples of COLS counted from position 0, so that a row is summed alike in every step.
        int base = first_seen(tile.position) / COLS * COLS;
        float s[COLS / 8][4];
        u32 p[COLS / 16][4];
        Turn<STAGES> k = take(), v;
        fence_products();                // no tile came by the copy engine
        wgmma_fence();
        start_scores(s, queries, at.tile(k.slot()));
        wgmma_wait<0>();
        landed(s);
        release(k);
        own.softmax(s, is_edge(base, position, end), base);
        to_operand<COLS / 8>(p, s);
#pragma unroll 1
        for (base += COLS; base < end; base += COLS) {
            k = take(), v = take();
            fence_products();
            wgmma_fence();
            start_scores(s, queries, at.tile(k.slot()));
            start_values(own.acc, p, at.tile(v.slot()));
            wgmma_wait<1>();
            landed(s);
            release(k);
            own.softmax(s, is_edge(base, position, end), base);
            own.settle();
            wgmma_wait<0>();
            landed(own.acc);
            release(v);
            rescale(own.acc, own.shrink);
            to_operand<COLS / 8>(p, s);
        }
        v = take();
        fence_products();
        wgmma_fence();
        start_values(own.acc, p, at.tile(v.slot()));
        wgmma_wait<0>();
        landed(own.acc);
        release(v);
    }
    // `shared` is at the address `from`.
    template <class Factor> __device__ __forceinline__ void run(u8* shared, u32 from, Output output, Factor factor) {
        bool last = false;
        while (!last) {
            barrier_wait(at.queries_full + query.slot() * 8, query.parity());
            const QueryTile tile = works[query.slot()].tile;
            const u32 my_q = at.query_tile(query.slot()) + group * (64 * D * 2);
            Rows own(group * 64, tile.position);
            attend(own, my_q, tile);
            meet();                                 // no warp's products read the queries, whose place is that of results now
            const Work work = works[query.slot()];    // read again, as registers are few until here
            const i64 row0 = (i64)work.tile.token * H + work.kv * GROUP;
            own.store(shared + (my_q - from), output, row0, work.tile.tokens * GROUP,
                      [&](float m, float l, int r) { return factor(m, l, work.kv * GROUP + r % GROUP); });
            last = work.last;
            __syncwarp();
            if (lane == 0) barrier_arrive(at.queries_free + query.slot() * 8);
            query.next();
        }
    }
};

extern "C" __global__ void __launch_bounds__({{ block }}, 1) {{ kernel }}({{ params }}) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u64 barriers[2 * (STAGES + QUERIES)];
    __shared__ Work published[QUERIES];
    Works works(step);
    const Work first = works.next();
    if (first.tile.tokens == 0) {                   // of the whole block
        pdl_wait();
        pdl_launch();
        return;
    }
    const u32 from = shared_address(shared), queries = (from + 1023) / 1024 * 1024, full = shared_address(barriers);
    const Places at{queries, queries + QUERIES * Q_BYTES, full, full + STAGES * 8, full + 2 * STAGES * 8, full + (2 * STAGES + QUERIES) * 8};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(at.full + i * 8, 128), barrier_init(at.free + i * 8, GROUPS * 4);
        for (int i = 0; i < QUERIES; i++) barrier_init(at.queries_full + i * 8, 128 + 1), barrier_init(at.queries_free + i * 8, GROUPS * 4);
    }
    pdl_wait();
    pdl_launch();
    __syncthreads();
    if (threadIdx.x >= GROUPS * 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(KEPT));
        Copier copier{at, published};
        copier.run(step, works, first, q, k_state, v_state);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(TAKEN));
        Multiplier multiplier{at, published};
        multiplier.run(shared, from, Output{ {{ output }}, step}, [&](float m, float l, int head) { return row_factor(m, l SINKS_ARG(head)); });
    }
}
