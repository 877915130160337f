// The gated delta rule in chunks of 32 tokens, where each element of a key decays at a rate of its own: as in `state_chunks.cuh`, but with decays G_i a
// vector. Queries and keys take them up before they are multiplied: with the state as the chunk begins, q_i G_i and k_i G_i; for the state as it ends,
// k_j G / G_j; with one another, q_i G_i / R and k_j R / G_j, for a token R between both, so that no factor is above 1: the last token of the 16 (or of the
// 8) before those of i. Within 8 tokens R is the fourth, factors are above 1, and decays are taken to be at least 2^-24, so that none overflows: of what
// a token wrote less than that is left, which is no more than what f32 sums leave. Scaled queries and keys are f32, so that they come as two parts, too.
//
// What includes it sets `queries`, `keys`, `values`, `decays`, `weights` and `result`, `memory`, the name of the state, SCALE, a factor of keys, and
// READ_SCALE, of what is read.
constexpr int C = 32, COLUMNS = 32, WARPS = 4;
constexpr int DK = {{ keys.shape[2] }}, DV = {{ values.shape[2] }}, HEADS = {{ values.shape[1] }};
constexpr int BLOCKS = C / 16, TILES = C / 8, KEYS = DK / 2, SLICES = DV / COLUMNS;
constexpr int K_ROW = DK + 8, V_ROW = COLUMNS + 8, A_ROW = C + 8, G_ROW = DK + 8;   // padded: the 8 rows of a matrix load differ in banks
// Where things lie in shared memory, in bytes: two stages of keys and queries, three of values; logarithms of decays (base 2) up to each token, and from
// the middle of its 8; for two chunks what is made of them; blocks on the diagonal; what halves of a state exchange.
constexpr int MATRIX = C * K_ROW * 2, STAGE = 2 * MATRIX, V_STAGE = C * V_ROW * 2, V_AT = 2 * STAGE, TOTAL_AT = V_AT + 3 * V_STAGE;
constexpr int NEAR_AT = TOTAL_AT + C * G_ROW * 4, MADE_AT = NEAR_AT + C * G_ROW * 4, PART = C * A_ROW * 2;
// Made of a chunk, in two parts each: what tokens see of one another and what they undo; queries and keys that the state is read by, and keys that it
// is written by; then what is left of each key's row, and weights of tokens.
constexpr int UNDONE_AT = 2 * PART, READ_AT = 4 * PART, UNDO_AT = READ_AT + 2 * MATRIX, WRITE_AT = UNDO_AT + 2 * MATRIX;
constexpr int LEFT_AT = WRITE_AT + 2 * MATRIX, WEIGHT_AT = LEFT_AT + DK * 4, MADE = WEIGHT_AT + C * 4, DIAGONAL_AT = MADE_AT + 2 * MADE;
constexpr int EXCHANGED = TILES + TILES / 2, EXCHANGE_AT = DIAGONAL_AT + BLOCKS * 16 * 16 * 4;
static_assert(COLUMNS * 2 == 16 * WARPS && KEYS % 16 == 0 && DK <= WARPS * 32 && DV % COLUMNS == 0, "");
static_assert(EXCHANGE_AT + WARPS * EXCHANGED * 512 == {{ keys.shape[2] * 1288 + 52992 }}, "");

