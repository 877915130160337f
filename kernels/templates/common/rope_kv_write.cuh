// What is done to queries and keys between their projection and attention: head-wise norm, rotation,
// and the cache's new rows.
struct NoNorm {};
template <class W> struct is_no_norm { static constexpr bool value = false; };
template <> struct is_no_norm<NoNorm> { static constexpr bool value = true; };

// A head of D values, by LANES threads of a warp, N values at a time.
template <int D, int R, bool NEOX, int N, int LANES, class T> struct Head {
    static constexpr int PACKS = (D / N + LANES - 1) / LANES;
    Pack<T, N> own[PACKS], other[PACKS];

    static __device__ __forceinline__ int column(int p) { return (p * LANES + threadIdx.x % LANES) * N; }
    // Where the other values of a pack's pairs are. In an interleaved pack they are its own.
    static __device__ __forceinline__ int other_of(int c) {
        if (c >= 2 * R) return c;
        if (NEOX) return c < R ? c + R : c - R;
        return N == 1 ? c ^ 1 : c;
    }
    __device__ __forceinline__ void read(const T* x) {
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            if (column(p) >= D) continue;
            own[p] = *(const Pack<T, N>*)(x + column(p));
            other[p] = *(const Pack<T, N>*)(x + other_of(column(p)));
        }
    }
    // 1 / sqrt(mean(x²) + eps); all of the warp must call.
    __device__ __forceinline__ float inverse_rms(float eps) const {
        float squares = 0.0f;
#pragma unroll
        for (int p = 0; p < PACKS; p++)
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float v = column(p) < D ? to_f32(own[p].v[j]) : 0.0f;
                squares += v * v;
            }
#pragma unroll
        for (int d = LANES / 2; d > 0; d >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, d);
        return 1.0f / sqrtf(squares / D + eps);
    }
    // The head normed and turned by R angles, whose `cos` and `sin` are given; `put(p, values)` gets the values of pack p.
    template <class W, class Put> __device__ __forceinline__ void turn(const W* norm, float inverse, float offset,
                                                                       const float* cos, const float* sin, Put put) const {
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int c = column(p);
            if (c >= D) continue;
            float a[N], b[N];
#pragma unroll
            for (int j = 0; j < N; j++) a[j] = to_f32(own[p].v[j]), b[j] = to_f32(other[p].v[j]);
            if constexpr (!is_no_norm<W>::value) {
                float wa[N], wb[N];
                load(wa, norm + c);
                load(wb, norm + other_of(c));
#pragma unroll
                for (int j = 0; j < N; j++) a[j] *= inverse * (wa[j] + offset), b[j] *= inverse * (wb[j] + offset);
            }
            if (c < 2 * R) {  // a pack is within 2R or beyond it
                constexpr int TURNS = NEOX || N == 1 ? N : N / 2;
                const int i = NEOX ? (c < R ? c : c - R) : c / 2;
                float cs[TURNS], sn[TURNS], out[N];
                load(cs, cos + i);
                load(sn, sin + i);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    const bool first = NEOX ? c < R : (c + j) % 2 == 0;
                    const float partner = NEOX || N == 1 ? b[j] : b[j ^ 1];
                    const int turn = TURNS == N ? j : j / 2;
                    out[j] = a[j] * cs[turn] + (first ? -partner : partner) * sn[turn];
                }
                put(p, out);
            } else {
                put(p, a);
            }
        }
    }
    template <class W> __device__ __forceinline__ void write(T* y, const W* norm, float inverse, float offset,
                                                             const float* cos, const float* sin) const {
        turn(norm, inverse, offset, cos, sin, [&](int p, const float (&v)[N]) { store(y + column(p), v); });
    }
{% if k_cache.quantised %}
    // As codes, of what is rounded to elements first: that is what is cached where nothing is fused.
    template <int HEADS, class W> __device__ __forceinline__ void write_codes(u8* plane, i64 row, int head, const W* norm, float inverse,
            float offset, const float* cos, const float* sin) const {
        float all[PACKS][N] = {};
        turn(norm, inverse, offset, cos, sin, [&](int p, const float (&v)[N]) {
#pragma unroll
            for (int j = 0; j < N; j++) all[p][j] = to_f32(from_f32<T>(v[j]));
        });
        store_codes<HEADS, D, N, LANES>(plane, row, head, all);
    }
{% endif %}
};

