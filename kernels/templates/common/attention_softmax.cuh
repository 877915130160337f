// One step of the online softmax for 16 query rows of a warp in the layout of mma's results: lane
// 4r + i has rows r and r + 8, columns 8n + 2i and 8n + 2i + 1. Scores in, probabilities (against the
// new maximum) out. `m` is of raw dot products when a factor is all that lies between them and
// logits, as that makes the exponent one multiply-add.
constexpr bool RAW = {{ "true" if cap is none else "false" }} && SCALE > 0.0f;
template <int N, int ACC>
__device__ __forceinline__ void softmax_step(float (&s)[N][4], float (&m)[2], float (&l)[2], float (&acc)[ACC][4],
                                             const int (&position)[2], bool edge, int base, int lane) {
    constexpr float FACTOR = RAW ? SCALE * LOG2E : 1.0f;
    if (!RAW) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) s[n][j] = logit2(s[n][j]);
    }
    if (edge) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int i = base + n * 8 + lane % 4 * 2 + j % 2;
                if (i > position[j / 2] || (WINDOW && position[j / 2] - i >= WINDOW)) s[n][j] = minus_infinity();
            }
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float top = m[j];
#pragma unroll
        for (int n = 0; n < N; n++) top = fmaxf(top, fmaxf(s[n][j * 2], s[n][j * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        // A row that has seen nothing yet (its window begins later) must not make NaNs.
        const float at = WINDOW && top == minus_infinity() ? 0.0f : top * FACTOR;
        const float shrink = ex2(m[j] * FACTOR - at);
        m[j] = top;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++) {
            s[n][j * 2] = ex2(s[n][j * 2] * FACTOR - at);
            s[n][j * 2 + 1] = ex2(s[n][j * 2 + 1] * FACTOR - at);
            sum += s[n][j * 2] + s[n][j * 2 + 1];
        }
        l[j] = l[j] * shrink + sum;
#pragma unroll
        for (int d = 0; d < ACC; d++) {
            acc[d][j * 2] *= shrink;
            acc[d][j * 2 + 1] *= shrink;
        }
    }
}