{% include "common/state_parts.cuh" %}
// A pair of 16-bit numbers, each times a power of two, in two parts.
__device__ __forceinline__ void split_scaled(u32 pair, float2 exponents, u32& high_part, u32& low_part) {
    split(low<bf16>(pair) * power(exponents.x), high<bf16>(pair) * power(exponents.y), high_part, low_part);
}
// c[16, 16] += x[16, 16] y[16, 16], both in two parts.
__device__ __forceinline__ void multiply(float (&c)[4], float (&d)[4], const Left& x, const u32 (&y)[4], const u32 (&y_low)[4]) {
    mma(c, x.high_part, y[0], y[1]);
    mma(d, x.high_part, y[2], y[3]);
    mma(c, x.low_part, y[0], y[1]);
    mma(d, x.low_part, y[2], y[3]);
    mma(c, x.high_part, y_low[0], y_low[1]);
    mma(d, x.high_part, y_low[2], y_low[3]);
}
// Of a chunk's decays, which take their place, logarithms up to each token; and queries and keys with them. A thread has a key's place of all tokens.
__device__ __forceinline__ void along_keys(u8* shared, u8* made, u8* stage, int key, float (&log)[C]) {
    // No decay is below 2^-30, not even zero: what f32 sums do not see does not matter, and sums of logarithms stay small, which is what makes them exact.
    // Of tokens up to which an odd number of decays are below zero, query and key change sign, as all that they are multiplied with does.
    u32 odd = 0;
#pragma unroll
    for (int t = 0; t < C; t++) {
        odd |= (log[t] < 0 ? 1u : 0u) << t;
        log[t] = fmaxf(log2f(fabsf(log[t])), -30.0f);
    }
#pragma unroll
    for (int d = 1; d < C; d *= 2) odd ^= odd << d;
    const float last_sign = odd >> (C - 1) ? -1.0f : 1.0f;
    float* const total = (float*)(shared + TOTAL_AT) + key;
    float* const near = (float*)(shared + NEAR_AT) + key;
#pragma unroll
    for (int t = 0; t < C; t += 8) {
        float since[8], sum = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) since[i] = sum += i == 0 ? 0.0f : fminf(fmaxf(log[t + i], -24.0f), 24.0f);
#pragma unroll
        for (int i = 0; i < 8; i++) near[(t + i) * G_ROW] = since[i] - since[3];
    }
#pragma unroll
    for (int t = 0; t < C; t++) {
        if (t > 0) log[t] += log[t - 1];
        total[t * G_ROW] = log[t];
    }
    const auto put = [&](int at, int t, float x) {
        bf16* const to = (bf16*)(made + at) + t * K_ROW + key;
        const bf16 rounded = from_f32<bf16>(x);
        to[0] = rounded;
        to[C * K_ROW] = from_f32<bf16>(x - to_f32(rounded));
    };
