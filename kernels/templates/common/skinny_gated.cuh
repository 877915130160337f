// gated = {{ act }}(gate) * up
struct Op : Gated {
    {{ gated.type }}* gated;
    __device__ __forceinline__ void take({{ gated.type }}* to) { gated = to; }
    __device__ __forceinline__ void emit(int q, int t, float a, float b, float) const {
        const float gate = a + bias_of(q), up = b + bias_of(q + PAIRS);
        gated[(i64)t * PAIRS + q] = from_f32<{{ gated.type }}>({{ act }}(gate) * up);
    }
};
