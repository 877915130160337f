// gated = {{ act }}(gate) * up
struct Op : Gated {
    {{ gated.type }}* gated;
    __device__ __forceinline__ void take({{ gated.type }}* to) { gated = to; }
    __device__ __forceinline__ void emit(int q, int t, float a, float b, float) const {
        const float gate = a + bias_of(q), up = b + bias_of(q + PAIRS);
        gated[(i64)t * PAIRS + q] = from_f32<{{ gated.type }}>({{ act }}(gate) * up);
    }
{% if p.activations is defined or p.mma_rows is defined or p.outputs is defined %}
    __device__ __forceinline__ void finish(int q, int t, float (&a)[8], float (&b)[8], const Early& = Early()) const {
        complete(a, q, t);
        complete(b, q + PAIRS, t);
#pragma unroll
        for (int i = 0; i < 8; i++) a[i] = {{ act }}(a[i]) * b[i];
        ::store(gated + (i64)t * PAIRS + q, a);
    }
{% endif %}
};
{% set tokens_of = gated %}{% set taken = "gated" %}
{% include "common/skinny_main.cuh" %}
