// Recurrences over matrices in chunks of tokens. A token's value is written under its key into a head's state, which decays, and read by its query: with
// decays multiplied up to G_i within a chunk, and d_j what token j writes, token i reads G_i q_i S + the sum over j <= i of G_i / G_j (q_i k_j) d_j, and
// the state S becomes G S + the sum of G / G_j k_j d_j. A block has some columns of a head's values and all of its chunks; blocks of the same head do the
// same products of queries and keys, which are few beside those with the state. A warp has 16 columns of the state, of all keys or of half of them, in
// registers and transposed, so that sums of one product are the next one's left operand: columns of values are rows, and a chunk's tokens columns, 8 in a
// tile of four numbers.
//
// What includes it sets the values `queries`, `keys`, `values` and `result`, `memory`, the name of the state, `undoes`, whether a token first undoes
// what the state holds under its key (see `gated_delta_rule.cu.j2`), and `value_is_outer`, whether values are the state's outer axis; it defines `Token`, what a
// token brings beside these, SCALE, a factor of keys, and READ_SCALE, of what is read.
constexpr int C = {{ p.chunk }}, HALVES = {{ p.halves }}, COLUMNS = {{ p.columns }}, WARPS = 4;
constexpr int DK = {{ keys.shape[2] }}, DV = {{ values.shape[2] }}, KEY_HEADS = {{ keys.shape[1] }}, HEADS = {{ values.shape[1] }};
constexpr bool UNDOES = {{ undoes }};
constexpr int BLOCKS = C / 16, TILES = C / 8, KEYS = DK / HALVES, SLICES = DV / COLUMNS, PER = C / 32;
constexpr int K_ROW = DK + 8, V_ROW = COLUMNS + 8, A_ROW = C + 8;   // padded: the 8 rows of a matrix load differ in banks
// Where things lie in shared memory, in bytes: two stages of keys, queries and values; what tokens see of one another and what they undo, in two parts
// each; blocks of the latter on the diagonal; what halves of a state exchange; scalars of tokens.
constexpr int Q_AT = C * K_ROW * 2, V_AT = 2 * Q_AT, STAGE = V_AT + C * V_ROW * 2, PART = C * A_ROW * 2;
constexpr int SEEN_AT = 2 * STAGE, UNDONE_AT = SEEN_AT + 2 * PART, DIAGONAL_AT = UNDONE_AT + UNDOES * 2 * PART;
constexpr int EXCHANGED = UNDOES * TILES + TILES / 2;                // tiles, of a warp
constexpr int EXCHANGE_AT = DIAGONAL_AT + UNDOES * BLOCKS * 16 * 16 * 4, SCALARS_AT = EXCHANGE_AT + (HALVES - 1) * WARPS * EXCHANGED * 512;
static_assert(COLUMNS * HALVES == 16 * WARPS && KEYS % 16 == 0 && DV % COLUMNS == 0, "");

// Of a chunk's tokens: decays multiplied up to each, logarithm and sign; the product; what is left of it until the chunk ends, scaled; the weight of
// what is written.
struct Scalars { float log[C], sign[C], gamma[C], tail[C], weight[C]; };
static_assert(SCALARS_AT + 2 * sizeof(Scalars) == {{ p.chunk * (4 * (2 * keys.shape[2] + 24 + p.columns) + 4 * (p.chunk + 8) + 40 + (128 if p.halves == 2 else 0)) + (p.chunk * (4 * (p.chunk + 8) + 64 + (256 if p.halves == 2 else 0)) if undoes == "true" else 0) }}, "");

// Which 16 tokens a half of the state's keys yields the reads of, as the n-th: as many products each.
constexpr int OWN = BLOCKS / HALVES;
__device__ constexpr int own_block(int n, int half) { return HALVES == 1 ? n : n == 0 ? half : 3 - half; }
__device__ __forceinline__ float2 pair_at(const float* x, int tile) { return *(const float2*)(x + tile * 8 + threadIdx.x % 4 * 2); }

