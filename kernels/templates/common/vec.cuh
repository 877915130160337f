// Several elements at a time, in f32.

template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack { T v[N]; };

// Elements of T in 16 bytes if `n` is a multiple of that, else 1. For several sizes, give their bits
// together: wide<T>(a | b).
template <class T> __device__ constexpr int wide(i64 n) {
    return n % (16 / (int)sizeof(T)) == 0 ? 16 / (int)sizeof(T) : 1;
}

// Sixteen bytes as a pack.
template <class P> __device__ __forceinline__ P as_pack(const Vec16& v) {
    static_assert(sizeof(P) == 16, "a pack of another size");
    P pack;
    memcpy(&pack, &v, 16);
    return pack;
}
// A pack of weights, which is read once: past the L1 cache.
template <class P> __device__ __forceinline__ P load_once(const P* p) {
    if constexpr (sizeof(P) == 16) {
        return as_pack<P>(load16_stream(p));
    } else {
        return *p;
    }
}
template <int N, class T> __device__ __forceinline__ void load(float (&v)[N], const T* p) {
    const Pack<T, N> x = *(const Pack<T, N>*)p;
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = to_f32(x.v[j]);
}
template <class T, int N> __device__ __forceinline__ Pack<T, N> pack(const float (&v)[N]) {
    Pack<T, N> x;
#pragma unroll
    for (int j = 0; j < N; j++) x.v[j] = from_f32<T>(v[j]);
    return x;
}
// To global memory: `*(Pack<T, N>*)p = pack<T>(v)` stores anywhere.
template <int N, class T> __device__ __forceinline__ void store(T* p, const float (&v)[N]) {
    if constexpr (sizeof(T) == 2 && N == 8) {  // the compiler may make several stores of one
        asm volatile("st.global.v4.u32 [%0], { %1, %2, %3, %4};" ::"l"(p), "r"(pack2<T>(v[0], v[1])),
                     "r"(pack2<T>(v[2], v[3])), "r"(pack2<T>(v[4], v[5])), "r"(pack2<T>(v[6], v[7])) : "memory");
    } else {
        *(Pack<T, N>*)p = pack<T>(v);
    }
}

// Four lanes side by side have four words each: lane `quad` of them gets the words of place `quad`, in the order of lanes.
__device__ __forceinline__ void transpose4(u32 (&t)[4], int quad) {
    const bool odd = quad & 1, upper = quad & 2;
    const u32 a = __shfl_xor_sync(0xffffffffu, odd ? t[0] : t[1], 1), b = __shfl_xor_sync(0xffffffffu, odd ? t[2] : t[3], 1);
    if (odd) t[0] = a, t[2] = b;
    else t[1] = a, t[3] = b;
    const u32 c = __shfl_xor_sync(0xffffffffu, upper ? t[0] : t[2], 2), d = __shfl_xor_sync(0xffffffffu, upper ? t[1] : t[3], 2);
    if (upper) t[0] = c, t[1] = d;
    else t[2] = c, t[3] = d;
}

// Threads take elements in turn: whatever the grid, all are done.
__device__ __forceinline__ i64 thread_index() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ i64 thread_count() { return (i64)gridDim.x * blockDim.x; }

// Over THREADS threads in a row: a warp, or the whole block with 32 floats of `scratch`.
template <int THREADS> __device__ __forceinline__ float group_sum(float x, float* scratch) {
    if constexpr (THREADS == 32) return warp_sum(x);
    else return block_sum(x, scratch);
}
template <int THREADS> __device__ __forceinline__ float group_max(float x, float* scratch) {
    if constexpr (THREADS == 32) return warp_max(x);
    else return block_max(x, scratch);
}

// The dot products of x and ROWS rows of K constants by a warp; all lanes get them. Rows read together hide each other's
// latency, and so do steps of 32 packs of each, of which at most MOST are asked for before the first is used.
template <int K, int ROWS, int MOST = 4, class X, class W>
__device__ __forceinline__ void warp_dots(float (&sums)[ROWS], const X* x, const W* const (&rows)[ROWS]) {
    constexpr int N = wide<X>(K) < wide<W>(K) ? wide<X>(K) : wide<W>(K);
    constexpr int STEPS = (K + 32 * N - 1) / (32 * N), TURNS = (STEPS + MOST - 1) / MOST, TOGETHER = (STEPS + TURNS - 1) / TURNS;
    const int c0 = threadIdx.x % 32 * N;
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r] = 0.0f;
#pragma unroll 1
    for (int first = 0; first < STEPS; first += TOGETHER) {
        Pack<W, N> packs[TOGETHER][ROWS];
#pragma unroll
        for (int s = 0; s < TOGETHER; s++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) packs[s][r] = load_once((const Pack<W, N>*)(rows[r] + min((first + s) * 32 * N + c0, K - N)));
#pragma unroll
        for (int s = 0; s < TOGETHER; s++) {
            const int c = (first + s) * 32 * N + c0;
            if (c >= K) continue;
            float a[N];
            load(a, x + c);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int j = 0; j < N; j++) sums[r] += a[j] * to_f32(packs[s][r].v[j]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r] = warp_sum(sums[r]);
}

// Rounds numbers as a T keeps them.
template <class T, int N> __device__ __forceinline__ void round_as(float (&x)[N]) {
    if constexpr (sizeof(T) == 4) return;
    else {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const u32 two = round2(x[i], x[i + 1], T{});
            x[i] = low<T>(two), x[i + 1] = high<T>(two);
        }
    }
}
