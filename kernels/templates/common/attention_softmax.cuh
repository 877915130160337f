// One step of the online softmax for 16 query rows of a warp in the layout of mma's results: lane
// 4r + i has rows r and r + 8, columns 8n + 2i and 8n + 2i + 1. Scores in, probabilities (against the
// new maximum) out, and what older sums must shrink by. `m` is of raw dot products when a factor is all that lies between them and
// logits, as that makes the exponent one multiply-add.
constexpr bool RAW = {{ "true" if cap is none else "false" }} && SCALE > 0.0f;
constexpr float LOGIT = RAW ? SCALE * LOG2E : 1.0f;      // `m` to a logit in base 2
template <int N>
__device__ __forceinline__ void softmax_step(float (&s)[N][4], float (&m)[2], float (&l)[2], float (&shrink)[2],
                                             const int (&position)[2], bool edge, int base, int lane) {
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
        const float at = WINDOW && top == minus_infinity() ? 0.0f : __fmul_rn(top, LOGIT);
        // Rounded as `at` is, so that it is 1 where the maximum stays: a tile of hidden columns changes nothing.
        shrink[j] = ex2(__fmul_rn(m[j], LOGIT) - at);
        m[j] = top;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++) {
            s[n][j * 2] = ex2(s[n][j * 2] * LOGIT - at);
            s[n][j * 2 + 1] = ex2(s[n][j * 2 + 1] * LOGIT - at);
            sum += s[n][j * 2] + s[n][j * 2 + 1];
        }
        l[j] = l[j] * shrink[j] + sum;
    }
}
// What was summed against the old maximum.
template <int N> __device__ __forceinline__ void rescale(float (&acc)[N][4], const float (&shrink)[2]) {
#pragma unroll
    for (int d = 0; d < N; d++)
#pragma unroll
        for (int j = 0; j < 4; j++) acc[d][j] *= shrink[j / 2];
}
// Probabilities as the left operand of mma.
template <int N> __device__ __forceinline__ void to_operand(u32 (&p)[N / 2][4], const float (&s)[N][4]) {
#pragma unroll
    for (int n = 0; n < N / 2; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) p[n][j] = pack_pair(s[n * 2 + j / 2][j % 2 * 2], s[n * 2 + j / 2][j % 2 * 2 + 1]);
}
