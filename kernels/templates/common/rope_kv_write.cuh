// What is done to queries and keys between their projection and attention: head-wise norm, rotation,
// and the cache's new rows.
struct NoNorm {};
template <class W> struct is_no_norm { static constexpr bool value = false; };
template <> struct is_no_norm<NoNorm> { static constexpr bool value = true; };

// Head `u` of D values, by LANES threads of a warp, N values at a time; all of the warp must call.
template <int D, int R, bool NEOX, int N, int LANES, class T, class W>
__device__ __forceinline__ void rotate_head(bool active, const T* x, const W* norm, float eps, float offset,
                                            const Turn* turns, T* y) {
    constexpr int PACKS = (D / N + LANES - 1) / LANES;
    const int lane = threadIdx.x % LANES;
    // Where the other value of the pair is. In an interleaved pack it is the pack's own neighbour.
    auto other_of = [](int c) {
        if (c >= 2 * R) return c;
        if (NEOX) return c < R ? c + R : c - R;
        return N == 1 ? c ^ 1 : c;
    };
    float own[PACKS][N], other[PACKS][N], squares = 0.0f;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int c = (p * LANES + lane) * N;
        if (!active || c >= D) continue;
        load(own[p], x + c);
        load(other[p], x + other_of(c));
#pragma unroll
        for (int j = 0; j < N; j++) squares += own[p][j] * own[p][j];
    }
    float inverse = 1.0f;
    if constexpr (!is_no_norm<W>::value) {
#pragma unroll
        for (int d = LANES / 2; d > 0; d >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, d);
        inverse = 1.0f / sqrtf(squares / D + eps);
    }
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int c = (p * LANES + lane) * N;
        if (!active || c >= D) continue;
        if constexpr (!is_no_norm<W>::value) {
            float a[N], b[N];
            load(a, norm + c);
            load(b, norm + other_of(c));
#pragma unroll
            for (int j = 0; j < N; j++) {
                own[p][j] *= inverse * (a[j] + offset);
                other[p][j] *= inverse * (b[j] + offset);
            }
        }
        float out[N];
#pragma unroll
        for (int j = 0; j < N; j++) {
            const int e = c + j;
            const bool first = NEOX ? e < R : e % 2 == 0;
            const Turn turn = e < 2 * R ? turns[NEOX ? (first ? e : e - R) : e / 2] : Turn{1.0f, 0.0f};
            const float partner = NEOX || N == 1 ? other[p][j] : other[p][j ^ 1];
            out[j] = own[p][j] * turn.cos + (first ? -partner : partner) * turn.sin;
        }
        store(y + c, out);
    }
}

// A block takes a token: H query heads (none: only the cache is written), G key heads of D values, and
// VALUES values. Rows of q, k and v lie `*_stride` apart.
template <int H, int G, int D, int VALUES, int R, bool NEOX, class T, class F, class W>
__device__ __forceinline__ void rope_kv_write(const Step* step, const int* positions, const F* freqs, float scale,
        const T* q, i64 q_stride, const T* k, i64 k_stride, const T* v, i64 v_stride,
        const W* q_norm, const W* k_norm, float eps, float offset, T* rotated, T* k_cache, T* v_cache) {
    constexpr int N = wide<T>(D | (NEOX ? R : 0)), NV = wide<T>(VALUES);
    constexpr int LANES = D / N > 16 ? 32 : D / N > 8 ? 16 : D / N > 4 ? 8 : 4;
    __shared__ Turn turns[R];
    const int groups = blockDim.x / LANES;
    for (int t = blockIdx.x; t < step->T; t += gridDim.x) {
        for (int i = threadIdx.x; i < R; i += blockDim.x) turns[i] = turn_of(positions[t], to_f32(freqs[i]), scale);
        pdl_wait();
        __syncthreads();
        const i64 slot = step->slots[t];
        for (int u0 = 0; u0 < H + G; u0 += groups) {
            const int u = u0 + threadIdx.x / LANES;
            const bool query = u < H;
            rotate_head<D, R, NEOX, N, LANES>(u < H + G,
                query ? q + t * q_stride + u * D : k + t * k_stride + (u - H) * D,
                query ? q_norm : k_norm, eps, offset, turns,
                query ? rotated + ((i64)t * H + u) * D : k_cache + (slot * G + u - H) * D);
        }
        for (int c = threadIdx.x * NV; c < VALUES; c += blockDim.x * NV)
            *(Pack<T, NV>*)(v_cache + slot * VALUES + c) = *(const Pack<T, NV>*)(v + t * v_stride + c);
        __syncthreads();
    }
    pdl_wait();
}
