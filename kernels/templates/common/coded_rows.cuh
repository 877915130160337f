// Products of few tokens whose weights are packed codes: what skinny.cuh is for weights as they are.
//
// Tensor cores sum codes times activations within a group in f32, and scales and minimums are applied to these sums: nothing
// is rounded but the activations. The sum of a group's activations, which minimums and the codes' OFFSET are multiplied by,
// is worked out once, where activations come to shared memory. Where they do not, it comes of the tensor cores as well, by a
// matrix whose elements are all -OFFSET, in the lanes that have the other sums. Of one token there are
// shorter ways: scaled_row.cuh and short_groups.cuh.

// The loader of an `Op`: BYTES is a stage of all tiles, 16 rows by P::COLUMNS columns each, which are two units. Eight pairs in
// a row are sixteen rows side by side, or eight and eight: the op's header sees to it.
template <class Op, int TILES, class P> struct CodedRows {
    typedef P Packed;
    static constexpr int UNIT = P::BYTES, BYTES = TILES * 2 * UNIT;
    static constexpr bool BY_LANES = true;
    // Columns whose activations are summed, 0 if no sums are wanted, and what such a sum is multiplied by.
    static constexpr int SPAN = P::KIND != WHOLE && P::MINIMUM < 0 ? 0 : P::GROUP < 128 ? P::GROUP : 128;
    __device__ __forceinline__ static constexpr float sum_factor() {
        if constexpr (P::KIND != WHOLE) return -1.0f;
        else return -Codes<P, typename Op::X>::OFFSET;
    }
    // Whether scaled_row.cuh is for them, and what it multiplies sums of activations by.
    static constexpr bool SCALES_ROW = takes_scaled_row<P>();
    __device__ __forceinline__ static constexpr float scaled_factor() { return P::ZERO != 0 ? -(float)P::ZERO : -1.0f; }
    static constexpr int BANDS = (Op::N + 7) / 8, ACROSS = (Op::K + P::COLUMNS - 1) / P::COLUMNS;
    __device__ __forceinline__ static bool beside(int a, int b) { return b < 0 || b == a + 1; }
    // The eights of rows that a tile of 8 pairs has.
    __device__ __forceinline__ static void bands(const Op& op, int pair, int& first, int& second) {
        int a, b;
        op.rows(min(pair, (Op::PAIRS - 1) / 8 * 8), a, b);
        first = a / 8;
        second = min(beside(a, b) ? first + 1 : b / 8, BANDS - 1);
    }
    __device__ __forceinline__ static int place(const Op& op, int q, int second) {
        int a, b;
        op.rows(q / 8 * 8, a, b);
        return beside(a, b) ? q % 8 * 2 + second : second * 8 + q % 8;
    }
    __device__ __forceinline__ static float value(const Op& op, int row, int k) { return packed_value<P>(op.w, Op::K, row, k); }
};

