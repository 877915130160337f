// Right for every type and size: a warp takes a token's head. 32 rows at a time, each lane a row's
// dot product, then each lane its share of the columns of V.
extern "C" __global__ void __launch_bounds__({{ block }}) {{ kernel }}({{ params }}) {
    const i64 item = (i64)blockIdx.x * ({{ block }} / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, t = (int)(item / H), head = (int)(item % H), kv = head / GROUP;
    pdl_wait();
    pdl_launch();
    if (t >= step->T) return;
    const int b = step->seq[t], position = step->positions[t];
    const Q* qs = q + (i64)item * D;

    constexpr int PER_LANE = (DV + 31) / 32;
    float acc[PER_LANE] = {}, m = minus_infinity(), l = 0.0f;
    for (int base = first_seen(position); base <= position; base += 32) {
        const bool seen = base + lane <= position;
        const i64 row = seen ? cache_row(step, b, base + lane) : 0;
        float x = minus_infinity();
        if (seen) {
            float dot = 0.0f;
{% if k_state.quantised %}
            const u8* ks = k_state + CodedPlane<HKV, D>::codes(row, kv);
            for (int i = 0; i < D; i++) dot += to_f32(qs[i]) * value_of(ks[i], 1.0f);
            x = dot * *(const float*)(k_state + CodedPlane<HKV, D>::scale(row, kv)) * SCALE;
{% else %}
            const {{ k_state.type }}* ks = k_state + (row * HKV + kv) * D;
            for (int i = 0; i < D; i++) dot += to_f32(qs[i]) * to_f32(ks[i]);
            x = dot * SCALE;
{% endif %}
{% if cap is not none %}
            x = {{ cap | f32 }} * tanhf(x / {{ cap | f32 }});
{% endif %}
        }
        const float top = fmaxf(m, warp_max(x)), shrink = expf(m - top), p = expf(x - top);
        m = top;
        l = l * shrink + warp_sum(p);
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) acc[j] *= shrink;
        const int rows = min(32, position + 1 - base);
        for (int r = 0; r < rows; r++) {
            const float weight = __shfl_sync(0xffffffffu, p, r);
            const i64 from = __shfl_sync(0xffffffffu, row, r);
{% if v_state.quantised %}
            const u8* vs = v_state + CodedPlane<HKV, DV>::codes(from, kv);
            const float scale = *(const float*)(v_state + CodedPlane<HKV, DV>::scale(from, kv));
            const auto value = [&](int i) { return value_of(vs[i], scale); };
{% else %}
            const V* vs = v_state + (from * HKV + kv) * DV;
            const auto value = [&](int i) { return to_f32(vs[i]); };
{% endif %}
#pragma unroll
            for (int j = 0; j < PER_LANE; j++)
                if (lane + 32 * j < DV) acc[j] += weight * value(lane + 32 * j);
        }
    }
{% if sinks is not none %}
    const float sink = to_f32(sinks[head]), top = fmaxf(m, sink), shrink = expf(m - top);
    const float factor = shrink / (l * shrink + expf(sink - top));
{% else %}
    const float factor = 1.0f / l;
{% endif %}
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
        if (lane + 32 * j < DV) mixed[item * DV + lane + 32 * j] = from_f32<{{ mixed.type }}>(acc[j] * factor);
}