// A block of THREADS takes a token: H query heads (none: only the cache is written), G key heads of D
// values, and VALUES values. Rows of q, k and v lie `*_stride` apart. `positions` is an input of the step.
template <int THREADS, int H, int G, int D, int VALUES, int R, bool NEOX, class T, class C, class F, class W>
__device__ __forceinline__ void rope_kv_write(const Step* step, const int* positions, const F* freqs, float scale,
        const T* q, i64 q_stride, const T* k, i64 k_stride, const T* v, i64 v_stride,
        const W* q_norm, const W* k_norm, float eps, float offset, T* rotated, C* k_cache, C* v_cache) {
    constexpr bool CODED = sizeof(C) == 1;
    constexpr int N = wide<T>(D | (NEOX ? R : 2 * R)), NV = wide<T>(VALUES / (CODED ? G : 1));
    constexpr int LANES = D / N > 16 ? 32 : D / N > 8 ? 16 : D / N > 4 ? 8 : 4, GROUPS = THREADS / LANES;
    // Heads that a group reads before it writes any: their loads overlap.
    typedef Head<D, R, NEOX, N, LANES, T> Values;
    constexpr int ROUNDS = (H + G + GROUPS - 1) / GROUPS, BATCH = Values::PACKS > 1 ? 1 : ROUNDS < 4 ? ROUNDS : 4;
    __shared__ alignas(16) float cos[R], sin[R];
    const int group = threadIdx.x / LANES;
    for (int t = blockIdx.x; t < step->T; t += gridDim.x) {
        for (int i = threadIdx.x; i < R; i += THREADS) {
            const Turn turn = turn_of(positions[t], to_f32(freqs[i]), scale);
            cos[i] = turn.cos, sin[i] = turn.sin;
        }
        const i64 slot = step->slots[t];
        pdl_wait();
        __syncthreads();
        for (int u0 = group; u0 < group + H + G; u0 += GROUPS * BATCH) {
            Values heads[BATCH];
#pragma unroll
            for (int r = 0; r < BATCH; r++) {
                const int u = u0 + r * GROUPS;
                if (u < H + G) heads[r].read(u < H ? q + t * q_stride + u * D : k + t * k_stride + (u - H) * D);
            }
#pragma unroll
            for (int r = 0; r < BATCH; r++) {
                const int u = u0 + r * GROUPS;
                float inverse = 1.0f;
                if constexpr (!is_no_norm<W>::value) inverse = heads[r].inverse_rms(eps);
{% if k_cache.quantised %}
                if (u < H) heads[r].write(rotated + ((i64)t * H + u) * D, q_norm, inverse, offset, cos, sin);
                else if (u < H + G) heads[r].template write_codes<G>(k_cache, slot, u - H, k_norm, inverse, offset, cos, sin);
            }
        }
        constexpr int DV = VALUES / G, PACKS = (DV / NV + LANES - 1) / LANES;
        for (int head = group; head < G; head += GROUPS) {
            float all[PACKS][NV] = {};
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                const int c = (p * LANES + threadIdx.x % LANES) * NV;
                if (c < DV) load(all[p], v + t * v_stride + head * DV + c);
            }
            store_codes<G, DV, NV, LANES>(v_cache, slot, head, all);
        }
{% else %}
                T* y = u < H ? rotated + ((i64)t * H + u) * D : k_cache + (slot * G + u - H) * D;
                if (u < H + G) heads[r].write(y, u < H ? q_norm : k_norm, inverse, offset, cos, sin);
            }
        }
        for (int c = threadIdx.x * NV; c < VALUES; c += THREADS * NV)
            *(Pack<T, NV>*)(v_cache + slot * VALUES + c) = *(const Pack<T, NV>*)(v + t * v_stride + c);
{% endif %}
        __syncthreads();
    }
    pdl_wait();
}