// WARPS split K: a chunk is BATCH units of columns of each, of all tiles. As memory has them side by side, the copy engine brings those of
// eight rows at once where there is one, and elsewhere a warp its own. The ring holds STAGES units of each warp and row. Whoever is the
// last to have read a chunk asks for the one that takes its place.
// ROWS tokens' activations are in shared memory, and sums of them; or with ROWS = 0 they come from the L2 cache, a chunk of
// 128 columns ahead (no op that norms them has that).
// Shared memory in bytes: WARPS * (STAGES * MT * 2 * P::BYTES + MT * NT * 128 * COLS) + ROWS * K * 2 + ROWS * K / SPAN * 4, of a scaled
// row K / 4 in place of the last.
template <class Op, int WARPS, int STAGES, int MT, int NT, int ROWS> struct Coded
    : FewTokens<Op, WARPS, WARPS * STAGES * Op::template Weights<Op, MT>::BYTES, MT, NT, ROWS> {
    typedef FewTokens<Op, WARPS, WARPS * STAGES * Op::template Weights<Op, MT>::BYTES, MT, NT, ROWS> Base;
    typedef typename Op::X E;
    typedef typename Base::Weights Weights;
    typedef typename Weights::Packed P;
    typedef Codes<P, E> C;
    using Base::K, Base::PASSES, Base::TOKENS, Base::RED, Base::op, Base::warp, Base::lane, Base::group, Base::quad, Base::xrow, Base::xs,
        Base::sums, Base::red;
    static constexpr int UNIT = Weights::UNIT, STEPS = Weights::ACROSS, BLOCKS = P::COLUMNS / 32;
    static constexpr int GROUPS = P::COLUMNS / P::GROUP;
    static constexpr int SPAN = Weights::SPAN;
    static constexpr bool MINIMUM = P::MINIMUM >= 0, SCALED = Base::SCALED, SUMS = SCALED ? MINIMUM || P::ZERO != 0 : SPAN != 0;
    // Sums of activations are there, or come of the tensor cores; without minimums codes may be summed onto them.
    static constexpr bool READY = SUMS && ROWS != 0, ONTO = READY && !MINIMUM && ROWS > 1;
    typedef Scales<GROUPS, P::SCALE, P::SCALE_AT, P::SCALE_OUTER, P::SCALE_OUTER_AT> Scale;
    typedef Scales<GROUPS, MINIMUM ? P::MINIMUM : AS_F32, P::MINIMUM_AT, P::MINIMUM_OUTER, P::MINIMUM_OUTER_AT> Minimum;
    static_assert(K % 64 == 0, "K is not a multiple of 64");
    static_assert(ROWS != 0 || Op::NORM == 0, "what is normed is in shared memory");

    // Two units of a warp where none has fewer to do for it: each chunk costs instructions.
    static constexpr int ROUNDS = (STEPS + WARPS - 1) / WARPS, BATCH = ROUNDS % 2 == 0 && STAGES >= 6 ? 2 : 1, CHUNKS = ROUNDS / BATCH;
    static constexpr int SLOTS = STAGES / BATCH, ACROSS = WARPS * BATCH, BAND = ACROSS * UNIT, CHUNK = 2 * MT * BAND;   // units; bytes of eight rows, and of all
    static_assert(SLOTS >= 1, "too little shared memory");

    u32 ring, full, read;                                           // of each slot: its barrier, and how many warps have read it
    int asked_pass, asked_chunk = 0, left;                          // the next chunk to ask for, and how many there are

    __device__ __forceinline__ Coded(const Op& op, u8* shared) : Base(op, shared) {
        ring = (u32)__cvta_generic_to_shared(shared);
        if constexpr (ENGINE) {
            __shared__ __align__(8) u64 barriers[SLOTS];
            __shared__ u32 readers[SLOTS];
            full = shared_at(barriers), read = shared_at(readers);
            if (threadIdx.x == 0) {
                for (int i = 0; i < SLOTS; i++) barrier_init(full + i * 8, 1), readers[i] = 0;
                asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            }
            __syncthreads();
        }
    }

    // Asks for the next chunk, to `slot`: one thread of the block, or each warp for its own.
    __device__ __forceinline__ void ask(int slot) const {
        const int step = asked_chunk * ACROSS + (ENGINE ? 0 : warp * BATCH), bytes = min(ENGINE ? ACROSS : BATCH, STEPS - step) * UNIT;
        const u32 to = ring + slot * CHUNK, arrived = full + slot * 8;
        u64 once = 0;                                               // weights leave the rest of the cache alone
        if constexpr (ENGINE) {
            asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
            barrier_expect(arrived, 2 * MT * bytes);
        }
#pragma unroll
        for (int m = 0; m < MT; m++) {
            int bands[2];
            Weights::bands(op, (asked_pass * MT + m) * 8, bands[0], bands[1]);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const u8* const from = op.w + ((i64)bands[r] * STEPS + step) * UNIT;
                const u32 at = to + (2 * m + r) * BAND;
                if constexpr (ENGINE) {
                    copy_bytes(at, from, bytes, arrived, once);
                } else {
#pragma unroll
                    for (int i = 0; i < BATCH * UNIT; i += 512)
                        if (i + lane * 16 < bytes) copy16_async(at + warp * BATCH * UNIT + i + lane * 16, from + i + lane * 16);
                }
            }
        }
    }
    __device__ __forceinline__ void asked() {
        left--;
        if (++asked_chunk < CHUNKS) return;
        asked_chunk = 0;
        asked_pass += gridDim.x;
        if (asked_pass >= PASSES) asked_pass = blockIdx.x;
    }
    // A chunk has come.
    __device__ __forceinline__ void wait(int slot, u32 parity) const {
        if constexpr (ENGINE) {
            barrier_wait(full + slot * 8, parity);
        } else {
            copy_wait<SLOTS - 1>();
            __syncwarp();
        }
    }
    // This warp has read one, whose place the next may take.
    __device__ __forceinline__ void release(int slot) {
        __syncwarp();
        if constexpr (ENGINE) {
            if (left <= 0) return;
            if (lane == 0 && counted(read + slot * 4) % WARPS == WARPS - 1) ask(slot);
            asked();
            if (left == 0) look_ahead();
        } else {
            if (left > 0) ask(slot), asked();
            copy_commit();
        }
    }
    // How many came before, of those that counted on shared memory at `at`.
    __device__ __forceinline__ static u32 counted(u32 at) {
        u32 before;
        asm volatile("atom.acq_rel.cta.shared.add.u32 %0, [%1], 1;" : "=r"(before) : "r"(at) : "memory");
        return before;
    }
    __device__ __forceinline__ void look_ahead() const {
        if constexpr (Op::AHEAD) op.ahead.bring((lane * gridDim.x + blockIdx.x) * WARPS + warp, 32 * gridDim.x * WARPS);
    }

    // A lane's activations of block `block` of 32 columns, two of each eight. Beyond K they are zeros: codes there are not, as their
    // OFFSET is part of them, and the scale of a group that K ends in is not.
    __device__ __forceinline__ Vec16 load_x(int n, int block, int t0) const {
        if ((K % P::COLUMNS != 0 || STEPS % WARPS != 0) && block >= K / 32) return Vec16{};
        if constexpr (ROWS != 0) return load16_shared(xs + n * 8 * K * 2 + block / 2 * 128 + (block % 2 ^ (xrow & 1)) * 64 + quad * 16);
        const u32* const at = (const u32*)(op.x + op.source(min(t0 + n * 8 + group, op.tokens - 1)) * K + block * 32) + quad;
        Vec16 x;
#pragma unroll
        for (int i = 0; i < 4; i++) x.w[i] = at[i * 4];
        return x;
    }

    // Tiles of a pass that are worked on together: of many, as few as registers hold.
    static constexpr int TILES = MT > 4 ? 1 : MT;
    static_assert(MT % TILES == 0 && (ROWS != 0 || TILES == MT), "activations from the L2 cache are read once a step");
    // What a step's sums are made of.
    struct Step {
        typename C::Chunk words[TILES][2];
        Scale scale[TILES][2];
        Minimum minimum[TILES][2];
        Vec16 x[4][NT];
        float sums[NT][4];                                          // of a group's activations, times sum_factor()
        float codes[TILES][NT][4];                                  // of codes times activations
    };

    // Sums of the span's activations that begin with block B of the unit of `step`, the first of their group or not.
    template <int B, int H, bool FIRST> __device__ __forceinline__ void join_sums(Step& s, int step) {
        int span = (step * P::COLUMNS + B * 32 + H * 16) / SPAN;
        if (K % P::COLUMNS != 0) span = min(span, (K + SPAN - 1) / SPAN - 1);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const u32 at = sums + (span * ROWS + (n * 8 + quad * 2) % ROWS) * 4;
            u32 bits[2];
            if constexpr (ROWS == 1) bits[0] = bits[1] = load4_shared(at);
            else load8_shared(at, bits[0], bits[1]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float sum = __uint_as_float(bits[i % 2]);
                if constexpr (ONTO) {
#pragma unroll
                    for (int m = 0; m < TILES; m++) s.codes[m][n][i] = FIRST ? sum : s.codes[m][n][i] + sum;
                } else {
                    s.sums[n][i] = FIRST ? sum : s.sums[n][i] + sum;
                }
            }
        }
    }
    // Sixteen columns: pairs 2 H and 2 H + 1 of block B, the first of their group or not.
    template <int B, int H, bool FIRST> __device__ __forceinline__ void sixteen(Step& s, int step, u32 ones) {
        if constexpr (READY && (B * 32 + H * 16) % SPAN == 0) join_sums<B, H, FIRST>(s, step);
        if constexpr (SUMS && !READY) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const Vec16& x = s.x[B % 4][n];
                mma_onto<FIRST, E>(s.sums[n], {ones, ones, ones, ones}, x.w[2 * H], x.w[2 * H + 1]);
            }
        }
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            multiply<B, H, 0, FIRST && !ONTO>(s, m);
            if constexpr (C::HALVED) multiply<B, H, 1, false>(s, m);
        }
    }
    template <int B, int H, int PART, bool FIRST> __device__ __forceinline__ void multiply(Step& s, int m) {
        constexpr int I = B % 4;
        const auto &a = s.words[m][0], &b = s.words[m][1];
        const u32 codes[4] = {C::template pair<I, 2 * H, PART>(a), C::template pair<I, 2 * H, PART>(b),
                              C::template pair<I, 2 * H + 1, PART>(a), C::template pair<I, 2 * H + 1, PART>(b)};
#pragma unroll
        for (int n = 0; n < NT; n++) mma_onto<FIRST, E>(s.codes[m][n], codes, s.x[I][n].w[2 * H], s.x[I][n].w[2 * H + 1]);
    }
    // A group's sums, of the tiles from M on.
    template <int G, int M> __device__ __forceinline__ void close(float (&acc)[MT][NT][4], const Step& s) {
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float scale = s.scale[m][r].template get<G>();
                constexpr bool SCALE_COUNTS = SCALED ? P::ZERO != 0 : !C::FLOATS;   // codes are multiplied as more than they are
                float of_sums = scale;
                if constexpr (MINIMUM) {
                    const float minimum = s.minimum[m][r].template get<G>(), factor = -1 / (SCALED ? Weights::scaled_factor() : Weights::sum_factor());
                    of_sums = SCALE_COUNTS ? fmaf(minimum, factor, scale) : minimum * factor;
                }
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int i = 2 * r; i < 2 * r + 2; i++) {
                        if constexpr (MINIMUM) {
                            acc[M + m][n][i] = fmaf(of_sums, s.sums[n][i], fmaf(scale, s.codes[m][n][i], acc[M + m][n][i]));
                        } else {
                            acc[M + m][n][i] = fmaf(scale, SUMS && !ONTO ? s.codes[m][n][i] + s.sums[n][i] : s.codes[m][n][i], acc[M + m][n][i]);
                        }
                    }
            }
    }
    template <int B, int M> __device__ __forceinline__ void blocks(float (&acc)[MT][NT][4], Step& s, u32 unit, int step, int t0, u32 ones, Vec16 (&ahead)[4][NT], int next) {
        if constexpr (B < BLOCKS) {
            if constexpr (B % 4 == 0) {
#pragma unroll
                for (int m = 0; m < TILES; m++)
#pragma unroll
                    for (int r = 0; r < 2; r++) C::load(s.words[m][r], unit + (2 * (M + m) + r) * BAND, B / 4, lane);
#pragma unroll
                for (int b = 0; b < 4; b++)
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        if constexpr (ROWS != 0) {
                            s.x[b][n] = load_x(n, step * BLOCKS + B + b, t0);
                        } else {
                            s.x[b][n] = ahead[b][n];
                            ahead[b][n] = load_x(n, B + 4 < BLOCKS ? step * BLOCKS + B + 4 + b : next * BLOCKS + b, t0);
                        }
                    }
            }
            if constexpr (P::GROUP == 16) {
                sixteen<B, 0, true>(s, step, ones);
                close<2 * B, M>(acc, s);
                sixteen<B, 1, true>(s, step, ones);
                close<2 * B + 1, M>(acc, s);
            } else {
                sixteen<B, 0, B * 32 % P::GROUP == 0>(s, step, ones);
                sixteen<B, 1, false>(s, step, ones);
                if constexpr ((B + 1) * 32 % P::GROUP == 0) close<B * 32 / P::GROUP, M>(acc, s);
            }
            blocks<B + 1, M>(acc, s, unit, step, t0, ones, ahead, next);
        }
    }

    // The same of a scaled row.
    template <int B, int M> __device__ __forceinline__ void scaled(float (&acc)[MT][NT][4], Step& s, u32 unit, int step) {
        if constexpr (B < BLOCKS) {
            constexpr bool FIRST = B * 32 % P::GROUP == 0;
            if constexpr (B % 4 == 0)
#pragma unroll
                for (int m = 0; m < TILES; m++)
#pragma unroll
                    for (int r = 0; r < 2; r++) C::load(s.words[m][r], unit + (2 * (M + m) + r) * BAND, B / 4, lane);
            const int block = step * BLOCKS + B;
            const bool there = (K % P::COLUMNS == 0 && STEPS % WARPS == 0) || block < K / 32;
            constexpr bool WHOLE_CODES = P::KIND == WHOLE;
            if constexpr (!WHOLE_CODES || B % 2 == 0)
                s.x[0][0] = there ? load16_shared(xs + (WHOLE_CODES ? block / 2 * 128 + group % 2 * 64 : block * 64) + quad * 16) : Vec16{};
            u32 floats[2];                             // the scale of these columns of x, and their sum
            load8_shared(sums + (there ? block : K / 32 - 1) * 8, floats[0], floats[1]);
            const float scale = __uint_as_float(floats[0]), sum = there ? __uint_as_float(floats[1]) : 0;
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                const auto &a = s.words[m][0], &b = s.words[m][1];
                float of[4];
                if constexpr (WHOLE_CODES) {
                    const u32 codes[4] = {code_bytes<P, B % 4, 0>(a), code_bytes<P, B % 4, 0>(b), code_bytes<P, B % 4, 1>(a), code_bytes<P, B % 4, 1>(b)};
                    int c[4] = {};
                    mma_bytes(c, codes, s.x[0][0].w[B % 2 * 2], s.x[0][0].w[B % 2 * 2 + 1]);
#pragma unroll
                    for (int i = 0; i < 4; i++) of[i] = (float)(c[i / 2 * 2] * 256 + c[i / 2 * 2 + 1]);
                } else {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const u32 codes[4] = {eights_as_f16<P::KIND, 0>(a.w[B % 4][i]), eights_as_f16<P::KIND, 0>(b.w[B % 4][i]),
                                              eights_as_f16<P::KIND, 1>(a.w[B % 4][i]), eights_as_f16<P::KIND, 1>(b.w[B % 4][i])};
                        if (i == 0) mma_onto<true, f16>(of, codes, s.x[0][0].w[0], s.x[0][0].w[1]);
                        else mma_onto<false, f16>(of, codes, s.x[0][0].w[2], s.x[0][0].w[3]);
                    }
                }
#pragma unroll
                for (int i = 0; i < 4; i++) s.codes[m][0][i] = FIRST ? of[i] * scale : fmaf(of[i], scale, s.codes[m][0][i]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) s.sums[0][i] = FIRST ? sum : s.sums[0][i] + sum;
            if constexpr ((B + 1) * 32 % P::GROUP == 0) close<B * 32 / P::GROUP, M>(acc, s);
            scaled<B + 1, M>(acc, s, unit, step);
        }
    }

    // The same by quarters of 64 columns: short_groups.cuh. A lane has every fourth of them.
    static constexpr bool SHORT = SCALED && in_short_groups<P>();
    struct Quarters {
        typename C::Chunk words[TILES][2];
        QuarterScales<GROUPS, P::SCALE, P::SCALE_AT, P::SCALE_OUTER, P::SCALE_OUTER_AT> scale[TILES][2];
        QuarterScales<GROUPS, MINIMUM ? P::MINIMUM : AS_F32, P::MINIMUM_AT, P::MINIMUM_OUTER, P::MINIMUM_OUTER_AT> minimum[TILES][2];
    };
    template <int M> __device__ __forceinline__ void quarters_of(float (&acc)[MT][NT][4], u32 unit, int step) const {
        Quarters s;
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                s.scale[m][r].load(unit + (2 * (M + m) + r) * BAND, group, quad);
                if constexpr (MINIMUM) s.minimum[m][r].load(unit + (2 * (M + m) + r) * BAND, group, quad);
            }
        const u32 selectors[2] = {QuarterColumns::selector(group, 0), QuarterColumns::selector(group, 1)};
        quarters<0, M>(acc, s, unit, step, selectors);
    }
    template <int T, int M> __device__ __forceinline__ void quarters(float (&acc)[MT][NT][4], Quarters& s, u32 unit, int step, const u32 (&selectors)[2]) const {
        if constexpr (T < P::COLUMNS / 64) {
            if constexpr (T % 2 == 0)
#pragma unroll
                for (int m = 0; m < TILES; m++)
#pragma unroll
                    for (int r = 0; r < 2; r++) C::load(s.words[m][r], unit + (2 * (M + m) + r) * BAND, T / 2, lane);
            const int tile = step * (P::COLUMNS / 64) + T;
            const bool there = K % P::COLUMNS == 0 || tile < K / 64;
            QuarterColumns x;
            x.load(xs + tile * 128 + group % 2 * 64 + quad * 16 + group / 4 * 8, selectors, there);
            const float by = __uint_as_float(load4_shared(sums + ((there ? tile : K / 64 - 1) * 2 + quad / 2) * 8));
            float less = 0;                            // the sum of the group's activations, for minimums
            if constexpr (MINIMUM) {
                int c[4] = {};
                x.template add_sums<1>(c);
                less = -(float)(c[0] * 256 + c[1]) * by;
            }
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                int c[4] = {};
                if constexpr (P::ZERO != 0) x.template add_sums<-P::ZERO>(c);
                x.template add_products<P, T % 2 * 2>(c, s.words[m][0], s.words[m][1]);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float& sum = acc[M + m][0][2 * r];
                    sum = fmaf(s.scale[m][r].template get<T>(), (float)(c[2 * r] * 256 + c[2 * r + 1]) * by, sum);
                    if constexpr (MINIMUM) sum = fmaf(s.minimum[m][r].template get<T>(), less, sum);
                }
            }
            quarters<T + 1, M>(acc, s, unit, step, selectors);
        }
    }
    // Four lanes' sums of a row, in all of them.
    __device__ __forceinline__ static void join_quarters(float (&acc)[MT][NT][4]) {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float& sum = acc[m][0][2 * r];
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            }
    }

    // A step's sums, of the tiles from M on.
    template <int M> __device__ __forceinline__ void tiles(float (&acc)[MT][NT][4], u32 unit, int step, int t0, u32 ones, Vec16 (&ahead)[4][NT], int next) {
        if constexpr (SHORT && M < MT) {
            quarters_of<M>(acc, unit, step);
            tiles<M + TILES>(acc, unit, step, t0, ones, ahead, next);
        } else if constexpr (M < MT) {
            Step s;
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    s.scale[m][r].load(unit + (2 * (M + m) + r) * BAND, group);
                    if constexpr (MINIMUM) s.minimum[m][r].load(unit + (2 * (M + m) + r) * BAND, group);
                }
            if constexpr (SCALED) scaled<0, M>(acc, s, unit, step);
            else blocks<0, M>(acc, s, unit, step, t0, ones, ahead, next);
            tiles<M + TILES>(acc, unit, step, t0, ones, ahead, next);
        }
    }

    __device__ __forceinline__ void run() {
        const int passes = blockIdx.x < PASSES ? (PASSES - 1 - blockIdx.x) / gridDim.x + 1 : 0;
        left = (op.tokens + TOKENS - 1) / TOKENS * passes * CHUNKS;
        asked_pass = blockIdx.x;
#pragma unroll 1
        for (int i = 0; i < SLOTS; i++) {
            if (left > 0) {
                if (!ENGINE || threadIdx.x == 0) ask(i);
                asked();
            }
            if constexpr (!ENGINE) copy_commit();
        }
        this->warm_norm();
        pdl_launch();
        pdl_wait();
        const u32 ones = pack2<E>(Weights::sum_factor(), Weights::sum_factor());
        int slot = 0, parity = 0;
        u32 round = 0;                                              // of the ring, its parity
#pragma unroll 1
        for (int t0 = 0; t0 < op.tokens; t0 += TOKENS) {
            Vec16 ahead[4][NT];
            if constexpr (ROWS != 0) {
                this->stage_x(t0);
            } else {
#pragma unroll
                for (int b = 0; b < 4; b++)
#pragma unroll
                    for (int n = 0; n < NT; n++) ahead[b][n] = load_x(n, warp * BATCH * BLOCKS + b, t0);
            }
            if (t0 == 0 && left == 0) look_ahead();
#pragma unroll 1
            for (int pass = blockIdx.x; pass < PASSES; pass += gridDim.x) {
                float acc[MT][NT][4] = {};
#pragma unroll 1
                for (int chunk = 0; chunk < CHUNKS; chunk++) {
                    wait(slot, round);
                    const int first = chunk * ACROSS + warp * BATCH;
#pragma unroll 1
                    for (int u = 0; u < BATCH && (STEPS % WARPS == 0 || first + u < STEPS); u++) {
                        const int next = u + 1 < BATCH ? first + u + 1 : chunk + 1 < CHUNKS ? first + ACROSS : warp * BATCH;
                        tiles<0>(acc, ring + slot * CHUNK + (warp * BATCH + u) * UNIT, first + u, t0, ones, ahead, next);
                    }
                    release(slot);
                    if (++slot == SLOTS) slot = 0, round ^= 1;
                }
                if constexpr (SHORT) join_quarters(acc);
                this->finish(acc, pass, t0, red + parity * RED);
                parity ^= 1;
            }
        }
    }
};
