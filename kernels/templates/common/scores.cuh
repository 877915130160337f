// Attention's dot products of q [T, H, D] and k [S, G, D] into a ragged [H, T, S]: a block takes a
// token's head, a warp a key. finish(dot, own, i) makes the score of context row i.
template <int H, int G, int D, class Q, class K, class Y, class F>
__device__ __forceinline__ void attention_scores(const Step* step, const Q* q, const K* k, Y* y, F finish) {
    const int lane = threadIdx.x % 32;
    for (i64 unit = blockIdx.x; unit < (i64)step->T * H; unit += gridDim.x) {
        const int t = (int)(unit / H), h = (int)(unit % H), b = step->seq[t];
        float query[(D + 31) / 32];
#pragma unroll
        for (int d = 0; d < D; d += 32) query[d / 32] = d + lane < D ? to_f32(q[unit * D + d + lane]) : 0.0f;
        const i64 start = h * step->pairs + step->pair_start[t];
        for (int i = threadIdx.x / 32; i < step->context[b]; i += blockDim.x / 32) {
            const K* key = k + ((i64)(step->context_start[b] + i) * G + h / (H / G)) * D;
            float dot = 0.0f;
#pragma unroll
            for (int d = 0; d < D; d += 32)
                if (d + lane < D) dot += query[d / 32] * to_f32(key[d + lane]);
            dot = warp_sum(dot);
            if (lane == 0) y[start + i] = from_f32<Y>(finish(dot, step->positions[t], i));
        }
    }
}
