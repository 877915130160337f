// What attention does to scores: its window, logits in base 2, the sink. Needs the attributes scale, cap and window, and sinks.
constexpr int WINDOW = {{ window if window is not none else 0 }};  // rows seen; 0: all
constexpr float LOG2E = 1.4426950408889634f;
constexpr float SCALE = {{ scale | f32 }};

// The first row that the token at `position` sees.
__device__ __forceinline__ int first_seen(int position) {
    return WINDOW ? max(position - WINDOW + 1, 0) : 0;
}
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Tensor-core variants keep the softmax in base 2: exp(x) = 2^(x log2 e), and 2^x is one instruction.
// cap * tanh(x / cap) with tanh(x) = 1 - 2 / (1 + e^2x): absolute error near cap * 2^-23, where
// tanh.approx would leave cap * 2^-11.
__device__ __forceinline__ float logit2(float dot) {
{% if cap is none %}
    return dot * (SCALE * LOG2E);
{% else %}
    constexpr float CAP = {{ cap | f32 }};
    return CAP * LOG2E * (1.0f - __fdividef(2.0f, 1.0f + ex2(dot * (2.0f * LOG2E * SCALE / CAP))));
{% endif %}
}
// What a head's row is multiplied by at the end, given the maximum (base 2) and sum of its softmax;
// the sink takes its part of the sum here.
__device__ __forceinline__ float row_factor(float m, float l{% if sinks is not none %}, const {{ sinks.type }}* sinks, int head{% endif %}) {
{% if sinks is not none %}
    const float sink = to_f32(sinks[head]) * LOG2E, top = fmaxf(m, sink), shrink = ex2(m - top);
    return shrink / (l * shrink + ex2(sink - top));
{% else %}
    return 1.0f / l;
{% endif %}
}
#define SINKS_ARG(head) {% if sinks is not none %}, sinks, head{% endif %}

