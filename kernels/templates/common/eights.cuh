// The product of hundreds of tokens on Hopper where both sides are 8-bit floats, y[T, N] = x[T, K] · w[N, K]ᵀ: x of
// `quantise_rows`, w packed codes.
//
// Two warpgroups share a tile of 128 tokens, the tensor core's M, and ROWS rows of w; a warp more has the copy
// engine fill a ring of STAGES such tiles, 128 columns each, with their scales. The two blocks of a cluster have the same rows
// of w and tokens beside one another: each brings half of w's tile for both. What products of 128 columns come to is scaled and
// added in f32 (tensor cores keep fewer bits of sums of such products), piece by piece: while a piece is scaled and added, tensor cores
// make the next one. Warpgroups do not take turns: whoever waits for the other to be done leaves the tensor cores idle until its own
// products have been asked for.
//
// With SPLIT blocks part a tile's K between them (left_sums.cuh), where there are too few tiles for all multiprocessors.
//
// Packed codes are eights of rows by 128 columns, whose two halves have 64 bytes of each row: a half is four lines of 128 bytes,
// two rows in each. The copy engine lays the eights of a tile side by side, line by line: the first lines of all of them, then
// the second ones. The tensor core's N are such lines: products that begin at their first byte are of even rows, those that begin in the middle
// of odd ones. So a thread has eight neighbours of what it sums, and a scale is one of an eight. Order of summation: 32 columns after
// 32 columns, ascending, within 128; these, ascending, within a part of K; parts, ascending.
//
// An `Op` is that of cooperative.cuh: X, K, N, PARTS, tokens, Early, early(q, t), finish(q, t, a, b, early). One that ROUNDS what it
// makes of sums has join(q, t, a, b) in place of `finish`, whose results stay in a, and round(q, t, all), which four lanes call with a
// group's, a row beyond the tokens too. With APART the two rows of an output are so many rows of w from one another, a multiple of 64,
// first ones and second ones of so many outputs in turn: a tile has both. What `early` gives is then for all outputs that
// have the same place among APART.

