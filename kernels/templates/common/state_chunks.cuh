// Recurrences over matrices in chunks of tokens. A token's value is written under its key into a head's state, which decays, and read by its query: with
// decays multiplied up to G_i within a chunk, and d_j what token j writes, token i reads G_i q_i S + the sum over j <= i of G_i / G_j (q_i k_j) d_j, and
// the state S becomes G S + the sum of G / G_j k_j d_j. A block has some columns of a head's values and all of its chunks. Four of its warps walk from
// chunk to chunk with the state; four others make what does not depend on it, for the chunk after: scalars of tokens and products of queries and keys.
// Blocks of the same head do the latter alike. A walking warp has 16 columns of the state, of half of the keys, in registers and transposed, so that sums
// of one product are the next one's left operand: columns of values are rows, and a chunk's tokens columns, 8 in a tile of four numbers.
//
// What includes it sets the values `queries`, `keys`, `values` and `result`, `memory`, the name of the state, `undoes`, whether a token first undoes
// what the state holds under its key (see `gated_delta_rule.cu.j2`), `value_is_outer`, whether values are the state's outer axis, and `skips`, a head's
// factor of values that are added to what is read; it defines `Token`, what a token brings beside these, of the pointers `token_from`, SCALE, a factor of
// keys, and READ_SCALE, of what is read.
constexpr int C = {{ p.chunk }}, COLUMNS = 32, WARPS = 4, STAGES = 3;
constexpr int DK = {{ keys.shape[2] }}, DV = {{ values.shape[2] }}, KEY_HEADS = {{ keys.shape[1] }}, HEADS = {{ values.shape[1] }};
constexpr bool UNDOES = {{ undoes }};
constexpr int BLOCKS = C / 16, TILES = C / 8, KEYS = DK / 2, SLICES = DV / COLUMNS, PER = C / 32;
constexpr int K_ROW = DK + 8, V_ROW = COLUMNS + 8, A_ROW = C + 8;   // padded: the 8 rows of a matrix load differ in banks
// Where things lie in shared memory, in bytes: stages of keys, queries and values; for two chunks what tokens see of one another and what they undo, in
// two parts each; blocks of the latter on the diagonal; what halves of a state exchange; scalars of tokens.
constexpr int Q_AT = C * K_ROW * 2, V_AT = 2 * Q_AT, STAGE = V_AT + C * V_ROW * 2, PART = C * A_ROW * 2;
constexpr int MADE_AT = STAGES * STAGE, UNDONE_AT = 2 * PART, MADE = UNDONE_AT + UNDOES * 2 * PART, DIAGONAL_AT = MADE_AT + 2 * MADE;
constexpr int EXCHANGED = UNDOES * TILES + TILES / 2;                // tiles, of a warp
constexpr int EXCHANGE_AT = DIAGONAL_AT + UNDOES * BLOCKS * 16 * 16 * 4, SCALARS_AT = EXCHANGE_AT + WARPS * EXCHANGED * 512;
static_assert(COLUMNS * 2 == 16 * WARPS && KEYS % 16 == 0 && DV % COLUMNS == 0, "");

// Of a chunk's tokens: decays multiplied up to each, logarithm and sign; the product; what is left of it until the chunk ends, scaled; the weight of
// what is written.
struct Scalars { float log[C], sign[C], gamma[C], tail[C], weight[C]; };
static_assert(SCALARS_AT + STAGES * sizeof(Scalars) == {{ p.chunk * (12 * keys.shape[2] + 8 * p.chunk + 588) + (p.chunk * (8 * p.chunk + 384) if undoes == "true" else 0) }}, "");

