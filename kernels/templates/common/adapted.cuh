// The low-rank part of a product of product.cuh, added where its sums meet: by tensor cores, 16 rows of `b` and up to eight tokens
// of one adapter at a time, whose products with `a` `shrink` has left in `low`. A token's sums never meet another one's adapter.
{#- `adapts` are the parts of w, side by side: of each its operand b, the first row of b, and the first row of w. #}
{% set bank = adapts[0].b %}
struct Adapted {
    typedef {{ bank.type }} W;
    static constexpr int PARTS = {{ adapts | length }}, ADAPTERS = {{ bank.shape[0] }}, R = {{ bank.shape[2] }}, RANKS = PARTS * R, TOKENS = {{ p.tokens }};
    static constexpr int EACH = 64 * R, FITTING = 32768 / (EACH * 2);   // rows of a tile, of one adapter; adapters whose rows are in shared memory at once
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
        if (t == 0) all.changed = 0;
        together();
        const u32 slot = t < TOKENS ? all.slots[t] : 0;
        int same = 0, begin = t, first = t;
        if (slot != 0) {
            for (int o = 0; o < t; o++) {
                if (all.slots[o] != slot) continue;
                if (same == 0) first = o;
                if (same++ % 8 == 0) begin = o;
            }
            if (same % 8 == 0) begin = t;
        }
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
    template <class Op> __device__ __forceinline__ void fetch(int q0, int from, u32 rows) const {
        constexpr int OUTPUTS = 64 / Op::PARTS;
        const int adapters = min(FITTING, count(lists().first) - from);
        for (int i = threadIdx.x % 128; i < EACH / 8; i += 128) {
            const int in = i / (R / 8), row = min(Op::row(q0 + in % OUTPUTS, in / OUTPUTS), Op::N - 1);
            i64 next;
            const W* const b = row_of(row, next) + i % (R / 8) * 8;
            for (int a = 0; a < adapters; a++) copy16_async(rows + (a * EACH + i * 8) * 2, b + (lists().adapters[from + a] - 1) * next);
        }
        copy_commit();
    }
    // `low` comes to shared memory as two 16-bit floats each. Afterwards rows are there for good: where slots were stale, once more.
    template <class Op> __device__ __forceinline__ void prepare(int q0, u32 rows, W* whole) const {
        const int me = threadIdx.x % 128;
        if (me < TOKENS && slot_of(me) != lists().slots[me]) lists().changed = 1;
        together();
        if (lists().changed) {
            copy_wait<0>();
            together();
            list();
            fetch<Op>(q0, 0, rows);
        }
        W* const rest = whole + TOKENS * STRIDE;
        for (int i = me * 4; i < tokens * RANKS; i += 128 * 4) {
            const float4 v = *(const float4*)(low + i);
            const u32 a = pack2<W>(v.x, v.y), b = pack2<W>(v.z, v.w);
            const int at = i / RANKS * STRIDE + i % RANKS;
            *(uint2*)(whole + at) = make_uint2(a, b);
            *(uint2*)(rest + at) = make_uint2(pack2<W>(v.x - ::low<W>(a), v.y - high<W>(a)), pack2<W>(v.z - ::low<W>(b), v.w - high<W>(b)));
        }
    }
    // Onto the sums of a tile, a token a row of ROW floats. A warp has 16 of its 64 columns, and has written those itself.
    template <class Op, int ROW> __device__ __forceinline__ void add(float* sums, int q0, u32 rows, u32 whole) const {
        constexpr int OUTPUTS = 64 / Op::PARTS, TOGETHER = 4;
        const Lists& all = lists();
        const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, row = threadIdx.x % 128 / 32 * 16 + g;
        const int part = part_of(Op::row(q0 + (row - g) % OUTPUTS, (row - g) / OUTPUTS)), items = count(all.begin), adapters = count(all.first);
        for (int from = 0; from < adapters; from += FITTING) {
            if (from > 0) {
                together();                            // all have read those before
                fetch<Op>(q0, from, rows);
            }
            copy_wait<0>();
            together();
#pragma unroll 1
            for (int n = 0; n < items; n += TOGETHER) {
                float some[TOGETHER][4];
                bool is_here[TOGETHER];
                int at[TOGETHER * 2];
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
                // All are read before the first is written, as no two are the same: so none waits for another.
#pragma unroll
                for (int i = 0; i < TOGETHER * 2; i++) {
                    const int token = is_here[i / 2] ? all.items[n + i / 2].tokens[q * 2 + i % 2] : -1;
                    at[i] = token < 0 ? -1 : token * ROW + row;
                    some[i / 2][i % 2] += sums[max(at[i], 0)];
                    some[i / 2][i % 2 + 2] += sums[max(at[i], 0) + 8];
                }
#pragma unroll
                for (int i = 0; i < TOGETHER * 2; i++)
                    if (at[i] >= 0) sums[at[i]] = some[i / 2][i % 2], sums[at[i] + 8] = some[i / 2][i % 2 + 2];
            }
        }
    }
};
