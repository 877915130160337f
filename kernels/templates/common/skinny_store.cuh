{% set adds = residual is defined %}{% set gathers = rows is defined %}{% set tells = weighted is defined %}
// {{ result.name }} = {{ "residual + " if adds }}x{{ "[rows]" if gathers }} · wᵀ + bias
{% if adds %}
// It may overwrite the residual: an element is read and written by one thread.
{% endif %}
struct Op : Neighbours {
    {{ result.type }}* result;
{% if tells %}
    const {{ residual.type }}* residual;
    {{ weighted.type }}* weighted;
    {{ rms.type }}* rms;
{% if next_norm %}
    const {{ next_norm.type }}* next_norm;
{% endif %}
    __device__ __forceinline__ void take({{ result.type }}* to, const {{ residual.type }}* from, {{ weighted.type }}* w, {{ rms.type }}* r{{ ", const " ~ next_norm.type ~ "* norm" if next_norm }}) {
        result = to, residual = from, weighted = w, rms = r{{ ", next_norm = norm" if next_norm }};
    }
    // What the next norm wants of a sum, as it was rounded. Eight threads side by side have 64 columns of a token.
    __device__ __forceinline__ void tell(int q, int t, float (&v)[8]) const {
        static_assert(N % 64 == 0, "all eight are there");
        float squares = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = to_f32(from_f32<{{ result.type }}>(v[i]));
            squares += v[i] * v[i];
        }
#pragma unroll
        for (int d = 1; d < 8; d *= 2) squares += __shfl_xor_sync(0xffu << threadIdx.x % 32 / 8 * 8, squares, d);
        if (threadIdx.x % 8 == 0) rms[(i64)t * (N / 64) + q / 64] = sqrtf(squares / 64);
{% if next_norm %}
        float by[8];
        load(by, next_norm + q);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= by[i] + {{ offset | f32 }};
{% endif %}
        ::store(weighted + (i64)t * N + q, v);
    }
{% elif adds %}
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
{% if p.activations is defined or p.mma_rows is defined or p.outputs is defined %}
{% if adds %}
    typedef Pack<{{ residual.type }}, 8> Early;
    __device__ __forceinline__ Early early(int q, int t) const { return *(const Early*)(residual + (i64)t * N + q); }
{% endif %}
    __device__ __forceinline__ void finish(int q, int t, float (&a)[8], const float (&)[8], const Early& beside) const {
        complete(a, q, t);
{% if adds %}
#pragma unroll
        for (int i = 0; i < 8; i++) a[i] += to_f32(beside.v[i]);
{% endif %}
        ::store(result + (i64)t * N + q, a);
{% if tells %}
        tell(q, t, a);
{% endif %}
    }
    __device__ __forceinline__ void finish(int q, int t, float (&a)[8], const float (&b)[8]) const { finish(q, t, a, b, early(q, t)); }
{% endif %}
};
{% set tokens_of = result %}{% set taken = result.name ~ (", residual, weighted, rms" ~ (", next_norm" if next_norm else "") if tells else ", residual" if adds else ", rows" if gathers else "") %}
{% include "common/skinny_main.cuh" %}