// Products of queries and, where tokens undo, of keys with keys, of 16 tokens by 16: what a token sees of what those up to it wrote, and what it undoes of
// what those before it did, negated.
__device__ __forceinline__ void among_tokens(u8* shared, u32 stage, const Scalars& of) {
    constexpr int PAIRS = BLOCKS * (BLOCKS + 1) / 2;
    const int lane = threadIdx.x % 32;
    for (int task = threadIdx.x / 32; task < (1 + UNDOES) * PAIRS; task += WARPS) {
        const bool reads = !UNDOES || task >= PAIRS;
        const int n = task % PAIRS, i = (n >= 1) + (n >= 3) + (n >= 6), j = n - i * (i + 1) / 2;
        float sums[2][2][4] = {};
#pragma unroll
        for (int k = 0; k < DK / 16; k++) {
            u32 a[4], b[4];
            load_matrices(a, matrix_at<true>(stage + (reads ? Q_AT : 0), K_ROW, i * 16, k * 16));
            load_matrices(b, matrix_at<false>(stage, K_ROW, j * 16, k * 16));
            mma(sums[k % 2][0], a, b[0], b[1]);
            mma(sums[k % 2][1], a, b[2], b[3]);
        }
#pragma unroll
        for (int half = 0; half < 4; half++) {                       // two neighbours of a row each
            const int tile = half / 2, part = half % 2 * 2;
            const int row = i * 16 + lane / 4 + part * 4, column = j * 16 + tile * 8 + lane % 4 * 2;
            float x[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float sum = sums[0][tile][part + e] + sums[1][tile][part + e];
                const float left = of.sign[row] * of.sign[column + e] * exp2f(of.log[row] - of.log[column + e]);
                const float factor = reads ? SCALE : SCALE * SCALE * of.weight[row];
                x[e] = column + e < row || (reads && column + e == row) ? sum * left * factor : 0.0f;
            }
            if (!reads && i == j) {
                *(float2*)(shared + DIAGONAL_AT + (row * 16 + column - j * 16) * 4) = make_float2(x[0], x[1]);
                continue;
            }
            u8* const to = shared + (reads ? SEEN_AT : UNDONE_AT) + (row * A_ROW + column) * 2;
            split(reads ? x[0] : -x[0], reads ? x[1] : -x[1], *(u32*)to, *(u32*)(to + PART));
        }
    }
}
// The inverse of a block on the diagonal, of I + A, takes its place: a column a lane.
__device__ __forceinline__ void invert_diagonal(u8* shared) {
    const int block = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % 16;
    if (block >= BLOCKS) return;
    const float* const a = (const float*)(shared + DIAGONAL_AT) + block * 256;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float sums[4] = {};
#pragma unroll
        for (int l = 0; l < i; l++) sums[l % 4] += a[i * 16 + l] * x[l];
        x[i] = (i == column ? 1.0f : 0.0f) - ((sums[0] + sums[1]) + (sums[2] + sums[3]));
        const bf16 rounded = from_f32<bf16>(x[i]);
        bf16* const to = (bf16*)(shared + UNDONE_AT + lane / 16 * PART) + (block * 16 + i) * A_ROW + block * 16 + column;
        *to = lane < 16 ? rounded : from_f32<bf16>(x[i] - to_f32(rounded));
    }
}
extern "C" __global__ void __launch_bounds__({{ block }}, 1) {{ kernel }}({{ params }}) {
    extern __shared__ __align__(16) u8 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp % HALVES, seq = blockIdx.y;
    const int head = blockIdx.x / SLICES, v_first = blockIdx.x % SLICES * COLUMNS, own = warp / HALVES * 16;
    const u32 base = shared_address(shared);
    pdl_launch();
    pdl_wait();
    if (seq >= step->seqs) return;
    const int* table = step->blocks + (i64)seq * step->block_stride;
    const i64 first = step->first[seq];
    const int count = step->first[seq + 1] - first;

    const auto fetch = [&](int begin, int stage) {
        const u32 to = base + stage * STAGE;
        constexpr int K_PIECES = DK / 8, V_PIECES = COLUMNS / 8;
        for (int i = threadIdx.x; i < C * K_PIECES; i += WARPS * 32) {
            const int row = i / K_PIECES, piece = i % K_PIECES;
            const i64 at = ((first + begin + row) * KEY_HEADS + head / (HEADS / KEY_HEADS)) * DK + piece * 8;
            const bool is_there = begin + row < count;
            copy16_async(to + (row * K_ROW + piece * 8) * 2, {{ keys.name }} + at, is_there);
            copy16_async(to + Q_AT + (row * K_ROW + piece * 8) * 2, {{ queries.name }} + at, is_there);
        }
        for (int i = threadIdx.x; i < C * V_PIECES; i += WARPS * 32) {
            const int row = i / V_PIECES, piece = i % V_PIECES;
            const i64 at = ((first + begin + row) * HEADS + head) * DV + v_first + piece * 8;
            copy16_async(to + V_AT + (row * V_ROW + piece * 8) * 2, {{ values.name }} + at, begin + row < count);
        }
        copies_commit();
    };
    // Tokens beyond the last one write nothing, and nothing decays.
    Token next[PER];
    const auto ask = [&](int begin) {
#pragma unroll
        for (int n = 0; n < PER; n++) {
            const int token = begin + n * 32 + lane;
            next[n] = Token();
            if (token < count) next[n].ask((first + token) * HEADS + head, head, {{ token_from }});
        }
    };
    const auto keep = [&](Scalars& to) {
        float log[PER], sign[PER];
        bool negative[PER];
#pragma unroll
        for (int n = 0; n < PER; n++) log[n] = next[n].log_decay(), negative[n] = next[n].is_negative();
        decays<PER>(log, negative, sign);
        const float last = __shfl_sync(0xffffffffu, log[PER - 1], 31), last_sign = __shfl_sync(0xffffffffu, sign[PER - 1], 31);
#pragma unroll
        for (int n = 0; n < PER; n++) {
            const int token = n * 32 + lane;
            to.log[token] = log[n];
            to.sign[token] = sign[n];
            to.gamma[token] = sign[n] * exp2f(log[n]);
            to.tail[token] = SCALE * sign[n] * last_sign * exp2f(last - log[n]);
            to.weight[token] = next[n].weight;
        }
    };
    fetch(0, 0);
    if (warp == 0) ask(0);

    // The state: a tile has 8 keys of 16 columns.
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

    for (int begin = 0, turn = 0; begin < count; begin += C, turn ^= 1) {
        const u32 stage = base + turn * STAGE;
        Scalars& of = ((Scalars*)(shared + SCALARS_AT))[turn];
        if (warp == 0) keep(of);
        copies_wait<0>();
        __syncthreads();
        if (begin + C < count) {
            fetch(begin + C, turn ^ 1);
            if (warp == 0) ask(begin + C);
        }
        among_tokens(shared, stage, of);
        if constexpr (UNDOES) {
            __syncthreads();
            invert_diagonal(shared);
        }
        // What queries, and keys that undo, see of the state as the chunk begins: of the keys that this warp has.
        float seen[TILES][4] = {}, reads[TILES][4] = {};
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            const Left x = left_of(s[2 * n], s[2 * n + 1]);
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) {
                u32 y[4];
                if constexpr (UNDOES) {
                    load_matrices(y, matrix_at<false>(stage, K_ROW, b * 16, half * KEYS + n * 16));
                    multiply(seen[2 * b], seen[2 * b + 1], x, y);
                }
                load_matrices(y, matrix_at<false>(stage + Q_AT, K_ROW, b * 16, half * KEYS + n * 16));
                multiply(reads[2 * b], reads[2 * b + 1], x, y);
            }
        }
        // Halves add up what keys see in both, and what queries read in the one that yields it.
        float out[OWN * 2][4];
        const auto sum = [](float (&to)[4], const float (&x)[4], float4 y) { to[0] = x[0] + y.x, to[1] = x[1] + y.y, to[2] = x[2] + y.z, to[3] = x[3] + y.w; };
        if constexpr (HALVES == 2) {
            float4* const given = (float4*)(shared + EXCHANGE_AT) + warp * EXCHANGED * 32 + lane;
#pragma unroll
            for (int tile = 0; tile < UNDOES * TILES; tile++) given[tile * 32] = *(const float4*)seen[tile];
#pragma unroll
            for (int n = 0; n < OWN * 2; n++) {
                const float (&a)[4] = reads[own_block(n / 2, 0) * 2 + n % 2], (&b)[4] = reads[own_block(n / 2, 1) * 2 + n % 2];
                given[(UNDOES * TILES + n) * 32] = half ? make_float4(a[0], a[1], a[2], a[3]) : make_float4(b[0], b[1], b[2], b[3]);
#pragma unroll
                for (int e = 0; e < 4; e++) out[n][e] = half ? b[e] : a[e];
            }
        }
        __syncthreads();
        if constexpr (HALVES == 2) {
            const float4* const taken = (const float4*)(shared + EXCHANGE_AT) + (warp ^ 1) * EXCHANGED * 32 + lane;
#pragma unroll
            for (int tile = 0; tile < UNDOES * TILES; tile++) sum(seen[tile], seen[tile], taken[tile * 32]);
#pragma unroll
            for (int n = 0; n < OWN * 2; n++) sum(out[n], out[n], taken[(UNDOES * TILES + n) * 32]);
        } else {
#pragma unroll
            for (int n = 0; n < OWN * 2; n++) sum(out[n], reads[n], float4{});
        }
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
#pragma unroll
            for (int l = 0; l <= i; l++) {
                load_matrices(y, matrix_at<false>(base + UNDONE_AT, A_ROW, i * 16, l * 16));
                load_matrices(y_low, matrix_at<false>(base + UNDONE_AT + PART, A_ROW, i * 16, l * 16));
                if (l < i) multiply(x[0], x[1], written[l], y, y_low);
            }
            float delta[2][4] = {};
            multiply(delta[0], delta[1], left_of(x[0], x[1]), y, y_low);
            written[i] = left_of(delta[0], delta[1]);
        }
        // What tokens read.