{% include "common/state_parts.cuh" %}
// Products of queries and, where tokens undo, of keys with keys, of 16 tokens by 16: what a token sees of what those up to it wrote, and what it undoes of
// what those before it did, negated.
__device__ __forceinline__ void among_tokens(u8* made, float* diagonal, u32 stage, const Scalars& of) {
    const int lane = threadIdx.x % 32;
    for (int n = threadIdx.x / 32 - WARPS; n < BLOCKS * (BLOCKS + 1) / 2; n += WARPS) {
        const int i = (n >= 1) + (n >= 3) + (n >= 6), j = n - i * (i + 1) / 2;
        float seen[2][4] = {}, undone[2][4] = {};
#pragma unroll
        for (int k = 0; k < DK / 16; k++) {
            u32 a[4], b[4];
            load_matrices(b, matrix_at<false>(stage, K_ROW, j * 16, k * 16));
            load_matrices(a, matrix_at<true>(stage + Q_AT, K_ROW, i * 16, k * 16));
            mma(seen[0], a, b[0], b[1]);
            mma(seen[1], a, b[2], b[3]);
            if constexpr (UNDOES) {
                load_matrices(a, matrix_at<true>(stage, K_ROW, i * 16, k * 16));
                mma(undone[0], a, b[0], b[1]);
                mma(undone[1], a, b[2], b[3]);
            }
        }
#pragma unroll
        for (int part = 0; part < 4; part++) {                       // two neighbours of a row each
            const int tile = part / 2, e = part % 2 * 2;
            const int row = i * 16 + lane / 4 + e * 4, column = j * 16 + tile * 8 + lane % 4 * 2;
            const float2 log = *(const float2*)(of.log + column), sign = *(const float2*)(of.sign + column);
            const float own_log = of.log[row], own_sign = of.sign[row] * SCALE;
            const float left = sign.x * own_sign * power(own_log - log.x), left_next = sign.y * own_sign * power(own_log - log.y);
            u8* const to = made + (row * A_ROW + column) * 2;
            split(column <= row ? seen[tile][e] * left : 0.0f, column < row ? seen[tile][e + 1] * left_next : 0.0f, *(u32*)to, *(u32*)(to + PART));
            if constexpr (UNDOES) {
                const float by = -SCALE * of.weight[row];
                const float x = undone[tile][e] * left * by, y = undone[tile][e + 1] * left_next * by;
                if (i == j) {
                    *(float2*)(diagonal + row * 16 + column - j * 16) = make_float2(column < row ? x : 0.0f, column + 1 < row ? y : 0.0f);
                } else {
                    split(x, y, *(u32*)(to + UNDONE_AT), *(u32*)(to + UNDONE_AT + PART));
                }
            }
        }
    }
}
extern "C" __global__ void __launch_bounds__({{ block }}, {{ p.resident }}) {{ kernel }}({{ params }}) {
    extern __shared__ __align__(16) u8 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp % 2, seq = blockIdx.y;
    const int head = blockIdx.x / SLICES, v_first = blockIdx.x % SLICES * COLUMNS, own = warp % WARPS / 2 * 16;
    const u32 base = shared_address(shared);
    pdl_launch();
    pdl_wait();
    if (seq >= step->seqs) return;
    const i64 first = step->first[seq];
    const int count = step->first[seq + 1] - first, chunks = (count + C - 1) / C;
    Scalars* const scalars = (Scalars*)(shared + SCALARS_AT);

    if (warp >= WARPS) {
        const int thread = threadIdx.x - WARPS * 32;
        const bool keeps = warp == 2 * WARPS - 1;                    // it has the fewest products
        const auto fetch = [&](int n) {
            const u32 to = base + n % STAGES * STAGE;
            constexpr int K_PIECES = DK / 8, V_PIECES = COLUMNS / 8;
            for (int i = thread; i < C * K_PIECES; i += WARPS * 32) {
                const int row = i / K_PIECES, piece = i % K_PIECES;
                const i64 at = ((first + n * C + row) * KEY_HEADS + head / (HEADS / KEY_HEADS)) * DK + piece * 8;
                const bool is_there = n * C + row < count;
                copy16_async(to + (row * K_ROW + piece * 8) * 2, {{ keys.name }} + at, is_there);
                copy16_async(to + Q_AT + (row * K_ROW + piece * 8) * 2, {{ queries.name }} + at, is_there);
            }
            for (int i = thread; i < C * V_PIECES; i += WARPS * 32) {
                const int row = i / V_PIECES, piece = i % V_PIECES;
                const i64 at = ((first + n * C + row) * HEADS + head) * DV + v_first + piece * 8;
                copy16_async(to + V_AT + (row * V_ROW + piece * 8) * 2, {{ values.name }} + at, n * C + row < count);
            }
        };
        // Tokens beyond the last one write nothing, and nothing decays.
        Token next[PER];
        const auto ask = [&](int n) {
#pragma unroll
            for (int i = 0; i < PER; i++) {
                const int token = n * C + i * 32 + lane;
                next[i] = Token();
                if (token < count) next[i].ask((first + token) * HEADS + head, head, {{ token_from }});
            }
        };
        const auto keep = [&](Scalars& to) {
            float log[PER], sign[PER];
            bool negative[PER];
#pragma unroll
            for (int i = 0; i < PER; i++) log[i] = next[i].log_decay(), negative[i] = next[i].is_negative();
            decays<PER>(log, negative, sign);
            const float last = __shfl_sync(0xffffffffu, log[PER - 1], 31), last_sign = __shfl_sync(0xffffffffu, sign[PER - 1], 31);
#pragma unroll
            for (int i = 0; i < PER; i++) {
                const int token = i * 32 + lane;
                to.log[token] = log[i];
                to.sign[token] = sign[i];
                to.gamma[token] = sign[i] * power(log[i]);
                to.tail[token] = SCALE * sign[i] * last_sign * power(last - log[i]);
                to.weight[token] = next[i].weight;
            }
        };
        float* const diagonal = (float*)(shared + DIAGONAL_AT);
        fetch(0);
        copies_commit();
        if (keeps) ask(0), keep(scalars[0]);
        for (int n = 0; n < chunks; n++) {
            if (n >= 2) meet(FREE + n % 2, 2 * WARPS * 32);          // of the chunk before the last one, whose places these are
            if (n + 1 < chunks) fetch(n + 1);
            copies_commit();
            if (keeps && n + 1 < chunks) ask(n + 1);
            copies_wait<1>();
            meet(MAKERS, WARPS * 32);
            u8* const made = shared + MADE_AT + n % 2 * MADE;
            among_tokens(made, diagonal, base + n % STAGES * STAGE, scalars[n % STAGES]);
            if (keeps && n + 1 < chunks) keep(scalars[(n + 1) % STAGES]);
            if constexpr (UNDOES) {
                meet(MAKERS, WARPS * 32);
                invert_diagonal(made, diagonal);
            }
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
        return (u32)({{ "(head * DV + column) * DK + key" if value_is_outer else "(head * DK + key) * DV + column" }});
    };
#pragma unroll
    for (int tile = 0; tile < KEYS / 8; tile++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[tile][e] = slot_read({{ memory }}, {{ memory }}_place, table, element(lane, tile, e));

    for (int n = 0; n < chunks; n++) {
        const u32 stage = base + n % STAGES * STAGE, made = base + MADE_AT + n % 2 * MADE;
        const Scalars& of = scalars[n % STAGES];
        meet(READY + n % 2, 2 * WARPS * 32);

        // What queries, and keys that undo, see of the state as the chunk begins: of the keys that this warp has.
        float seen[TILES][4] = {}, reads[TILES][4] = {};
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            const Left x = left_of(s[2 * k], s[2 * k + 1]);
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) {
                u32 y[4], z[4];
                load_matrices(y, matrix_at<false>(stage + Q_AT, K_ROW, b * 16, half * KEYS + k * 16));
                if constexpr (UNDOES) {
                    load_matrices(z, matrix_at<false>(stage, K_ROW, b * 16, half * KEYS + k * 16));
                    multiply(reads[2 * b], reads[2 * b + 1], seen[2 * b], seen[2 * b + 1], x, y, z);
                } else {
                    multiply(reads[2 * b], reads[2 * b + 1], x, y);
                }
            }
        }
        // Halves add up what keys see in both, and what queries read in the one that yields it.
        float out[OWN * 2][4];
        float4* const given = (float4*)(shared + EXCHANGE_AT) + warp * EXCHANGED * 32 + lane;
        const float4* const taken = (const float4*)(shared + EXCHANGE_AT) + (warp ^ 1) * EXCHANGED * 32 + lane;
#pragma unroll
        for (int tile = 0; tile < UNDOES * TILES; tile++) given[tile * 32] = *(const float4*)seen[tile];
#pragma unroll
        for (int i = 0; i < OWN * 2; i++) {
            const float (&a)[4] = reads[own_block(i / 2, 0) * 2 + i % 2], (&b)[4] = reads[own_block(i / 2, 1) * 2 + i % 2];
            given[(UNDOES * TILES + i) * 32] = half ? make_float4(a[0], a[1], a[2], a[3]) : make_float4(b[0], b[1], b[2], b[3]);
#pragma unroll
            for (int e = 0; e < 4; e++) out[i][e] = half ? b[e] : a[e];
        }
        meet(HALF + warp / 2, 64);
        const auto add = [](float (&x)[4], float4 y) { x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w; };
#pragma unroll
        for (int tile = 0; tile < UNDOES * TILES; tile++) add(seen[tile], taken[tile * 32]);
#pragma unroll
        for (int i = 0; i < OWN * 2; i++) add(out[i], taken[(UNDOES * TILES + i) * 32]);
        // What tokens write, 16 at a time: where they undo, by forward substitution.
        Left written[BLOCKS];
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            u32 values[4], y[4], y_low[4];
            load_matrices_transposed(values, matrix_at<false>(stage + V_AT, V_ROW, i * 16, own));
            float x[2][4];
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                const float2 w = pair_at(of.weight, 2 * i + tile), g = pair_at(of.gamma, 2 * i + tile);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const u32 pair = values[2 * tile + e / 2];
                    const float value = e % 2 ? high<bf16>(pair) : low<bf16>(pair);
                    x[tile][e] = (e % 2 ? w.y : w.x) * (UNDOES ? value - (e % 2 ? g.y : g.x) * SCALE * seen[2 * i + tile][e] : value);
                }
            }
            if constexpr (!UNDOES) {
                written[i] = left_of(x[0], x[1]);
                continue;
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
#pragma unroll
        for (int b = 0; b < OWN; b++) {
            const int i = own_block(b, half);
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                const float2 g = pair_at(of.gamma, 2 * i + tile);
                float (&x)[4] = out[2 * b + tile];
                x[0] *= g.x, x[1] *= g.y, x[2] *= g.x, x[3] *= g.y;
            }
            Sums sums;
#pragma unroll
            for (int l = 0; l < BLOCKS; l++) {
                if (l > i) break;
                u32 y[4], y_low[4];
                load_matrices(y, matrix_at<false>(made, A_ROW, i * 16, l * 16));
                load_matrices(y_low, matrix_at<false>(made + PART, A_ROW, i * 16, l * 16));
                sums.add(out[2 * b], out[2 * b + 1], written[l], y, y_low);
            }
            sums.close(out[2 * b], out[2 * b + 1]);
{%- if skips %}
            u32 values[4];
            load_matrices_transposed(values, matrix_at<false>(stage + V_AT, V_ROW, i * 16, own));
            const float skip_by = to_f32({{ skips }}[head]);
#pragma unroll
            for (int e = 0; e < 8; e++) out[2 * b + e / 4][e % 4] += skip_by * (e % 2 ? high<bf16>(values[e / 2]) : low<bf16>(values[e / 2]));
{%- endif %}
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                const int token = n * C + i * 16 + tile * 8 + lane / 4;
                const float (&x)[4] = out[2 * b + tile];
                bf16* const to = {{ result.name }} + ((first + token) * HEADS + head) * DV + v_first + own + lane % 4 * 2;
#pragma unroll
                for (int rows = 0; rows < 2; rows++) {
                    const u32 y = transpose8x8(pack_pair(x[2 * rows] * READ_SCALE, x[2 * rows + 1] * READ_SCALE));
                    if (token < count) *(u32*)(to + rows * 8) = y;
                }
            }
        }
        // The state after the chunk.
        const float left = of.gamma[C - 1];
#pragma unroll
        for (int tile = 0; tile < KEYS / 8; tile++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[tile][e] *= left;
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const Left x = scaled(written[i], pair_at(of.tail, 2 * i), pair_at(of.tail, 2 * i + 1));
            u32 y[4], z[4];
#pragma unroll
            for (int k = 0; k < KEYS / 16; k += 2) {
                load_matrices_transposed(y, matrix_at<true>(stage, K_ROW, i * 16, half * KEYS + k * 16));
                if (k + 1 < KEYS / 16) {
                    load_matrices_transposed(z, matrix_at<true>(stage, K_ROW, i * 16, half * KEYS + k * 16 + 16));
                    multiply(s[2 * k], s[2 * k + 1], s[2 * k + 2], s[2 * k + 3], x, y, z);
                } else {
                    multiply(s[2 * k], s[2 * k + 1], x, y);
                }
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
