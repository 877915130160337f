// A row of COLS values in the registers of THREADS threads, N values at a time.
template <int COLS, int THREADS, int N> struct Row {
    static constexpr int PACKS = (COLS / N + THREADS - 1) / THREADS;
    float v[PACKS][N];

    // Calls f(column, values) for each pack of this thread.
    template <class F> __device__ __forceinline__ void each(F f) {
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const int c = (j * THREADS + threadIdx.x % THREADS) * N;
            if (c < COLS) f(c, v[j]);
        }
    }
    // The sum of f(value) over the row.
    template <class F> __device__ __forceinline__ float sum(float* scratch, F f) {
        float all = 0.0f;
        each([&](int, float (&x)[N]) {
#pragma unroll
            for (int j = 0; j < N; j++) all += f(x[j]);
        });
        return group_sum<THREADS>(all, scratch);
    }
    // 1 / sqrt(mean(x²) + eps)
    __device__ __forceinline__ float inverse_rms(float eps, float* scratch) {
        return 1.0f / sqrtf(sum(scratch, [](float x) { return x * x; }) / COLS + eps);
    }
    template <class T> __device__ __forceinline__ void read(const T* p) {
        each([&](int c, float (&x)[N]) { load(x, p + c); });
    }
    template <class T> __device__ __forceinline__ void write(T* p) {
        each([&](int c, float (&x)[N]) { store(p + c, x); });
    }
};
