// Attention to latents by `mma.sync`, from sm_80 on. All warps share a tile of the context: each takes columns of its scores, then
// rows of its softmax, then columns of the sums, in which a warp has R / WARPS columns of all rows. In between, scores and
// probabilities pass through shared memory. STAGES tiles are in flight or in use.
constexpr int STAGES = {{ p.stages }}, RT = ROWS / 16, ROW = D + 8;      // padded: the 8 rows of a matrix load differ in banks
constexpr int NT = COLS / 8, TEAMS = WARPS / NT;                         // teams of warps that share rows of queries
constexpr int EACH = ROWS / WARPS, CW = R / WARPS;                       // rows of a softmax, columns of sums, of a warp
constexpr int S_ROW = COLS + 4, P_ROW = COLS + 8;
constexpr int BUFFERS = ROWS * ROW * 2, TILE_BYTES = COLS * ROW * 2;     // where things lie in shared memory, in bytes
constexpr int SCORES = BUFFERS + STAGES * TILE_BYTES, PROBS = SCORES + ROWS * S_ROW * 4;
constexpr int ENDS = PROBS + ROWS * P_ROW * 2, SHRINKS = ENDS + ROWS * 8;
static_assert(WARPS % NT == 0 && ROWS % WARPS == 0 && CW % 16 == 0 && D % 32 == 0 && STAGES >= 2 && COLS % 32 == 0, "");

struct Attend {
    float acc[RT][CW / 8][4];
    u8* const shared;
    const u32 base;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    __device__ __forceinline__ explicit Attend(u8* shared) : shared(shared), base(shared_address(shared)) {}

