// Gated activations.
struct Silu {
    static __device__ __forceinline__ float of(float x) { return x / (1.0f + expf(-x)); }
};
// The tanh form of GELU: (1 + tanh(u)) / 2 is the sigmoid of 2u.
struct GeluTanh {
    static __device__ __forceinline__ float of(float x) {
        const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
        return x / (1.0f + expf(-2.0f * u));
    }
};

// y = act(gate) * up for rows of COLS values; those of gate and of up lie `stride` apart.
template <class Act, int COLS, class T>
__device__ __forceinline__ void gated_rows(i64 rows, const T* gate, const T* up, i64 stride, T* y) {
    constexpr int N = wide<T>(COLS), PACKS = COLS / N;
    for (i64 i = thread_index(); i < rows * PACKS; i += thread_count()) {
        const i64 at = i / PACKS * stride + i % PACKS * N;
        float g[N], u[N];
        load(g, gate + at);
        load(u, up + at);
#pragma unroll
        for (int j = 0; j < N; j++) g[j] = Act::of(g[j]) * u[j];
        store(y + i * N, g);
    }
}
