{# What kernels include in which a warp multiplies packed codes with one row of activations. #}
{% include "common/prelude.cuh" %}
{% include "common/vec.cuh" %}
{% include "common/async_copy.cuh" %}
{% include "common/barriers.cuh" %}
{% include "common/stored.cuh" %}
{% include "common/coded.cuh" %}
{% include "common/mma.cuh" %}

// Twice eight rows of codes times a row x of K activations, by a warp: values of the codes, rounded to E (or with AFTER codes), by tensor cores, of which
// it uses one column. AFTER: sums of codes are scaled group by group, in f32, as in coded_rows.cuh. Activations come from the L2 cache, 128 columns ahead: it takes longer than the products of as many. STAGES units
// of columns are in flight in each of WARPS warps, some together, by the copy engine where there is one: WARPS * STAGES * 2 * P::BYTES
// bytes of shared memory. Order of summation: 16 columns after 16 columns, ascending.
template <class P, class E, int K, int WARPS, int STAGES, bool AFTER> struct CodedDot {
    typedef Values<P, E> V;
    typedef Codes<P, E> C;
    // Sums of a group's activations, by a matrix whose elements are all FACTOR.
    static constexpr bool SUMS = V::MINIMUM || !C::FLOATS;
    static constexpr float FACTOR = C::FLOATS ? -1.0f : -C::OFFSET;
    struct Group { float codes[4], sums[4]; };
    static constexpr int ACROSS = (K + P::COLUMNS - 1) / P::COLUMNS, BAND = ACROSS * P::BYTES;
    static_assert(K % 64 == 0 && STAGES >= 2, "shape");
    // A step is of so many units: each copy costs instructions.
    static constexpr int BATCH = STAGES >= 12 ? 4 : STAGES >= 8 ? 2 : 1, SLOTS = STAGES / BATCH, EIGHT = BATCH * P::BYTES, STEPS = (ACROSS + BATCH - 1) / BATCH;
    const int lane = threadIdx.x % 32;
    u32 ring, full;                                    // full: a slot's barrier
    int slot = 0, turn = 0;
    u32 round = 0;                                     // of the ring, its parity

    __device__ __forceinline__ CodedDot(u8* shared) {
        const int warp = threadIdx.x / 32;
        ring = (u32)__cvta_generic_to_shared(shared) + warp * SLOTS * 2 * EIGHT;
        if constexpr (ENGINE) {
            __shared__ __align__(8) u64 barriers[WARPS * SLOTS];
            full = shared_at(barriers + warp * SLOTS);
            for (int i = lane; i < SLOTS; i += 32) barrier_init(full + i * 8, 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            __syncwarp();
        }
    }
    // Asks for a step of both eights.
    __device__ __forceinline__ void ask(const u8* first, const u8* second, int step, int end, int to_slot) const {
        if (step < end) {
            const int bytes = min(BATCH, ACROSS - step * BATCH) * P::BYTES;
            const u32 to = ring + to_slot * 2 * EIGHT;
            const i64 at = (i64)step * EIGHT;
            if constexpr (ENGINE) {
                u64 once;                              // weights leave the rest of the cache alone
                asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
                if (lane == 0) barrier_expect(full + to_slot * 8, 2 * bytes);
                if (lane < 2) copy_bytes(to + lane * EIGHT, (lane ? second : first) + at, bytes, full + to_slot * 8, once);
            } else {
                for (int i = lane * 16; i < bytes; i += 512) {
                    copy16_async(to + i, first + at + i);
                    copy16_async(to + EIGHT + i, second + at + i);
                }
            }
        }
        if constexpr (!ENGINE) copy_commit();
    }
    // The oldest step has come.
    __device__ __forceinline__ void wait() const {
        if constexpr (ENGINE) {
            barrier_wait(full + slot * 8, round);
        } else {
            copy_wait<SLOTS - 1>();
            __syncwarp();
        }
    }
    // A lane's activations of four blocks of 32 columns, two of each eight.
    struct Columns { u32 w[4][4]; };
    // Asks for those from `column` on. Of what lies beyond K nothing is used, and anything is read.
    __device__ __forceinline__ void ask_x(Columns& to, const E* x, int column) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32* const from = (const u32*)(x + min(column + half * 64, K - 64)) + lane % 4;
#pragma unroll
            for (int i = 0; i < 8; i++) to.w[half * 2 + i / 4][i % 4] = from[i * 4];
        }
    }
    __device__ __forceinline__ void advance() {
        if (++slot == SLOTS) slot = 0, round ^= 1;
    }
    // Asks for the first steps of part `part` of `parts` of K, for `multiply` with the same.
    __device__ __forceinline__ void begin(const u8* first, const u8* second, int part, int parts) const {
        const int from = STEPS * part / parts, end = STEPS * (part + 1) / parts;
#pragma unroll 1
        for (int i = 0; i < SLOTS; i++) ask(first, second, from + i, end, (slot + i) % SLOTS);
    }
    // Instead of `multiply`: what was asked for is not used.
    __device__ __forceinline__ void drop(int part, int parts) {
        const int steps = STEPS * (part + 1) / parts - STEPS * part / parts;
        if constexpr (!ENGINE) copy_wait<0>();
        for (int i = 0; i < min(SLOTS, steps); i++) {
            if constexpr (ENGINE) wait();
            advance();
        }
        __syncwarp();
    }
    // sums[0] and sums[2] are of row lane / 4 of the first and of the second eight, in all four lanes: of part `part` of `parts` of K.
    __device__ __forceinline__ void multiply(float (&sums)[4], const u8* first, const u8* second, const E* x, int part, int parts) {
        const int begin = STEPS * part / parts, end = STEPS * (part + 1) / parts;
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] = 0;
        Columns ahead;
        ask_x(ahead, x, begin * BATCH * P::COLUMNS);
        Group group;
#pragma unroll 1
        for (int step = begin; step < end; step++) {
            wait();
#pragma unroll 1
            for (int u = 0; u < min(BATCH, ACROSS - step * BATCH); u++) {
                const u32 from = ring + slot * 2 * EIGHT + u * P::BYTES;
                typename V::Row rows[2];
#pragma unroll
                for (int r = 0; r < 2; r++) V::load_row(rows[r], from + r * EIGHT, lane / 4);
                chunks<0>(sums, group, from, rows, ahead, x, (step * BATCH + u) * P::COLUMNS);
            }
            __syncwarp();
            ask(first, second, step + SLOTS, end, slot);
            advance();
        }
        if constexpr (!ENGINE) copy_wait<0>();
    }
    // The same of all of K by the SPLIT warps beside one another that have a part each, in all of them: parts are added up in order.
    template <int SPLIT> __device__ __forceinline__ void multiply_together(float (&sums)[4], const u8* first, const u8* second, const E* x) {
        const int warp = threadIdx.x / 32;
        begin(first, second, warp % SPLIT, SPLIT);
        multiply(sums, first, second, x, warp % SPLIT, SPLIT);
        if constexpr (SPLIT > 1) {
            __shared__ float parts[2][WARPS][16];
            float(&own)[WARPS][16] = parts[turn ^= 1];   // others may still read those of the turn before
            if (lane % 4 == 0) own[warp][lane / 4] = sums[0], own[warp][lane / 4 + 8] = sums[2];
            asm volatile("bar.sync %0, %1;" ::"r"(1 + warp / SPLIT), "n"(32 * SPLIT) : "memory");
            sums[0] = sums[2] = 0;
#pragma unroll
            for (int i = 0; i < SPLIT; i++) sums[0] += own[warp / SPLIT * SPLIT + i][lane / 4], sums[2] += own[warp / SPLIT * SPLIT + i][lane / 4 + 8];
        }
    }
    template <int I> __device__ __forceinline__ void chunks(float (&sums)[4], Group& group, u32 from, const typename V::Row (&rows)[2], Columns& ahead, const E* x, int column) const {
        if constexpr (I * 128 < P::COLUMNS) {
            typename C::Chunk words[2];
#pragma unroll
            for (int r = 0; r < 2; r++) C::load(words[r], from + r * EIGHT, I, lane);
            const Columns now = ahead;
            ask_x(ahead, x, column + (I + 1) * 128);
            block<I, 0>(sums, group, words, rows, now, column);
            block<I, 1>(sums, group, words, rows, now, column);
            block<I, 2>(sums, group, words, rows, now, column);
            block<I, 3>(sums, group, words, rows, now, column);
            chunks<I + 1>(sums, group, from, rows, ahead, x, column);
        }
    }
    // 32 columns, those from AT on of a unit.
    template <int I, int B> __device__ __forceinline__ void block(float (&sums)[4], Group& group, const typename C::Chunk (&words)[2], const typename V::Row (&rows)[2], const Columns& x, int column) const {
        constexpr int AT = I * 128 + B * 32;
        if (K % P::COLUMNS == 0 || column + AT < K) {
            sixteen<I, B, 0>(sums, group, words, rows, x);
            sixteen<I, B, 1>(sums, group, words, rows, x);
        }
        if constexpr (AFTER && P::GROUP >= 32 && (AT + 32) % P::GROUP == 0) {
            if (K % P::COLUMNS == 0 || column + AT + 32 - P::GROUP < K) close<AT / P::GROUP>(sums, group, rows);
        }
    }
    template <int I, int B, int H> __device__ __forceinline__ void sixteen(float (&sums)[4], Group& group, const typename C::Chunk (&words)[2], const typename V::Row (&rows)[2], const Columns& x) const {
        const u32 b0 = x.w[B][2 * H], b1 = x.w[B][2 * H + 1];
        if constexpr (AFTER) {
            constexpr int AT = I * 128 + B * 32 + H * 16;
            constexpr bool FIRST = AT % P::GROUP == 0;
            if constexpr (SUMS) {
                const u32 all = pack2<E>(FACTOR, FACTOR);
                mma_onto<FIRST, E>(group.sums, {all, all, all, all}, b0, b1);
            }
            codes<B, H, 0, FIRST>(group, words, b0, b1);
            if constexpr (C::HALVED) codes<B, H, 1, false>(group, words, b0, b1);
            if constexpr (P::GROUP == 16) close<AT / 16>(sums, group, rows);
        } else {
            u32 a[4];
            V::template step<I, B, H>(a, words, rows);
            mma(sums, a[0], a[1], a[2], a[3], b0, b1, E{});
        }
    }
    template <int B, int H, int PART, bool FIRST> __device__ __forceinline__ void codes(Group& group, const typename C::Chunk (&words)[2], u32 b0, u32 b1) const {
        const u32 a[4] = {C::template pair<B, 2 * H, PART>(words[0]), C::template pair<B, 2 * H, PART>(words[1]),
                          C::template pair<B, 2 * H + 1, PART>(words[0]), C::template pair<B, 2 * H + 1, PART>(words[1])};
        mma_onto<FIRST, E>(group.codes, a, b0, b1);
    }
    // A group's sums.
    template <int G> __device__ __forceinline__ void close(float (&sums)[4], const Group& group, const typename V::Row (&rows)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float scale = rows[r].scale.template get<G>();
            float& sum = sums[2 * r];
            if constexpr (V::MINIMUM) {
                const float by = fmaf(rows[r].minimum.template get<G>(), -1 / FACTOR, C::FLOATS ? 0.0f : scale);
                sum = fmaf(by, group.sums[2 * r], fmaf(scale, group.codes[2 * r], sum));
            } else {
                sum = fmaf(scale, SUMS ? group.codes[2 * r] + group.sums[2 * r] : group.codes[2 * r], sum);
            }
        }
    }
};