#pragma unroll
    for (int t = 0; t < C; t++) {
        bf16* const own = (bf16*)stage + t * K_ROW + key;
        if (odd >> t & 1) own[0].bits ^= 0x8000, own[C * K_ROW].bits ^= 0x8000;
        const float k = to_f32(own[0]) * SCALE, q = to_f32(own[C * K_ROW]), so_far = power(log[t]);
        put(READ_AT, t, q * so_far);
        put(UNDO_AT, t, k * so_far);
        put(WRITE_AT, t, k * last_sign * power(log[C - 1] - log[t]));
    }
    ((float*)(made + LEFT_AT))[key] = last_sign * power(log[C - 1]);
}
// As in `state_chunks.cuh`: what a token sees of what those up to it wrote, and what it undoes of what those before it did, negated; of the 8 tokens that both
// are in, of tokens in the 8 before its own, and of those in the 16 before its own.
__device__ __forceinline__ void among_tokens(const u8* shared, u8* made, float* diagonal, u32 stage) {
    const int lane = threadIdx.x % 32;
    const float* const weight = (const float*)(made + WEIGHT_AT);
    for (int n = threadIdx.x / 32 - WARPS; n < 2 * BLOCKS + 1; n += WARPS) {
        const bool within = n < BLOCKS, apart = n == BLOCKS;
        const int i = within ? n : apart ? 1 : n - BLOCKS - 1, j = apart ? 0 : i;
        const float* const logs = (const float*)(shared + (within ? NEAR_AT : TOTAL_AT));
        const float* const between = (const float*)(shared + TOTAL_AT) + (apart ? 15 : i * 16 + 7) * G_ROW;
        const auto exponents = [&](int row, int column) {
            float2 x = *(const float2*)(logs + row * G_ROW + column);
            if (!within) {
                const float2 y = *(const float2*)(between + column);
                x.x -= y.x, x.y -= y.y;
            }
            return x;
        };
        float seen[2][4] = {}, undone[2][4] = {};
#pragma unroll 1
        for (int k = 0; k < DK / 16; k++) {
            u32 of_keys[4], of_queries[4], y[4], y_low[4];
            load_matrices(y, matrix_at<false>(stage, K_ROW, j * 16, k * 16));
            load_matrices(of_keys, matrix_at<true>(stage, K_ROW, i * 16, k * 16));
            load_matrices(of_queries, matrix_at<true>(stage + MATRIX, K_ROW, i * 16, k * 16));
            Left key, query;
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const float2 x = exponents(i * 16 + lane / 4 + m % 2 * 8, k * 16 + lane % 4 * 2 + m / 2 * 8);
                split_scaled(of_keys[m], x, key.high_part[m], key.low_part[m]);
                split_scaled(of_queries[m], x, query.high_part[m], query.low_part[m]);
                const float2 z = exponents(j * 16 + lane / 4 + m / 2 * 8, k * 16 + lane % 4 * 2 + m % 2 * 8);
                split_scaled(y[m], make_float2(-z.x, -z.y), y[m], y_low[m]);
            }
            multiply(seen[0], seen[1], query, y, y_low);
            multiply(undone[0], undone[1], key, y, y_low);
        }
        // What is of no use here may be infinite.
#pragma unroll
        for (int part = 0; part < 4; part++) {                       // two neighbours of a row each
            const int tile = part / 2, e = part % 2 * 2;
            const bool earlier = tile == 0 && part % 2 == 1;         // columns in the 8 before those of the row
            if (!apart && earlier == within) continue;
            if (!apart && !within && !earlier) continue;
            const int row = i * 16 + lane / 4 + e * 4, column = j * 16 + tile * 8 + lane % 4 * 2;
            u8* const to = made + (row * A_ROW + column) * 2;
            const float by = -SCALE * SCALE * weight[row];
            split(column <= row ? seen[tile][e] * SCALE : 0.0f, column < row ? seen[tile][e + 1] * SCALE : 0.0f, *(u32*)to, *(u32*)(to + PART));
            const float x = column < row ? undone[tile][e] * by : 0.0f, z = column + 1 < row ? undone[tile][e + 1] * by : 0.0f;
            if (apart) {
                split(x, z, *(u32*)(to + UNDONE_AT), *(u32*)(to + UNDONE_AT + PART));
            } else {
                *(float2*)(diagonal + row * 16 + column - j * 16) = make_float2(x, z);
            }
        }
    }
}
extern "C" __global__ void __launch_bounds__({{ block }}, 1) {{ kernel }}({{ params }}) {
    extern __shared__ __align__(16) u8 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp % 2, seq = blockIdx.y;
    const int head = blockIdx.x / SLICES, v_first = blockIdx.x % SLICES * COLUMNS, own = warp % WARPS / 2 * 16;
    const u32 base = shared_address(shared);
    pdl_launch();
    pdl_wait();
    if (seq >= step->seqs) return;
    const i64 first = step->first[seq];
    const int count = step->first[seq + 1] - first, chunks = (count + C - 1) / C;

    if (warp >= WARPS) {
        const int thread = threadIdx.x - WARPS * 32;
        const auto fetch = [&](int n) {
            const u32 to = base + n % 2 * STAGE, v_to = base + V_AT + n % 3 * V_STAGE;
            constexpr int K_PIECES = DK / 8, V_PIECES = COLUMNS / 8;
            for (int i = thread; i < C * K_PIECES; i += WARPS * 32) {
                const int row = i / K_PIECES, piece = i % K_PIECES;
                const i64 at = ((first + n * C + row) * HEADS + head) * DK + piece * 8;
                const bool is_there = n * C + row < count;
                copy16_async(to + (row * K_ROW + piece * 8) * 2, {{ keys.name }} + at, is_there);
                copy16_async(to + MATRIX + (row * K_ROW + piece * 8) * 2, {{ queries.name }} + at, is_there);
            }
            for (int i = thread; i < C * V_PIECES; i += WARPS * 32) {
                const int row = i / V_PIECES, piece = i % V_PIECES;
                const i64 at = ((first + n * C + row) * HEADS + head) * DV + v_first + piece * 8;
                copy16_async(v_to + (row * V_ROW + piece * 8) * 2, {{ values.name }} + at, n * C + row < count);
            }
        };
        // Tokens beyond the last one write nothing, and nothing decays.
        float next[C], next_weight;
        const auto ask = [&](int n) {
#pragma unroll
            for (int t = 0; t < C; t++) {
                next[t] = 1;
                if (n * C + t < count && thread < DK) next[t] = to_f32({{ decays.name }}[((first + n * C + t) * HEADS + head) * DK + thread]);
            }
            next_weight = thread < C && n * C + thread < count ? to_f32({{ weights.name }}[(first + n * C + thread) * HEADS + head]) : 0.0f;
        };
        float* const diagonal = (float*)(shared + DIAGONAL_AT);
        fetch(0);
        copies_commit();
        ask(0);
        for (int n = 0; n < chunks; n++) {
            if (n >= 2) meet(FREE + n % 2, 2 * WARPS * 32);          // of the chunk before the last one, whose places these are
            if (n + 1 < chunks) fetch(n + 1);
            copies_commit();
            copies_wait<1>();
            meet(MAKERS, WARPS * 32);
            u8* const made = shared + MADE_AT + n % 2 * MADE;
            if (thread < C) ((float*)(made + WEIGHT_AT))[thread] = next_weight;
            if (thread < DK) along_keys(shared, made, shared + n % 2 * STAGE, thread, next);
            if (n + 1 < chunks) ask(n + 1);
            meet(MAKERS, WARPS * 32);
            among_tokens(shared, made, diagonal, base + n % 2 * STAGE);
            meet(MAKERS, WARPS * 32);
            invert_diagonal(made, diagonal);
            pass(READY + n % 2, 2 * WARPS * 32);
        }
        return;
    }

    // The state: a tile has 8 keys of 16 columns.
    const int* table = step->blocks + (i64)seq * step->block_stride;
    float s[KEYS / 8][4];
    const auto element = [&](int lane, int tile, int e) {
        const int key = half * KEYS + tile * 8 + lane % 4 * 2 + e % 2;
        const int column = v_first + own + lane / 4 + e / 2 * 8;
        return (u32)((head * DK + key) * DV + column);
    };
#pragma unroll
    for (int tile = 0; tile < KEYS / 8; tile++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[tile][e] = slot_read({{ memory }}, {{ memory }}_place, table, element(lane, tile, e));

    for (int n = 0; n < chunks; n++) {
        const u32 v_stage = base + V_AT + n % 3 * V_STAGE, made = base + MADE_AT + n % 2 * MADE;
        const u8* const of = shared + MADE_AT + n % 2 * MADE;
        const float* const weight = (const float*)(of + WEIGHT_AT);
        const float* const left = (const float*)(of + LEFT_AT) + half * KEYS;
        meet(READY + n % 2, 2 * WARPS * 32);

        // What queries, and keys that undo, see of the state as the chunk begins: of the keys that this warp has.
        float seen[TILES][4] = {}, reads[TILES][4] = {};
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            const Left x = left_of(s[2 * k], s[2 * k + 1]);
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) {
                u32 y[4], y_low[4];
                load_matrices(y, matrix_at<false>(made + READ_AT, K_ROW, b * 16, half * KEYS + k * 16));
                load_matrices(y_low, matrix_at<false>(made + READ_AT + MATRIX, K_ROW, b * 16, half * KEYS + k * 16));
                multiply(reads[2 * b], reads[2 * b + 1], x, y, y_low);
                load_matrices(y, matrix_at<false>(made + UNDO_AT, K_ROW, b * 16, half * KEYS + k * 16));
                load_matrices(y_low, matrix_at<false>(made + UNDO_AT + MATRIX, K_ROW, b * 16, half * KEYS + k * 16));
                multiply(seen[2 * b], seen[2 * b + 1], x, y, y_low);
            }
        }
        // Halves add up what keys see in both, and what queries read in the one that yields it: 16 tokens each.
        float out[2][4];
        float4* const given = (float4*)(shared + EXCHANGE_AT) + warp * EXCHANGED * 32 + lane;
        const float4* const taken = (const float4*)(shared + EXCHANGE_AT) + (warp ^ 1) * EXCHANGED * 32 + lane;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) given[tile * 32] = *(const float4*)seen[tile];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float (&a)[4] = reads[i], (&b)[4] = reads[2 + i];
            given[(TILES + i) * 32] = half ? make_float4(a[0], a[1], a[2], a[3]) : make_float4(b[0], b[1], b[2], b[3]);
