// The low-rank part of a product of product.cuh: by tensor cores, 16 rows of `b` and up to eight tokens of one adapter at a time, whose
// products with `a` `shrink` has left in `low`. A token's sums never meet another one's adapter. It is worked out half way through a
// tile, while the ring of weights fills, and lies where the product's sums will meet until these are there.
{#- `adapts` are the parts of w, side by side: of each its operand b, the first row of b, and the first row of w. #}
{% set bank = adapts[0].b %}
struct Adapted {
    typedef {{ bank.type }} W;
    static constexpr int PARTS = {{ adapts | length }}, ADAPTERS = {{ bank.shape[0] }}, R = {{ bank.shape[2] }}, RANKS = PARTS * R, TOKENS = {{ p.tokens }};
    // Elements of a tile's rows, of one adapter; bytes of rows; adapters whose rows are in shared memory at once.
    static constexpr int EACH = 64 * R, ROWS = 32768, FITTING = ROWS / (EACH * 2);
    // From a token to the next: eight lanes side by side take theirs from other banks.
    static constexpr int STRIDE = RANKS + (RANKS / 16 % 2 == 0 ? 16 : 0);
    static_assert(R % 16 == 0 && FITTING > 0 && TOKENS == 64, "shape");
    // Tokens of one adapter, -1 behind the last, and where its rows are.
    struct Item { int place, tokens[8]; };
    struct Lists {
        u32 slots[TOKENS], begin[2], first[2];         // tokens that begin an item, and the first ones of their adapters, as bits
        u32 adapters[TOKENS];                          // each of them once
        Item items[TOKENS];
        int changed;
    };
    const float* low;
    const {{ slots.type }}* step_slots;
    const W* of[PARTS];
    int tokens;

    __device__ __forceinline__ static Lists& lists() {
        __shared__ Lists all;
        return all;
    }
    __device__ __forceinline__ static void together() { asm volatile("bar.sync 1, 128;" ::: "memory"); }
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

    // Groups tokens by adapter: 128 threads.
    __device__ __forceinline__ void list() const {
        Lists& all = lists();
        const int t = threadIdx.x % 128;
        if (t < TOKENS) all.slots[t] = slot_of(t);
        if (t == 0) all.changed = 0;                   // see is_stale()
        together();
        const u32 slot = t < TOKENS ? all.slots[t] : 0;
        int same = 0, begin = t, first = t;            // tokens of its adapter before this one
#pragma unroll 4
        for (int o = 0; o < TOKENS; o++) {
            const bool is_same = o < t && all.slots[o] == slot;
            first = is_same && same == 0 ? o : first;
            begin = is_same && same % 8 == 0 ? o : begin;
            same += is_same;
        }
        begin = same % 8 == 0 ? t : begin;
        const u32 begins = __ballot_sync(0xffffffffu, slot != 0 && begin == t), firsts = __ballot_sync(0xffffffffu, slot != 0 && first == t);
        if (t < TOKENS && t % 32 == 0) all.begin[t / 32] = begins, all.first[t / 32] = firsts;
        together();
        Item& item = all.items[before(all.begin, begin) % TOKENS];
        if (slot != 0 && begin == t) {
            item.place = before(all.first, first);
            all.adapters[item.place] = slot;
            for (int i = 0; i < 8; i++) item.tokens[i] = -1;
        }
        together();
        if (slot != 0) item.tokens[same % 8] = t;
        together();
    }
    // Has rows of `b` copied, of a tile of `Op` that begins with output q0 and of adapters from `from` on.
    template <class Op> __device__ __forceinline__ void fetch(int q0, int from, u8* memory) const {
        constexpr int OUTPUTS = 64 / Op::PARTS;
        const u32 rows = rows_at(memory);
        const int adapters = min(FITTING, count(lists().first) - from);
        for (int i = threadIdx.x % 128; i < EACH / 8; i += 128) {
            const int in = i / (R / 8), row = min(Op::row(q0 + in % OUTPUTS, in / OUTPUTS), Op::N - 1);
            i64 next;
            const W* const b = row_of(row, next) + i % (R / 8) * 8;
            for (int a = 0; a < adapters; a++) copy16_async(rows + (a * EACH + i * 8) * 2, b + (lists().adapters[from + a] - 1) * next);
        }
        copy_commit();
    }
    // Behind what else is in shared memory: rows of b, and `low`.
    __device__ __forceinline__ static u32 rows_at(u8* memory) { return shared_at(memory); }
    __device__ __forceinline__ static W* low_at(u8* memory) { return (W*)(memory + ROWS); }

    // Whether slots are others by now.
    __device__ __forceinline__ bool is_stale() const {
        const int t = threadIdx.x % 128;
        if (t < TOKENS && slot_of(t) != lists().slots[t]) lists().changed = 1;
        together();
        const bool changed = lists().changed;
        if (changed) together();                       // all know, before list() forgets
        return changed;
    }
    // `low` comes to shared memory as two 16-bit floats each.
    __device__ __forceinline__ void prepare(u8* memory) const {
        const int me = threadIdx.x % 128;
        W* const whole = low_at(memory);
        W* const rest = whole + TOKENS * STRIDE;
#pragma unroll 2
        for (int i = me * 4; i < tokens * RANKS; i += 128 * 4) {
            const float4 v = *(const float4*)(low + i);
            const u32 a = pack2<W>(v.x, v.y), b = pack2<W>(v.z, v.w);
            const int at = i / RANKS * STRIDE + i % RANKS;
            *(uint2*)(whole + at) = make_uint2(a, b);
            *(uint2*)(rest + at) = make_uint2(pack2<W>(v.x - ::low<W>(a), v.y - high<W>(a)), pack2<W>(v.z - ::low<W>(b), v.w - high<W>(b)));
        }
    }
    // A tile's low-rank sums, where those threads will look for them that have the product's: four of each eight tokens.
    template <class Op> __device__ __forceinline__ void multiply(int q0, u8* memory, float4* of_tile) const {
        constexpr int OUTPUTS = 64 / Op::PARTS, TOGETHER = 4;
        const Lists& all = lists();
        const u32 rows = rows_at(memory), whole = shared_at(low_at(memory));
        float* const sums = (float*)of_tile;
        const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, warp = threadIdx.x % 128 / 32, row = warp * 16 + g;
        const int part = part_of(Op::row(q0 + warp * 16 % OUTPUTS, warp * 16 / OUTPUTS)), items = count(all.begin), adapters = count(all.first);
        together();                                    // all have read what lies there
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) of_tile[j * 128 + threadIdx.x % 128] = make_float4(0, 0, 0, 0);   // tokens without an adapter
        for (int from = 0; from < adapters; from += FITTING) {
            if (from > 0) {
                together();                            // all have read those before
                fetch<Op>(q0, from, memory);
            }
            copy_wait<0>();
            together();
#pragma unroll 1
            for (int n = 0; n < items; n += TOGETHER) {
                float some[TOGETHER][4];
                bool is_here[TOGETHER];
#pragma unroll
                for (int i = 0; i < TOGETHER; i++) {
                    const Item& item = all.items[min(n + i, items - 1)];
                    const int place = item.place - from, token = max(item.tokens[g], 0);
                    is_here[i] = n + i < items && place >= 0 && place < FITTING;
                    const u32 b = rows + ((is_here[i] ? place : 0) * EACH + row * R + q * 4) * 2, x = whole + (token * STRIDE + part * R + q * 4) * 2;
                    some[i][0] = some[i][1] = some[i][2] = some[i][3] = 0;
#pragma unroll
                    for (int r = 0; r < R; r += 16) {
                        u32 b0, b1, b2, b3, x0, x1, y0, y1;
                        load8_shared(b + r * 2, b0, b2);
                        load8_shared(b + (8 * R + r) * 2, b1, b3);
                        load8_shared(x + r * 2, x0, x1);
                        load8_shared(x + (TOKENS * STRIDE + r) * 2, y0, y1);
                        mma(some[i], b0, b1, b2, b3, y0, y1, W{});
                        mma(some[i], b0, b1, b2, b3, x0, x1, W{});
                    }
                }
#pragma unroll
                for (int i = 0; i < TOGETHER * 2; i++) {
                    const int token = is_here[i / 2] ? all.items[n + i / 2].tokens[q * 2 + i % 2] : -1;
                    if (token < 0) continue;
                    float* const to = sums + (token / 8 * 128 + warp * 32 + g * 4 + token % 8 / 2) * 4 + token % 2;
                    to[0] = some[i / 2][i % 2], to[2] = some[i / 2][i % 2 + 2];
                }
            }
        }
    }
    // Onto those of the product. A warp has written what it reads here; what lies there is others' afterwards.
    __device__ __forceinline__ static void add(float (&sums)[TOKENS / 8][4], const float4* of_tile) {
        __syncwarp();
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) {
            const float4 v = of_tile[j * 128 + threadIdx.x % 128];
            sums[j][0] += v.x, sums[j][1] += v.y, sums[j][2] += v.z, sums[j][3] += v.w;
        }
        together();
    }
};
