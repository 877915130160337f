{# The choice of the op `route`, of attributes by its names; `choice_bias`, `weights` and `ids` are the template's. #}
{% include "common/topk.cuh" %}
constexpr int EXPERTS = {{ experts }}, CHOSEN = {{ k }}, GROUPS = {{ groups }};
// The chosen experts of token t and their weights, by a warp, of its logits in shared memory, which become scores; keys has
// EXPERTS + GROUPS values there. A lane has every 32nd of the chosen.
__device__ __forceinline__ void route_token(i64 t, float* scores, u32* keys{{ ", const " ~ choice_bias.type ~ "* choice_bias" if choice_bias }}, {{ weights.type }}* weights, u32* ids) {
    constexpr int OWN = (CHOSEN + 31) / 32;
    const int lane = threadIdx.x % 32;
{% if softmax %}
    float highest = __int_as_float(0xff800000), all = 0.0f;
    for (int e = lane; e < EXPERTS; e += 32) highest = fmaxf(highest, scores[e]);
    highest = warp_max(highest);
    for (int e = lane; e < EXPERTS; e += 32) all += scores[e] = expf(scores[e] - highest);
    all = warp_sum(all);
    for (int e = lane; e < EXPERTS; e += 32) scores[e] /= all;
{% endif %}
{% if sigmoid %}
    for (int e = lane; e < EXPERTS; e += 32) scores[e] = 1.0f / (1.0f + expf(-scores[e]));
{% endif %}
    __syncwarp();
    float chosen[OWN] = {};
    warp_topk<EXPERTS, CHOSEN, GROUPS, {{ keep }}>(keys,
        [&](int e) { return scores[e]{{ " + to_f32(choice_bias[e])" if choice_bias }}; },
        [&](int j, int e) {
            if (lane != j % 32) return;
            chosen[j / 32] = scores[e];
            ids[t * CHOSEN + j] = e;
        });
    const auto each = [&](auto f) {
#pragma unroll
        for (int i = 0; i < OWN; i++)
            if (lane + i * 32 < CHOSEN) f(chosen[i], lane + i * 32);
    };
{% if chosen %}
    float best = __int_as_float(0xff800000), sum = 0.0f;
    each([&](float& v, int) { best = fmaxf(best, v); });
    best = warp_max(best);
    each([&](float& v, int) { sum += v = expf(v - best); });
    sum = warp_sum(sum);
    each([&](float& v, int) { v /= sum; });
{% endif %}
{% if share is not none %}
    float total = 0.0f;
    each([&](float& v, int) { total += v; });
    total = warp_sum(total);
    each([&](float& v, int) { v = {{ share(["v", "total"]) }}; });
{% endif %}
    each([&](float& v, int j) { weights[t * CHOSEN + j] = from_f32<{{ weights.type }}>(v{{ " * " ~ (factor | f32) if factor is not none }}); });
}
