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
// A row in the registers of WARPS warps as it is stored, so that all of it can be asked for at once. Its sum has the bits of a
// Row<COLS, 256, 8>: what that one's eight warps have is dealt to these.
template <class T, int COLS, int WARPS> struct DealtRow {
    static_assert(WARPS > 1, "sums meet in shared memory");
    static constexpr int DEALT = 8 / WARPS, PACKS = (COLS + 2047) / 2048 * DEALT;
    // Columns before it are there: all, where the last round is whole.
    static constexpr int END = COLS % 2048 == 0 ? 0x7fffffff : COLS;
    u32 x[PACKS][4];

    // Where the 32 eights of pack p begin.
    static __device__ __forceinline__ int column(int p) {
        return (int)threadIdx.x / 32 % WARPS * DEALT * 256 + (p / DEALT * 8 + p % DEALT) * 256;
    }
    __device__ __forceinline__ void read(const T* row) {
        const int own = threadIdx.x % 32 * 8;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const Vec16 v = column(p) + own < END ? load16(row + own + column(p)) : Vec16{};
#pragma unroll
            for (int i = 0; i < 4; i++) x[p][i] = v.w[i];
        }
    }
    // Waits for the row's warps, which are side by side.
    static __device__ __forceinline__ void meet() {
        asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.x / (32 * WARPS) + 1), "n"(32 * WARPS) : "memory");
    }
    // 1 / sqrt(mean(x²) + eps); `scratch` holds 8 floats for the row.
    __device__ __forceinline__ float inverse_rms(float eps, float* scratch) {
        float sums[DEALT] = {};
#pragma unroll
        for (int p = 0; p < PACKS; p++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float a = low<T>(x[p][i]), b = high<T>(x[p][i]);
                sums[p % DEALT] += a * a;
                sums[p % DEALT] += b * b;
                asm volatile("" : "+r"(x[p][i]));      // or the compiler keeps the f32 as well, which has no room
            }
        // As lanes add, they keep half of the sums, until they have one.
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int d = 16, left = DEALT / 2; d > 0; d /= 2, left /= 2) {
            if (left == 0) sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], d);
#pragma unroll
            for (int i = 0; i < left; i++) {
                const bool later = lane & d;
                const float other = __shfl_xor_sync(0xffffffffu, later ? sums[i] : sums[i + left], d);
                sums[i] = (later ? sums[i + left] : sums[i]) + other;
            }
        }
        if (lane % (32 / DEALT) == 0) scratch[threadIdx.x / 32 % WARPS * DEALT + lane / (32 / DEALT)] = sums[0];
        meet();
        float all = scratch[lane % 8];
        meet();
#pragma unroll
        for (int d = 4; d > 0; d /= 2) all += __shfl_xor_sync(0xffffffffu, all, d);
        return 1.0f / sqrtf(all / COLS + eps);
    }
};
