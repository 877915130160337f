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
{% if p.activations is defined or p.outputs is defined %}
{% if adds %}
    typedef Pack<{{ residual.type }}, 8> Early;
    __device__ __forceinline__ Early early(int q, int t) const { return *(const Early*)(residual + (i64)t * N + q); }
{% endif %}
    __device__ __forceinline__ void finish(int q, int t, float (&a)[8], const float (&)[8], const Early& beside) const {
        add_bias(a, q);
{% if adds %}
#pragma unroll
        for (int i = 0; i < 8; i++) a[i] += to_f32(beside.v[i]);
{% endif %}
        ::store(result + (i64)t * N + q, a);
    }
    __device__ __forceinline__ void finish(int q, int t, float (&a)[8], const float (&b)[8]) const { finish(q, t, a, b, early(q, t)); }
{% endif %}
};
{% set tokens_of = result %}{% set taken = result.name ~ (", residual" if adds else ", rows" if gathers else "") %}
{% include "common/skinny_main.cuh" %}
