// y = x · wᵀ + bias
struct Op : Neighbours {
    {{ y.type }}* y;
    __device__ __forceinline__ void take({{ y.type }}* to) { y = to; }
    __device__ __forceinline__ void store(int n, int t, float v) const {
        y[(i64)t * N + n] = from_f32<{{ y.type }}>(v + bias_of(n));
    }
    __device__ __forceinline__ void emit(int q, int t, float a, float b, float) const {
        store(2 * q, t, a);
        if (2 * q + 1 < N) store(2 * q + 1, t, b);
    }
{% if p.activations is defined %}
    __device__ __forceinline__ void finish(int q, int t, float (&a)[8], const float (&)[8]) const {
        add_bias(a, q);
        ::store(y + (i64)t * N + q, a);
    }
{% endif %}
};
