    // `multiply_codes` where sums of codes are scaled group by group, in f32, as few-token kernels do: a code then takes half of the instructions,
    // and a token one for every sum of a group, which pays up to some 16 tokens. Minimums are multiplied by sums of activations, which are products with ones. While tensor cores have 64
    // columns (a half of a chunk) a warp makes codes of the next ones.
    struct After {
        typedef typename Op::Packed P;
        typedef typename Op::Coded V;
        static constexpr int GROUP = P::GROUP < 64 ? P::GROUP : 64, GROUPS_EACH = 64 / GROUP;   // within a half
        float sums[TOKENS / 8][4];
        float some[GROUPS_EACH][TOKENS / 8][4];        // of codes times activations, of a group
        // With minimums: sums of a group's activations, and what they are multiplied by. Codes keep their OFFSET then, if they have one.
        static constexpr bool SUMS = V::MINIMUM, KEEPS_OFFSET = SUMS && !V::FLOATS && !V::HALVED;
        float ones[SUMS ? GROUPS_EACH : 1][TOKENS / 8][4];
        float scale[GROUPS_EACH][2], by[GROUPS_EACH][2];
        u32 held[2][4][4];
        typename V::Row rows[2];
        int steps, w_slot = 0, x_slot = 0, chunks = 0;
        u32 w_parity = 0, x_parity = 0;
        bool waits;                                    // a half is under way
    };
    // What tensor cores were asked for is there: half H, the last of its group or not.
    template <int H, bool CLOSES> __device__ __forceinline__ void close(After& s) {
        wgmma_wait<0>();
#pragma unroll
        for (int g = 0; g < After::GROUPS_EACH; g++) {
            landed(s.some[g]);
            if constexpr (After::SUMS) landed(s.ones[g]);
        }
        keep(s.held[H]);
        if (H == 1 || TOGETHER == 1) {                 // a stage of x has been read
            if (threadIdx.x % 128 == 32) barrier_arrive(x_empty + s.x_slot * 8);
            if (++s.x_slot == X_STAGES) s.x_slot = 0, s.x_parity ^= 1;
        }
        if constexpr (CLOSES) {
#pragma unroll
            for (int g = 0; g < After::GROUPS_EACH; g++)
#pragma unroll
                for (int j = 0; j < TOKENS / 8; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        s.sums[j][i] = fmaf(s.scale[g][i / 2], s.some[g][j][i], s.sums[j][i]);
                        if constexpr (After::SUMS) s.sums[j][i] = fmaf(s.by[g][i / 2], s.ones[g][j][i], s.sums[j][i]);
                    }
        }
    }
    template <int B, int H> __device__ __forceinline__ static void sixteen(u32 (&a)[4], const typename After::V::Chunk (&c)[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) a[r] = code<B, 2 * H>(c[r]), a[2 + r] = code<B, 2 * H + 1>(c[r]);
    }
    template <int B, int PAIR> __device__ __forceinline__ static u32 code(const typename After::V::Chunk& c) {
        if constexpr (After::KEEPS_OFFSET) return After::V::C::template pair<B, PAIR, 0>(c);
        else return After::V::template codes<B, PAIR>(c);
    }
    // Half H of chunk C of a unit. Where it lies beyond K there is none.
    template <int C, int H> __device__ __forceinline__ void half_after(After& s, const typename After::V::Chunk (&words)[2], int step) {
        typedef typename After::P P;
        constexpr int FIRST = C * 128 + H * 64, BEFORE = FIRST == 0 ? P::COLUMNS : FIRST;   // where the half before ends
        if (STEPS % STEP != 0 && step >= s.steps) return;
        sixteen<2 * H, 0>(s.held[H][0], words);
        sixteen<2 * H, 1>(s.held[H][1], words);
        sixteen<2 * H + 1, 0>(s.held[H][2], words);
        sixteen<2 * H + 1, 1>(s.held[H][3], words);
        if (s.waits) close<1 - H, BEFORE % P::GROUP == 0>(s);
        s.waits = true;
        take_scales<FIRST, 0>(s);
        if (H == 0 || TOGETHER == 1) barrier_wait(x_full + s.x_slot * 8, s.x_parity);
        if constexpr (Op::GROUPED) fence_products();
        const u64 x = descriptor(x_of(s.x_slot) + (H == 0 || TOGETHER == 1 ? 0 : X_BYTES), 16, 1024);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u64 at = (x & 0xffffffff00000000) | ((u32)x + k * 2);
            const int g = k * 16 / After::GROUP, goes_on = (FIRST + k * 16) % P::GROUP != 0;
            tile_product(s.some[g], s.held[H][k], at, goes_on);
            if constexpr (After::SUMS) {
                constexpr u32 ONE = Bits<typename Op::X>::ONE;
                const u32 ones[4] = {ONE, ONE, ONE, ONE};
                tile_product(s.ones[g], ones, at, goes_on);
            }
        }
        wgmma_commit();
    }
    template <int FIRST, int I> __device__ __forceinline__ static void take_scales(After& s) {
        if constexpr (I < After::GROUPS_EACH) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                constexpr int G = (FIRST + I * After::GROUP) / After::P::GROUP;
                s.scale[I][r] = s.rows[r].scale.template get<G>();
                if constexpr (After::SUMS)
                    s.by[I][r] = fmaf(After::KEEPS_OFFSET ? -After::V::OFFSET : 0.0f, s.scale[I][r], -s.rows[r].minimum.template get<G>());
            }
            take_scales<FIRST, I + 1>(s);
        }
    }
    template <int C> __device__ __forceinline__ void chunks_after(After& s, u32 from, int step) {
        typedef typename After::V V;
        typedef typename After::P P;
        if constexpr (C * 128 < P::COLUMNS) {
            typename V::Chunk words[2];
#pragma unroll
            for (int r = 0; r < 2; r++) V::load(words[r], from + r * P::BYTES, C, lane);
            half_after<C, 0>(s, words, step);
            half_after<C, 1>(s, words, step + 1);
            chunks_after<C + 1>(s, from, step + 2);
        }
    }
    __device__ __forceinline__ void multiply_after() {
        typedef typename After::P P;
        typedef typename After::V V;
        const int group = warp / 4, me = threadIdx.x % 128;
        After s;
        bool prepared = false;
        for (Turn turn = first(); turn.item < work; turn = after(turn)) {
            s.steps = turn.steps();
            s.waits = false;
#pragma unroll
            for (int j = 0; j < TOKENS / 8; j++) s.sums[j][0] = s.sums[j][1] = s.sums[j][2] = s.sums[j][3] = 0;
#pragma unroll 1
            for (int step = 0; step < turn.w_steps; step++) {
                barrier_wait(w_full + s.w_slot * 8, s.w_parity);
                const u32 from = w_ring + s.w_slot * W_BYTES + units_of_warp();
#pragma unroll
                for (int r = 0; r < 2; r++) V::load_row(s.rows[r], from + r * P::BYTES, lane / 4);
                chunks_after<0>(s, from, step * STEP);
                __syncwarp();
                if (lane == 0) barrier_arrive(w_empty + s.w_slot * 8);
                if (++s.w_slot == WEIGHTS) s.w_slot = 0, s.w_parity ^= 1;
                if (step == turn.w_steps / 2 && !prepared) op.prepare(), prepared = true;
            }
            // The last half of all, which ends its group wherever it ends.
            if (STEPS % STEP != 0 && (s.steps & 1)) close<0, true>(s), finish_stage(s);
            else close<1, true>(s);
            if (collect(s.sums, turn, group, me)) finish(s.sums, place(turn.item), group, me, s.chunks);
        }
    }
    // Where K ends in the middle of a stage of x, its other half is not multiplied.
    __device__ __forceinline__ void finish_stage(After& s) {
        if (TOGETHER == 1) return;
        if (threadIdx.x % 128 == 32) barrier_arrive(x_empty + s.x_slot * 8);
        if (++s.x_slot == X_STAGES) s.x_slot = 0, s.x_parity ^= 1;
    }