#pragma unroll
        for (int n = 0; n < OWN; n++) {
            const int i = own_block(n, half);
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                const float2 g = pair_at(of.gamma, 2 * i + tile);
                float (&x)[4] = out[2 * n + tile];
                x[0] *= g.x, x[1] *= g.y, x[2] *= g.x, x[3] *= g.y;
            }
#pragma unroll
            for (int l = 0; l < BLOCKS; l++) {
                if (l > i) break;
                u32 y[4], y_low[4];
                load_matrices(y, matrix_at<false>(base + SEEN_AT, A_ROW, i * 16, l * 16));
                load_matrices(y_low, matrix_at<false>(base + SEEN_AT + PART, A_ROW, i * 16, l * 16));
                multiply(out[2 * n], out[2 * n + 1], written[l], y, y_low);
            }
{%- if skips %}
            u32 values[4];
            load_matrices_transposed(values, matrix_at<false>(stage + V_AT, V_ROW, i * 16, own));
            const float skip_by = to_f32({{ skips }}[head]);
#pragma unroll
            for (int e = 0; e < 8; e++) out[2 * n + e / 4][e % 4] += skip_by * (e % 2 ? high<bf16>(values[e / 2]) : low<bf16>(values[e / 2]));
{%- endif %}
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                const int token = begin + i * 16 + tile * 8 + lane / 4;
                const float (&x)[4] = out[2 * n + tile];
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
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                u32 y[4];
                load_matrices_transposed(y, matrix_at<true>(stage, K_ROW, i * 16, half * KEYS + n * 16));
                multiply(s[2 * n], s[2 * n + 1], x, y);
            }
        }
    }
    // Where elements go is worked out again: kept since they were read, it would take as many registers as they do.
    int again = lane;
    asm volatile("" : "+r"(again));
#pragma unroll
    for (int tile = 0; tile < KEYS / 8; tile++)
#pragma unroll
        for (int e = 0; e < 4; e++) slot_write({{ memory }}, {{ memory }}_place, table, element(again, tile, e), s[tile][e]);
}
