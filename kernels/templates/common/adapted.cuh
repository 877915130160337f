// Low-rank parts of a product of product.cuh, made by four warps more while the others multiply, so that these only add them where sums
// meet. By tensor cores, up to eight tokens of one adapter at a time: a token's sums never meet another one's adapter.
//
// First halves, x by `a`: up to eight tokens of one adapter are an item, and an item is eight jobs, each a slice of K. Blocks share all jobs,
// and each waits until the others' are done. A block may not be running yet, where another model's kernels have its multiprocessor: so one
// that has waited for long does those jobs that nobody has begun. Order of summation: a warp's columns, a job's warps, the jobs.
// Second halves, of that by `b`: each block of a cluster for the tokens that it finishes, a tile ahead of the others.
{#- `adapts` are the parts of w, side by side: of each its operands a and b, the first row of b, and the first row of w. #}
{% set bank = adapts[0].b %}
struct Adapted {
    typedef {{ bank.type }} W;
    static constexpr int PARTS = {{ adapts | length }}, ADAPTERS = {{ bank.shape[0] }}, R = {{ bank.shape[2] }}, RANKS = PARTS * R, K = {{ x.cols }};
    static constexpr int TOKENS = {{ p.tokens }}, BLOCKS = {{ p.split }}, SHARE = TOKENS / BLOCKS;   // blocks of a cluster, and tokens that one finishes
    static constexpr int EACH = 64 * R, FITTING = 32768 / (EACH * 2);   // rows of a tile, of one adapter; adapters whose rows are in shared memory at once
    // From a token to the next: eight lanes side by side take theirs from other banks.
    static constexpr int STRIDE = RANKS + (RANKS / 16 % 2 == 0 ? 16 : 0);
    static constexpr int JOBS = 8, WARPS = 4, CHUNKS = K / 32, TURNS = ((CHUNKS + JOBS - 1) / JOBS + WARPS - 1) / WARPS;   // jobs of an item; 32 columns each
    static constexpr int TILES = RANKS / 16, LIMIT = TILES > 8 ? 1 : 8 / TILES, HELD = TURNS < LIMIT ? TURNS : LIMIT;   // turns whose rows of `a` a warp has at once
    static_assert(R % 16 == 0 && FITTING > 0 && TOKENS == 64 && K % 32 == 0, "shape");
    // Tokens of one adapter, -1 behind the last, and where its rows are.
    struct Item { signed char place, tokens[8]; };
    struct Lists {
        u32 slots[TOKENS], begin[2], first[2];         // tokens that begin an item, and the first ones of their adapters, as bits
        u32 adapters[TOKENS];                          // each of them once
        Item items[TOKENS];
        int changed;
    };
    // What blocks share, zeros between launches: jobs that are done, blocks that are through, and jobs that somebody has begun.
    struct Board { u32 done, left, begun[TOKENS * JOBS]; };
    static constexpr int BOARD = 2304;                 // bytes of `scratch` before what jobs have made; templates count them in
    static_assert(sizeof(Board) <= BOARD, "scratch");
    static constexpr int PATIENCE = 1 << 12;           // looks at the board before a block takes over
    const {{ x.type }}* x;
    const {{ slots.type }}* step_slots;
    const W *from[PARTS], *of[PARTS];
    u8* scratch;
    int tokens;
    int own = blockIdx.x % BLOCKS * SHARE;             // the first token that this block finishes

    __device__ __forceinline__ Board& board() const { return *(Board*)scratch; }
    // What a job has made of a token.
    __device__ __forceinline__ float* partial(int job, int token) const { return (float*)(scratch + BOARD) + (job * TOKENS + token) * RANKS; }
    enum Whose { ALL, OWN };                           // tokens: all of them, or those that this block finishes
    __device__ __forceinline__ static Lists& lists(Whose whose) {
        __shared__ Lists all[BLOCKS > 1 ? 2 : 1];
        return all[BLOCKS > 1 && whose == OWN];
    }
    __device__ __forceinline__ static int me() { return threadIdx.x - ({{ block }} - 128); }
    __device__ __forceinline__ static void together() { asm volatile("bar.sync 2, 128;" ::: "memory"); }
    __device__ __forceinline__ static int count(const u32 (&bits)[2]) { return __popc(bits[0]) + __popc(bits[1]); }
    __device__ __forceinline__ static int before(const u32 (&bits)[2], int t) {
        return t < 32 ? __popc(bits[0] & ((1u << t) - 1)) : __popc(bits[0]) + __popc(bits[1] & ((1u << (t - 32)) - 1));
    }
    __device__ __forceinline__ u32 slot_of(int t) const {
        const u32 slot = t < tokens ? *(const volatile u32*)(step_slots + t) : 0;
        return slot <= ADAPTERS ? slot : 0;
    }
    __device__ __forceinline__ static int part_of(int row) {
        int part = 0;
{% for a in adapts[1:] %}
        part += row >= {{ a.begin }};
{% endfor %}
        return part;
    }
    // Where the row of `b` of adapter 1 is that a row of w has, and how far that of the next adapter.
    __device__ __forceinline__ const W* row_of(int row, i64& next) const {
        const int part = part_of(row);
        const W* b = of[0] + (i64)({{ adapts[0].start }} + row) * R;
        next = (i64){{ adapts[0].b.shape[1] }} * R;
{% for a in adapts[1:] %}
        if (part == {{ loop.index }}) b = of[{{ loop.index }}] + (i64)({{ a.start }} + row - {{ a.begin }}) * R, next = (i64){{ a.b.shape[1] }} * R;
{% endfor %}
        return b;
    }

    // Groups tokens by adapter: two warps all of them, and another one, in a cluster, those that this block finishes.
    __device__ __forceinline__ void list() const {
        const bool finishes = BLOCKS > 1 && me() >= TOKENS;
        const int t = finishes ? me() - TOKENS : me(), lane = t % 32, most = finishes ? SHARE : TOKENS;
        Lists& all = lists(finishes ? OWN : ALL);
        const bool is_one = t < most;
        if (is_one) all.slots[t] = slot_of((finishes ? own : 0) + t);
        if (t == 0) all.changed = 0, all.begin[1] = 0, all.first[1] = 0;
        together();
        const u32 slot = is_one ? all.slots[t] : 0;
        // Tokens of the same adapter, as bits: of one's own 32, and of the first 32 for the others.
        u64 same = (u64)__match_any_sync(0xffffffffu, slot) << (t & 32);
        if (is_one && t >= 32)
#pragma unroll
            for (int o = 0; o < 32; o++) same |= (u64)(all.slots[o] == slot) << o;
        const int first = __ffsll(same) - 1, nth = __popcll(same & (((u64)1 << t % 64) - 1));
        // The token that begins one's item.
        for (int i = 0; i < nth / 8 * 8 && slot != 0; i++) same &= same - 1;
        const int begin = __ffsll(same) - 1;
        const u32 begins = __ballot_sync(0xffffffffu, slot != 0 && begin == t), firsts = __ballot_sync(0xffffffffu, slot != 0 && first == t);
        if (is_one && lane == 0) all.begin[t / 32] = begins, all.first[t / 32] = firsts;
        together();
        Item& item = all.items[slot != 0 ? before(all.begin, begin) : 0];
        if (slot != 0 && begin == t) {
            item.place = before(all.first, first);
            all.adapters[item.place] = slot;
            for (int i = 0; i < 8; i++) item.tokens[i] = -1;
        }
        together();
        if (slot != 0) item.tokens[nth % 8] = t;
        together();
    }
    // Whether slots were stale. After the wait.
    __device__ __forceinline__ bool is_stale() const {
        if (me() < TOKENS && slot_of(me()) != lists(ALL).slots[me()]) lists(ALL).changed = 1;
        together();
        return lists(ALL).changed;
    }

    // ---- first halves
    __device__ __forceinline__ static int begin(int job) { return CHUNKS * job / JOBS; }   // its first 32 columns
    __device__ __forceinline__ const W* row_of_a(u32 slot, int row) const {
        const W* a = from[0];
#pragma unroll
        for (int i = 1; i < PARTS; i++) a = row / R == i ? from[i] : a;
        return a + ((i64)(slot - 1) * R + row % R) * K;
    }
    __device__ __forceinline__ static u32 slot_of_item(int n) { return lists(ALL).adapters[lists(ALL).items[n].place]; }
    // Rows of `a` of a warp's turns: a lane takes eight neighbours of a row, whose pairs are the columns of two products. Which ones does not
    // matter, as both operands agree.
    struct Held { Vec16 rows[HELD][TILES][2], columns[HELD]; };
    __device__ __forceinline__ void ask(Held& held, int n, int turn) const {
        const int job = n % JOBS, warp = me() / 32, lane = me() % 32, g = lane / 4, q = lane % 4;
        const bool is_there = n / JOBS < count(lists(ALL).begin);
        const u32 slot = is_there ? slot_of_item(n / JOBS) : 1;
#pragma unroll
        for (int h = 0; h < HELD; h++) {
            const int c = begin(job) + warp + (turn + h) * WARPS;
#pragma unroll
            for (int i = 0; i < TILES * 2; i++) {
                held.rows[h][i / 2][i % 2] = Vec16{};
                if (is_there && c < begin(job + 1)) held.rows[h][i / 2][i % 2] = load16_stream(row_of_a(slot, i * 8 + g) + c * 32 + q * 8);
            }
        }
    }
    // And activations.
    __device__ __forceinline__ void take(Held& held, int n, int turn) const {
        const int job = n % JOBS, warp = me() / 32, lane = me() % 32, g = lane / 4, q = lane % 4;
        const int token = n / JOBS < count(lists(ALL).begin) ? lists(ALL).items[n / JOBS].tokens[g] : -1;
#pragma unroll
        for (int h = 0; h < HELD; h++) {
            const int c = begin(job) + warp + (turn + h) * WARPS;
            held.columns[h] = Vec16{};
            if (c < begin(job + 1) && token >= 0) held.columns[h] = load16(x + (i64)token * K + c * 32 + q * 8);
        }
    }
    // Has those rows of later turns brought as far as the L2 cache.
    __device__ __forceinline__ void ask_ahead(int n) const {
        if (n / JOBS >= count(lists(ALL).begin)) return;
        const u32 slot = slot_of_item(n / JOBS);
        const int first = (begin(n % JOBS) + (n == blockIdx.x ? HELD * WARPS : 0)) * 32, columns = begin(n % JOBS + 1) * 32 - first;
        const int lines = (columns * 2 + 127) / 128;
        for (int i = me(); i < RANKS * lines; i += 128)
            asm volatile("prefetch.global.L2 [%0];" ::"l"((const u8*)(row_of_a(slot, i / lines) + first) + i % lines * 128));
    }
    // A job, of whose first turns all is there. It does not count if somebody has begun it.
    __device__ __forceinline__ void work(Held& held, int n, float (*of_warps)[8][RANKS]) const {
        __shared__ u32 begun;
        if (me() == 127) begun = atomicExch(&board().begun[n], 1);
        const Item& item = lists(ALL).items[n / JOBS];
        const int job = n % JOBS, warp = me() / 32, lane = me() % 32, g = lane / 4, q = lane % 4;
        float sums[TILES][4] = {};
#pragma unroll 1
        for (int turn = 0; turn < TURNS; turn += HELD) {
            if (turn > 0) ask(held, n, turn), take(held, n, turn);
#pragma unroll
            for (int h = 0; h < HELD; h++)
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    const Vec16 &above = held.rows[h][i][0], &below = held.rows[h][i][1], &v = held.columns[h];
                    mma(sums[i], above.w[0], below.w[0], above.w[1], below.w[1], v.w[0], v.w[1], W{});
                    mma(sums[i], above.w[2], below.w[2], above.w[3], below.w[3], v.w[2], v.w[3], W{});
                }
        }
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) of_warps[warp][q * 2 + j % 2][i * 16 + g + j / 2 * 8] = sums[i][j];
        together();
        const bool counts = begun == 0;
        for (int i = me(); i < 8 * RANKS; i += 128) {
            const int token = item.tokens[i / RANKS];
            float sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += (&of_warps[w][0][0])[i];
            if (counts && token >= 0) __stcg(partial(job, token) + i % RANKS, sum);
        }
        together();
        if (counts && me() == 0) asm volatile("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(&board().done) : "memory");
    }
    // All first halves: those of this block's jobs, of whose first one the first turns are there, and those that others make.
    __device__ __forceinline__ void shrink(Held& held, float (*of_warps)[8][RANKS]) const {
        __shared__ bool ready;
        const int jobs = count(lists(ALL).begin) * JOBS;
        for (int n = blockIdx.x; n < jobs; n += gridDim.x) {
            if (n != blockIdx.x) ask(held, n, 0), take(held, n, 0);
            work(held, n, of_warps);
        }
        if (me() == 0) ready = is_done(jobs);
        together();
        if (ready) return;
        for (int n = 0; n < jobs; n++) {
            if (me() == 0) ready = *(volatile u32*)&board().begun[n] != 0;
            together();
            const bool begun = ready;
            together();
            if (begun) continue;
            ask(held, n, 0), take(held, n, 0);
            work(held, n, of_warps);
        }
        if (me() == 0) while (!is_done(jobs));
        together();
    }
    // Looks at the board for a while.
    __device__ __forceinline__ bool is_done(int jobs) const {
        for (int i = 0; i < PATIENCE; i++) {
            u32 done;
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(done) : "l"(&board().done) : "memory");
            if ((int)done >= jobs) return true;
        }
        return false;
    }
    // Those of this block's tokens, of some of w's parts, come to shared memory as two 16-bit floats each.
    __device__ __forceinline__ void gather(W* whole, int first, int parts) const {
        W* const rest = whole + SHARE * STRIDE;
        const int ranks = parts * R;
        for (int i = me() * 4; i < SHARE * ranks; i += 128 * 4) {
            const int t = i / ranks, r = first * R + i % ranks;
            float4 v = make_float4(0, 0, 0, 0);
            if (lists(OWN).slots[t] != 0) {
#pragma unroll
                for (int job = 0; job < JOBS; job++) {
                    const float4 some = __ldcg((const float4*)(partial(job, own + t) + r));
                    v.x += some.x, v.y += some.y, v.z += some.z, v.w += some.w;
                }
            }
            const u32 a = pack2<W>(v.x, v.y), b = pack2<W>(v.z, v.w);
            *(uint2*)(whole + t * STRIDE + r) = make_uint2(a, b);
            *(uint2*)(rest + t * STRIDE + r) = make_uint2(pack2<W>(v.x - low<W>(a), v.y - high<W>(a)), pack2<W>(v.z - low<W>(b), v.w - high<W>(b)));
        }
        together();
    }

    // Nothing of this block needs the board any more; the last block leaves it as it was.
    __device__ __forceinline__ void leave() const {
        __shared__ bool last;
        if (me() == 0) last = atomicAdd(&board().left, 1) == gridDim.x - 1;
        together();
        if (!last) return;
        for (int i = me(); i < TOKENS * JOBS; i += 128) board().begun[i] = 0;
        if (me() == 0) board().done = 0, board().left = 0;
    }

    // ---- second halves
    // Has rows of `b` copied, of a tile of `Op` that begins with output q0 and of adapters from `from` on.
    template <class Op> __device__ __forceinline__ void fetch(int q0, int from, u32 rows) const {
        constexpr int OUTPUTS = 64 / Op::PARTS;
        const int adapters = min(FITTING, count(lists(OWN).first) - from);
        for (int i = me(); i < EACH / 8; i += 128) {
            const int in = i / (R / 8), row = min(Op::row(q0 + in % OUTPUTS, in / OUTPUTS), Op::N - 1);
            i64 next;
            const W* const b = row_of(row, next) + i % (R / 8) * 8;
            for (int a = 0; a < adapters; a++) copy16_async(rows + (a * EACH + i * 8) * 2, b + (lists(OWN).adapters[from + a] - 1) * next);
        }
        copy_commit();
    }
    // Low-rank parts of a tile, a token a row of ROW floats; those of tokens without an adapter stay as they are. A warp has 16 of 64 columns.
    template <class Op, int ROW> __device__ __forceinline__ void expand(float* to, int q0, u32 rows, u32 whole) const {
        constexpr int OUTPUTS = 64 / Op::PARTS;
        const Lists& all = lists(OWN);
        const int lane = me() % 32, g = lane / 4, q = lane % 4, row = me() / 32 * 16 + g;
        const int part = part_of(Op::row(q0 + (row - g) % OUTPUTS, (row - g) / OUTPUTS)), items = count(all.begin), adapters = count(all.first);
        for (int from = 0; from < adapters; from += FITTING) {
            if (from > 0) {
                together();                            // all have read those before
                fetch<Op>(q0, from, rows);
            }
            copy_wait<0>();
            together();
            // Several at a time: none waits for another.
            constexpr int TOGETHER = 4;
#pragma unroll 1
            for (int n = 0; n < items; n += TOGETHER) {
                float sums[TOGETHER][4] = {};
                int at[TOGETHER][2];
#pragma unroll
                for (int k = 0; k < TOGETHER; k++) {
                    const Item& item = all.items[min(n + k, items - 1)];
                    const int place = item.place - from, token = max((int)item.tokens[g], 0);
                    const bool is_here = n + k < items && place >= 0 && place < FITTING;
                    const u32 b = rows + ((is_here ? place : 0) * EACH + row * R + q * 4) * 2, x = whole + (token * STRIDE + part * R + q * 4) * 2;
#pragma unroll
                    for (int i = 0; i < 2; i++) at[k][i] = is_here ? item.tokens[q * 2 + i] * ROW + row : -1;
#pragma unroll
                    for (int r = 0; r < R; r += 16) {
                        u32 b0, b1, b2, b3, x0, x1, y0, y1;
                        load8_shared(b + r * 2, b0, b2);
                        load8_shared(b + (8 * R + r) * 2, b1, b3);
                        load8_shared(x + r * 2, x0, x1);
                        load8_shared(x + (SHARE * STRIDE + r) * 2, y0, y1);
                        mma(sums[k], b0, b1, b2, b3, y0, y1, W{});
                        mma(sums[k], b0, b1, b2, b3, x0, x1, W{});
                    }
                }
#pragma unroll
                for (int k = 0; k < TOGETHER; k++)
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        if (at[k][i] >= 0) to[at[k][i]] = sums[k][i], to[at[k][i] + 8] = sums[k][i + 2];
            }
        }
        together();
    }
    // A tile's parts are there, and read: of all who make or take them.
    __device__ __forceinline__ static void give() { asm volatile("bar.arrive 3, 256;" ::: "memory"); }
    __device__ __forceinline__ static void await() { asm volatile("bar.sync 3, 256;" ::: "memory"); }
    __device__ __forceinline__ static void give_back() { asm volatile("bar.arrive 4, 256;" ::: "memory"); }
    __device__ __forceinline__ static void await_back() { asm volatile("bar.sync 4, 256;" ::: "memory"); }
};
