{% set adds = residual is defined %}{% set gathers = rows is defined %}
// {{ result.name }} = {{ "residual + " if adds }}x{{ "[rows]" if gathers }} · wᵀ + bias
{% if adds %}
// It may overwrite the residual: an element is read and written by one thread.
{% endif %}
struct Op : Neighbours {
    {{ result.type }}* result;
{% if adds %}
    const {{ residual.type }}* residual;
    __device__ __forceinline__ void take({{ result.type }}* to, const {{ residual.type }}* from) { result = to, residual = from; }
{% elif gathers %}
    const {{ rows.type }}* picked;
    __device__ __forceinline__ void take({{ result.type }}* to, const {{ rows.type }}* rows) { result = to, picked = rows; }
    __device__ __forceinline__ i64 source(int t) const { return picked[t]; }
{% else %}
    __device__ __forceinline__ void take({{ result.type }}* to) { result = to; }
{% endif %}
    __device__ __forceinline__ void store(int n, int t, float v) const {
{% if adds %}
        const i64 i = (i64)t * N + n;
        result[i] = from_f32<{{ result.type }}>(to_f32(residual[i]) + v + bias_of(n));
{% else %}
        result[(i64)t * N + n] = from_f32<{{ result.type }}>(v + bias_of(n));
{% endif %}
    }
    __device__ __forceinline__ void emit(int q, int t, float a, float b, float) const {
        store(2 * q, t, a);
        if (2 * q + 1 < N) store(2 * q + 1, t, b);
    }
{% if p.activations is defined or p.mma_rows is defined %}
    __device__ __forceinline__ void finish(int q, int t, float (&a)[8], const float (&)[8]) const {
{% if adds %}
        const i64 at = (i64)t * N + q;
        float r[8];
        load(r, residual + at);
        add_bias(a, q);
#pragma unroll
        for (int i = 0; i < 8; i++) a[i] += r[i];
        ::store(result + at, a);
{% else %}
        add_bias(a, q);
        ::store(result + (i64)t * N + q, a);
{% endif %}
    }
{% endif %}
};
{% set tokens_of = result %}{% set taken = result.name ~ (", residual" if adds else ", rows" if gathers else "") %}
{% include "common/skinny_main.cuh" %}
