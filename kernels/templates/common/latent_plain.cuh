// Attention to latents, right for every type and size: a warp takes a token's head. 32 rows at a time, each lane a row's dot
// product, then each lane its share of the columns.
constexpr int H = {{ q_latent.shape[1] }}, R = {{ latents.dim }}, P = {{ keys.dim }};
{% set cap = none %}{% set sinks = none %}
{% include "common/attention_math.cuh" %}
extern "C" __global__ void __launch_bounds__({{ block }}) {{ kernel }}({{ params }}) {
    const i64 item = (i64)blockIdx.x * ({{ block }} / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, t = (int)(item / H);
    pdl_wait();
    pdl_launch();
    if (t >= step->T) return;
    const int b = step->seq[t], position = step->positions[t];
    const auto* const qs = q_latent + item * R;
    const auto* const turned = q_rope + item * P;
    constexpr int PER_LANE = (R + 31) / 32;
    float acc[PER_LANE] = {}, m = minus_infinity(), l = 0.0f;
    for (int base = first_seen(position); base <= position; base += 32) {
        const bool seen = base + lane <= position;
        const i64 row = seen ? cache_row(step, b, base + lane) : 0;
        float x = minus_infinity();
        if (seen) {
            float dot = 0.0f;
            for (int i = 0; i < R; i++) dot += to_f32(qs[i]) * to_f32(latents[row * R + i]);
            for (int i = 0; i < P; i++) dot += to_f32(turned[i]) * to_f32(keys[row * P + i]);
            x = dot * SCALE;
        }
        const float top = fmaxf(m, warp_max(x)), shrink = expf(m - top), weight = expf(x - top);
        m = top;
        l = l * shrink + warp_sum(weight);
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) acc[j] *= shrink;
        const int rows = min(32, position + 1 - base);
        for (int r = 0; r < rows; r++) {
            const float by = __shfl_sync(0xffffffffu, weight, r);
            const auto* const values = latents + __shfl_sync(0xffffffffu, row, r) * R;
#pragma unroll
            for (int j = 0; j < PER_LANE; j++)
                if (lane + 32 * j < R) acc[j] += by * to_f32(values[lane + 32 * j]);
        }
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
        if (lane + 32 * j < R) mixed[item * R + lane + 32 * j] = from_f32<{{ mixed.type }}>(acc[j] / l);
}