    // Maximum (base 2) and sum of a row's softmax, once `run` is done.
    __device__ __forceinline__ float2 end(int r) const { return ((const float2*)(shared + ENDS))[r]; }
    // Calls f(row, column, x, y) for the sums that this thread has, of two columns side by side.
    template <class F> __device__ __forceinline__ void each(F f) const {
#pragma unroll
        for (int t = 0; t < RT; t++)
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int d = 0; d < CW / 8; d++)
                    f(t * 16 + lane / 4 + j * 8, warp * CW + d * 8 + lane % 4 * 2, acc[t][d][j * 2], acc[t][d][j * 2 + 1]);
    }
    // Dot products of the queries with eight rows of the tile at `buffer`.
    __device__ __forceinline__ void scores(u32 buffer) {
        const int n = warp % NT;
        const u32 k_at = buffer + ((n * 8 + lane % 8) * ROW + lane / 8 * 8) * 2;
#pragma unroll
        for (int t = warp / NT; t < RT; t += TEAMS) {
            const u32 q_at = base + ((t * 16 + lane % 16) * ROW + lane / 16 * 8) * 2;
            float s[2][4] = {};                      // two sums: half the chain of dependent products
#pragma unroll 6
            for (int i = 0; i < D / 32; i++) {
                u32 a[2][4], b[4];
                load_matrices(b, k_at + i * 64);
                load_matrices(a[0], q_at + i * 64);
                load_matrices(a[1], q_at + i * 64 + 32);
                mma(s[0], a[0], b[0], b[1]);
                mma(s[1], a[1], b[2], b[3]);
            }
            float* const to = (float*)(shared + SCORES) + (t * 16 + lane / 4) * S_ROW + n * 8 + lane % 4 * 2;
            *(float2*)to = make_float2(s[0][0] + s[1][0], s[0][1] + s[1][1]);
            *(float2*)(to + 8 * S_ROW) = make_float2(s[0][2] + s[1][2], s[0][3] + s[1][3]);
        }
    }
    // The warp's rows: probabilities against the new maximum, and what older sums shrink by.
    __device__ __forceinline__ void softmax(const Work& work, int tile, float (&m)[EACH], float (&l)[EACH]) {
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int r = k * WARPS + warp, position = work.position + r / GROUP;
            const float* const from = (const float*)(shared + SCORES) + r * S_ROW;
            float x[COLS / 32], top = m[k];
#pragma unroll
            for (int c = 0; c < COLS / 32; c++) {
                const bool seen = is_seen(position, tile * COLS + c * 32 + lane);
                x[c] = seen ? logit2(from[c * 32 + lane]) : minus_infinity();
                top = fmaxf(top, x[c]);
            }
            top = warp_max(top);
            // A row that has seen nothing yet (its window begins later) must not make NaNs.
            const float at = top == minus_infinity() ? 0.0f : top, shrink = ex2(m[k] - at);
            float sum = 0.0f;
#pragma unroll
            for (int c = 0; c < COLS / 32; c++) {
                const float weight = ex2(x[c] - at);
                sum += weight;
                ((Q*)(shared + PROBS))[r * P_ROW + c * 32 + lane] = from_f32<Q>(weight);
            }
            m[k] = top;
            l[k] = l[k] * shrink + warp_sum(sum);
            if (lane == 0) ((float*)(shared + SHRINKS))[r] = shrink;
        }
    }
    __device__ __forceinline__ void values(u32 buffer) {
        const float* const shrinks = (const float*)(shared + SHRINKS);
#pragma unroll
        for (int t = 0; t < RT; t++) {
            const float upper = shrinks[t * 16 + lane / 4], lower = shrinks[t * 16 + lane / 4 + 8];
#pragma unroll
            for (int d = 0; d < CW / 8; d++) {
                acc[t][d][0] *= upper, acc[t][d][1] *= upper;
                acc[t][d][2] *= lower, acc[t][d][3] *= lower;
            }
        }
        const u32 p_at = base + PROBS + ((lane % 16) * P_ROW + lane / 16 * 8) * 2;
        const u32 v_at = buffer + ((lane % 16) * ROW + warp * CW + lane / 16 * 8) * 2;
#pragma unroll
        for (int i = 0; i < COLS / 16; i++) {
            u32 a[RT][4];
#pragma unroll
            for (int t = 0; t < RT; t++) load_matrices(a[t], p_at + (t * 16 * P_ROW + i * 16) * 2);
#pragma unroll
            for (int d = 0; d < CW / 16; d++) {
                u32 b[4];
                load_matrices_transposed(b, v_at + (i * 16 * ROW + d * 16) * 2);
#pragma unroll
                for (int t = 0; t < RT; t++) {
                    mma(acc[t][d * 2], a[t], b[0], b[1]);
                    mma(acc[t][d * 2 + 1], a[t], b[2], b[3]);
                }
            }
        }
    }
    __device__ __forceinline__ void run(const Step* step, const Work& work, const Q* q_latent, const Q* q_rope, const V* latents, const V* keys) {
        const auto copy = [&](int tile, int slot, int block) {
            const u32 to = base + BUFFERS + slot * TILE_BYTES;
            if (tile < work.end) copy_rows(work, latents, keys, tile, block, [&](int r, int c) { return to + (r * ROW + c * 8) * 2; });
            copies_commit();
        };
        copy_queries(work, q_latent, q_rope, [&](int r, int c) { return base + (r * ROW + c * 8) * 2; });
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) copy(work.tile + s, s, block_of(step, work, work.tile + s));
        int block = block_of(step, work, work.tile + STAGES - 1);
        float m[EACH], l[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++) m[k] = minus_infinity(), l[k] = 0.0f;
#pragma unroll
        for (int t = 0; t < RT; t++)
#pragma unroll
            for (int d = 0; d < CW / 8; d++)
#pragma unroll
                for (int j = 0; j < 4; j++) acc[t][d][j] = 0.0f;
        int slot = 0, next = STAGES - 1;
#pragma unroll 1
        for (int tile = work.tile; tile < work.end; tile++) {
            copies_wait<STAGES - 2>();
            __syncthreads();                         // it has landed, and all are done with the one before
            copy(tile + STAGES - 1, next, block);
            block = block_of(step, work, tile + STAGES);
            scores(base + BUFFERS + slot * TILE_BYTES);
            __syncthreads();
            softmax(work, tile, m, l);
            __syncthreads();
            values(base + BUFFERS + slot * TILE_BYTES);
            if (++slot == STAGES) slot = 0;
            if (++next == STAGES) next = 0;
        }
        copies_wait<0>();
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (lane == 0) ((float2*)(shared + ENDS))[k * WARPS + warp] = make_float2(m[k], l[k]);
        __syncthreads();
    }
};