#pragma unroll
            for (int e = 0; e < 4; e++) out[i][e] = half ? b[e] : a[e];
        }
        meet(HALF + warp / 2, 64);
        const auto add = [](float (&x)[4], float4 y) { x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w; };
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) add(seen[tile], taken[tile * 32]);
#pragma unroll
        for (int i = 0; i < 2; i++) add(out[i], taken[(TILES + i) * 32]);
        // What tokens write, 16 at a time, by forward substitution.
        Left written[BLOCKS];
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            u32 values[4], y[4], y_low[4];
            load_matrices_transposed(values, matrix_at<false>(v_stage, V_ROW, i * 16, own));
            float x[2][4];
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                const float2 w = pair_at(weight, 2 * i + tile);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const u32 pair = values[2 * tile + e / 2];
                    x[tile][e] = (e % 2 ? w.y : w.x) * ((e % 2 ? high<bf16>(pair) : low<bf16>(pair)) - seen[2 * i + tile][e]);
                }
            }
            Sums sums;
#pragma unroll
            for (int l = 0; l <= i; l++) {
                load_matrices(y, matrix_at<false>(made + UNDONE_AT, A_ROW, i * 16, l * 16));
                load_matrices(y_low, matrix_at<false>(made + UNDONE_AT + PART, A_ROW, i * 16, l * 16));
                if (l < i) sums.add(x[0], x[1], written[l], y, y_low);
            }
            if (i > 0) sums.close(x[0], x[1]);
            float delta[2][4] = {};
            Sums last;
            last.add(delta[0], delta[1], left_of(x[0], x[1]), y, y_low);
            last.close(delta[0], delta[1]);
            written[i] = left_of(delta[0], delta[1]);
        }
        // What tokens read.
        Sums sums;