{% include "common/left_sums.cuh" %}
template <class Op, int ROWS, int STAGES, int SPLIT> struct Eights {
    typedef typename Op::Packed P;
    typedef typename Op::Early Early;
    static constexpr int GROUPS = 2, TOKENS = 64 * GROUPS, PAIR = 2, BAND = 8, LINES = ROWS / 2;
    static constexpr u32 X_BYTES = TOKENS * 128, W_BYTES = ROWS * 128, TILE = X_BYTES + W_BYTES;
    static constexpr u32 X_SCALES = TOKENS * 4, W_SCALES = ROWS / 8 * 4;  // four bytes of each eight
    static constexpr int PARTS = Op::APART > 0 ? 1 : Op::PARTS;   // of a tile of w, which lie in different halves of w
    static constexpr int STEPS = Op::K / 128, OUTPUTS = ROWS / PARTS, ALL = Op::N / PARTS, TILES = (ALL + OUTPUTS - 1) / OUTPUTS;
    static constexpr int SIDE = ROWS / 8 / PARTS, EACH = SIDE / 4;  // eights of a part of w's tile; those of a thread
    static constexpr int PIECE = {{ p.piece }}, PIECES = 2 * LINES / PIECE;   // lines that are multiplied together; such products of a stage
    static_assert(STEPS >= SPLIT && 2 * PIECE <= ROWS && LINES % PIECE == 0, "parts");
    static_assert(P::COLUMNS == 128 && P::SCALE_OUTER < 0 && Op::K % 128 == 0 && SIDE % 8 == 0 && ALL % 8 == 0, "shape");

    const Op& op;
    const TileMap *w_tiles, *x_tiles;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % PAIR;
    const int first = blockIdx.x / PAIR, stride = gridDim.x / PAIR;
    const int pairs = (op.tokens + PAIR * TOKENS - 1) / (PAIR * TOKENS), work = TILES * pairs * SPLIT;
    u8* const scratch;                                 // of parts
    u32 ring, scales, full, empty;

    __device__ __forceinline__ Eights(const Op& op, const TileMap* w_tiles, const TileMap* x_tiles, u8* scratch, u8* shared)
        : op(op), w_tiles(w_tiles), x_tiles(x_tiles), scratch(scratch) {
        __shared__ __align__(8) u64 barriers[2 * STAGES];
        ring = (shared_at(shared) + 1023) / 1024 * 1024;
        scales = ring + STAGES * TILE;
        full = shared_at(barriers), empty = full + STAGES * 8;
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; i++) barrier_init(full + i * 8, P::ROW_SCALES ? 1 : 33), barrier_init(empty + i * 8, PAIR * GROUPS * 4);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        cluster_sync();
    }

    // The first output and token of an item, see cooperative.cuh, and its steps. Parts of a tile's K are neighbours: they run together.
    struct Place { int output, token, begin, end; };
    __device__ __forceinline__ Place place(int item) const {
        const int tile = item / SPLIT, part = item % SPLIT;
        const int band = tile / (BAND * TILES), width = min(BAND, pairs - BAND * band), in = tile - band * BAND * TILES;
        return Place{in / width * OUTPUTS, ((BAND * band + in % width) * PAIR + rank) * TOKENS, STEPS * part / SPLIT, STEPS * (part + 1) / SPLIT};
    }
    __device__ __forceinline__ static const u8* unit(const Op& op, int row, int step) { return op.codes(min(row, Op::N - 8) / 8, 0, 0) + (i64)step * P::BYTES; }

    // Fills the ring. Weights are constant: those of the first stages are asked for before the kernel before this one has ended.
    __device__ __forceinline__ void fill() {
        u64 policy;
        asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
        const int scale_stride = (op.tokens + 3) / 4 * 4;   // of x, from 128 columns to the next
        const auto weights = [&](int slot, int step, const Place& at) {
            const u32 bytes = max(0, min(TOKENS, scale_stride - at.token)) * 4, barrier = full + slot * 8;
            if (lane == 0) {
                barrier_expect(barrier, TILE + bytes);
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    copy_coded_tile(3, ring + slot * TILE + X_BYTES + rank * (W_BYTES / 2) + part * (SIDE * 512), w_tiles, rank, step, (at.output + part * ALL) / 8, barrier, policy);
            }
            __syncwarp();
            // An eight's scale a lane: the engine takes as long for four bytes as for five hundred.
            if constexpr (!P::ROW_SCALES) {
                if (lane < ROWS / 8)
                    copy4_async(scales + slot * (X_SCALES + W_SCALES) + X_SCALES + lane * 4, unit(op, at.output + lane / SIDE * ALL + lane % SIDE * 8, step) + P::SCALE_AT);
                barrier_arrive_copied(barrier);
            }
        };
        const auto activations = [&](int slot, int step, const Place& at) {
            const u32 bytes = max(0, min(TOKENS, scale_stride - at.token)) * 4, barrier = full + slot * 8;
            if (lane != 0) return;
            copy_tile(ring + slot * TILE, x_tiles, step * 128, at.token, barrier, policy);
            const float* const from = (const float*)(op.x + (i64)op.tokens * Op::K) + (i64)step * scale_stride + at.token;
            if (bytes > 0) copy_bytes(scales + slot * (X_SCALES + W_SCALES), from, bytes, barrier, policy);
        };
        int ahead = 0;
        if (first < work) {
            const Place at = place(first);
            for (ahead = at.begin; ahead < min(at.begin + STAGES, at.end); ahead++) weights(ahead - at.begin, ahead, at);
        }
        pdl_wait();
        int slot = 0;
        u32 round = 0;
        for (int item = first; item < work; item += stride) {
            const Place at = place(item);
#pragma unroll 1
            for (int step = at.begin; step < at.end; step++) {
                if (round > 0) barrier_wait(empty + slot * 8, (round - 1) & 1);
                if (item > first || step >= ahead) weights(slot, step, at);
                activations(slot, step, at);
                if (++slot == STAGES) slot = 0, round++;
            }
        }
    }

    typedef float Some[PIECE / 8][4];
    // What a thread has of an item, and where in the ring it is.
    struct State {
        float sums[2 * (LINES / 8)][4];                // of even rows, and then of odd ones
        Some some[2];                                  // what a piece of a stage comes to: one is added up while the other is made
        float by[LINES / 32][2][2];                    // a stage's scales: of two neighbouring eights each time, and of two tokens
        int slot = 0;
        u32 parity = 0;
    };
    // Asks for piece AT of a stage: lines of even rows and of odd ones in turn.
    template <int AT> __device__ __forceinline__ void ask(Some& some, int slot, int group) const {
        const u64 x = descriptor(ring + slot * TILE + group * 8192, 16, 1024), w = descriptor(ring + slot * TILE + X_BYTES, 16, 1024);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
            tile_product_eight(some, x + k * 2, w + (AT / 2 * (PIECE * 128) + k / 2 * (W_BYTES / 2) + AT % 2 * 64) / 16 + k % 2 * 2, k > 0);
        wgmma_commit();
    }
    __device__ __forceinline__ void begin(State& s, int group) const {
        barrier_wait(full + s.slot * 8, s.parity);
        ask<0>(s.some[0], s.slot, group);
    }
    __device__ __forceinline__ static void advance(State& s) {
        if (++s.slot == STAGES) s.slot = 0, s.parity ^= 1;
    }
    __device__ __forceinline__ void load_scales(State& s, int slot, int row) const {
        const u32 own = scales + slot * (X_SCALES + W_SCALES);
        float of_tokens[2];
#pragma unroll
        for (int r = 0; r < 2; r++) of_tokens[r] = __uint_as_float(load4_shared(own + (row + r * 8) * 4));
#pragma unroll
        for (int i = 0; i < LINES / 32; i++) {
            u32 bits[2] = {};
            if constexpr (!P::ROW_SCALES) load8_shared(own + X_SCALES + (i * 8 + lane % 4 * 2) * 4, bits[0], bits[1]);
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int b = 0; b < 2; b++) s.by[i][r][b] = P::ROW_SCALES ? of_tokens[r] : of_tokens[r] * widened(bits[b], P::SCALE);
        }
    }
    template <int AT> __device__ __forceinline__ static void add(State& s) {
        Some& some = s.some[AT % 2];
        landed(some);
#pragma unroll
        for (int j = 0; j < PIECE / 8; j++) {
            const int line = AT / 2 * (PIECE / 8) + j, pair = line / (SIDE / 2) * (SIDE / 8) + line % (SIDE / 8);
            float(&sum)[4] = s.sums[AT % 2 * (LINES / 8) + line];
#pragma unroll
            for (int i = 0; i < 4; i++) sum[i] = fmaf(some[j][i], s.by[pair][i / 2][i % 2], sum[i]);
        }
    }
    // Pieces of a stage from AT on, which has been asked for. Before the last one is added the next stage's first is asked for, if there are MORE.
    template <int AT, bool MORE> __device__ __forceinline__ void pieces(State& s, int group, int row) const {
        if constexpr (AT < PIECES) {
            constexpr bool ENDS = AT + 1 == PIECES;
            const int slot = s.slot;
            // The compiler knows what is under way within a stage alone: it would wait for each product of a loop that has some under way
            // where it begins again.
            if constexpr (AT == 0) wgmma_wait<0>();
            if constexpr (!ENDS) {
                ask<AT + 1>(s.some[(AT + 1) % 2], slot, group);
            } else if constexpr (MORE) {
                advance(s);
                begin(s, group);
            }
            if constexpr (AT > 0) wgmma_wait<ENDS && !MORE ? 0 : 1>();
            if constexpr (AT == 0) load_scales(s, slot, row);   // no earlier: products that are asked for would wait for it
            add<AT>(s);
            if constexpr (ENDS) {
                __syncwarp();
                if (lane < PAIR) barrier_arrive_at(empty + slot * 8, lane);
            }
            pieces<AT + 1, MORE>(s, group, row);
        }
    }
    __device__ __forceinline__ void multiply() {
        const int group = __shfl_sync(0xffffffffu, warp / 4, 0);   // the compiler sees that it is one of all lanes: descriptors stay in uniform registers
        const int row = group * 64 + warp % 4 * 16 + lane / 4;
        State s;
        for (int item = first; item < work; item += stride) {
            // An item's place is worked out again after its products: registers are few until then.
            const int steps = SPLIT > 1 ? place(item).end - place(item).begin : STEPS;
#pragma unroll
            for (int j = 0; j < 2 * (LINES / 8); j++) s.sums[j][0] = s.sums[j][1] = s.sums[j][2] = s.sums[j][3] = 0;
            begin(s, group);
#pragma unroll 1
            for (int step = 1; step < steps; step++) pieces<0, true>(s, group, row);
            pieces<0, false>(s, group, row);
            advance(s);
            const Place at = place(item);
            if (at.token >= op.tokens || !collect(s, item, group)) continue;
#pragma unroll
            for (int r = 0; r < 2; r++) finish(s.sums, r, at, at.token + row + r * 8);
        }
    }
    // Makes sums of a part of K those of all of it. False for all but the last block that has some.
    __device__ __forceinline__ bool collect(State& s, int item, int group) const {
        if constexpr (SPLIT > 1) {
            // Of each block of an item its sums, and 16 bytes more; the first part's have how many left those of the tile. So a count lies in the
            // same place in steps of any number of tokens.
            constexpr int OF_GROUP = 2 * (LINES / 8) * 128, EACH_BLOCK = GROUPS * OF_GROUP + 1;
            const int tile = item / SPLIT, me = threadIdx.x % 128;
            const auto own = [&](int part) { return (float4*)scratch + ((tile * SPLIT + part) * PAIR + rank) * EACH_BLOCK; };
            const auto of = [&](int part) { return own(part) + group * OF_GROUP + me; };
            u32* const count = (u32*)(own(0) + GROUPS * OF_GROUP) + group;
            leave_sums(of(item % SPLIT), s.sums);
            if (!is_last_to_leave<GROUPS>(count, SPLIT - 1, group, me)) return false;
            add_left_sums(s.sums, SPLIT, of);
        }
        return true;
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
    __device__ __forceinline__ void finish(const float (&sums)[2 * (LINES / 8)][4], int r, const Place& at, int t) const {
        // A thread has every fourth pair of eights, line by line of their four.
        const auto take = [&](float (&v)[8], int part, int n) {
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = sums[i % 2 * (LINES / 8) + part * (SIDE / 2) + i / 2 * (SIDE / 8) + n / 2][r * 2 + n % 2];
        };
        if constexpr (Op::ROUNDS) {
            static_assert(PARTS == 2 && OUTPUTS == 128 && ALL % 128 == 0, "a tile is a group");
            const auto output = [&](int n) { return at.output + (n / 2 * 8 + lane % 4 * 2 + n % 2) * 8; };
            float all[EACH][8];
#pragma unroll
            for (int n = 0; n < EACH; n++) {
                float b[8];
                take(all[n], 0, n);
                take(b, 1, n);
                scale(all[n], output(n));
                scale(b, output(n) + ALL);
                op.join(output(n), t, all[n], b);
            }
            op.round(at.output, t, all);
        } else {
            // Two lanes side by side exchange an eight of each pair: what they store at a time then lies side by side, too. Half of what memory
            // takes as one would cost as much as all of it.
            const bool later = lane % 2;
            const auto output = [&](int n) { return at.output + (n / 2 * 8 + lane % 4 / 2 * 4 + n % 2 * 2 + later) * 8; };
            const auto take_pair = [&](float (&v)[2][8], int part, int n) {
                take(v[0], part, n);
                take(v[1], part, n + 1);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float other = __shfl_xor_sync(0xffffffffu, later ? v[0][i] : v[1][i], 1);
                    if (later) v[0][i] = other;
                    else v[1][i] = other;
                }
#pragma unroll
                for (int i = 0; i < 2; i++) scale(v[i], output(n + i) + part * ALL);
            };
            if constexpr (Op::APART > 0) {
                constexpr int NEXT = Op::APART / 32;   // from a thread's first rows to their second ones
                static_assert(Op::APART % 64 == 0 && ROWS % (2 * Op::APART) == 0 && Op::N % (2 * Op::APART) == 0, "a tile has both rows");
                const auto number = [&](int row) { return row / (2 * Op::APART) * Op::APART + row % Op::APART; };
#pragma unroll
                for (int n = 0; n < NEXT; n += 2) {
                    Early early[2] = {};
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        if (t < op.tokens) early[i] = op.early(number(output(n + i)), t);
#pragma unroll
                    for (int m = n; m < EACH; m += 2 * NEXT) {
                        float a[2][8], b[2][8];
                        take_pair(a, 0, m);
                        take_pair(b, 0, m + NEXT);
#pragma unroll
                        for (int i = 0; i < 2; i++)
                            if (t < op.tokens && output(m + i) < ALL) op.finish(number(output(m + i)), t, a[i], b[i], early[i]);
                    }
                }
                return;
            }
            // What `finish` reads beside sums is asked for some outputs ahead: registers do not hold that of all.
            constexpr int AHEAD = SPLIT > 1 || EACH < 4 ? 2 : 4;
#pragma unroll
            for (int first = 0; first < EACH; first += AHEAD) {
                Early early[AHEAD] = {};
#pragma unroll
                for (int n = 0; n < AHEAD; n++)
                    if (t < op.tokens && output(first + n) < ALL) early[n] = op.early(output(first + n), t);
#pragma unroll
                for (int n = first; n < first + AHEAD; n += 2) {
                    float a[2][8], b[2][8] = {};
                    take_pair(a, 0, n);
                    if (PARTS == 2) take_pair(b, 1, n);
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        if (t < op.tokens && output(n + i) < ALL) op.finish(output(n + i), t, a[i], b[i], early[n + i - first]);
                }
                asm volatile("" ::: "memory");
            }
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