#pragma unroll
        for (int l = 0; l < BLOCKS; l++) {
            if (l > half) break;
            u32 y[4], y_low[4];
            load_matrices(y, matrix_at<false>(made, A_ROW, half * 16, l * 16));
            load_matrices(y_low, matrix_at<false>(made + PART, A_ROW, half * 16, l * 16));
            sums.add(out[0], out[1], written[l], y, y_low);
        }
        sums.close(out[0], out[1]);
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const int token = n * C + half * 16 + tile * 8 + lane / 4;
            const float (&x)[4] = out[tile];
            bf16* const to = {{ result.name }} + ((first + token) * HEADS + head) * DV + v_first + own + lane % 4 * 2;
#pragma unroll
            for (int rows = 0; rows < 2; rows++) {
                const u32 y = transpose8x8(pack_pair(x[2 * rows] * READ_SCALE, x[2 * rows + 1] * READ_SCALE));
                if (token < count) *(u32*)(to + rows * 8) = y;
            }
        }
        // The state after the chunk.
#pragma unroll
        for (int tile = 0; tile < KEYS / 8; tile++) {
            const float2 by = pair_at(left, tile);
            s[tile][0] *= by.x, s[tile][1] *= by.y, s[tile][2] *= by.x, s[tile][3] *= by.y;
        }
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++) {
                u32 y[4], y_low[4];
                load_matrices_transposed(y, matrix_at<true>(made + WRITE_AT, K_ROW, i * 16, half * KEYS + k * 16));
                load_matrices_transposed(y_low, matrix_at<true>(made + WRITE_AT + MATRIX, K_ROW, i * 16, half * KEYS + k * 16));
                multiply(s[2 * k], s[2 * k + 1], written[i], y, y_low);
                mma(s[2 * k], written[i].low_part, y_low[0], y_low[1]);                // they stay
                mma(s[2 * k + 1], written[i].low_part, y_low[2], y_low[3]);
            }
        }
        if (n + 2 < chunks) pass(FREE + n % 2, 2 * WARPS * 32);
    }
    // Where elements go is worked out again: kept since they were read, it would take as many registers as they do.
    int again = lane;
    asm volatile("" : "+r"(again));
#pragma unroll
    for (int tile = 0; tile < KEYS / 8; tile++)
#pragma unroll
        for (int e = 0; e < 4; e++) slot_write({{ memory }}, {{ memory }}_place, table, element(again, tile, e), s[tile][e]);
}
