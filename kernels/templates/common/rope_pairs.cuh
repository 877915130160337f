// Rotation and the cache's new rows of many tokens: a thread turns eight pairs of a head, so that a value is read once, and all
// of a token's loads are under way before its angles are worked out.

// A block of THREADS takes a token at a time, of whose row [(H + G) * D + VALUES] queries come first, then keys. Names are those of
// `rope_kv_write`, and so is the order of sums. All of a head turns, and its halves are pairs.
template <int THREADS, int H, int G, int D, int VALUES, class T, class C, class F>
__device__ __forceinline__ void rope_pairs(const Step* step, const int* positions, const F* freqs, float scale, const T* qkv, T* rotated, C* k_cache, C* v_cache) {
    constexpr int R = D / 2, LANES = R / 8, TURNS = (H + G) * LANES, COPIES = VALUES / 16, UNITS = TURNS + COPIES;
    constexpr int ROUNDS = (UNITS + THREADS - 1) / THREADS;
    static_assert(D == 2 * R && R % 8 == 0 && VALUES % 16 == 0 && 32 % LANES == 0 && THREADS % 32 == 0 && sizeof(T) == 2, "packs of eight");
    __shared__ alignas(16) float cos[R], sin[R];
    const int lane = threadIdx.x % LANES;
    for (i64 t = blockIdx.x; t < step->T; t += gridDim.x) {
        constexpr int ANGLES = (R + THREADS - 1) / THREADS;
        float frequency[ANGLES];
        const int position = positions[t];
#pragma unroll
        for (int a = 0; a < ANGLES; a++) frequency[a] = to_f32(freqs[(threadIdx.x + a * THREADS) % R]);
        const i64 slot = step->slots[t];
        pdl_wait();
        Vec16 first[ROUNDS], second[ROUNDS];
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const int u = threadIdx.x + r * THREADS, head = u / LANES;
            if (u >= UNITS) continue;
            const T* const from = qkv + t * ((H + G) * D + VALUES) + (u >= TURNS ? (H + G) * D + (u - TURNS) * 8 : head * D + lane * 8);
            first[r] = load16(from);
            second[r] = load16(from + (u >= TURNS ? VALUES / 2 : R));
        }
#pragma unroll
        for (int a = 0; a < ANGLES; a++) {
            const int i = threadIdx.x + a * THREADS;
            if (i >= R) break;
            const Turn turn = turn_of(position, frequency[a], scale);
            cos[i] = turn.cos, sin[i] = turn.sin;
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const int u = threadIdx.x + r * THREADS, head = u / LANES;
            if (u >= UNITS) continue;
            if (u >= TURNS) {
                T* const to = v_cache + slot * VALUES + (u - TURNS) * 8;
                store16(to, first[r]);
                store16(to + VALUES / 2, second[r]);
                continue;
            }
            float a[8], b[8], x[8], y[8], cs[8], sn[8];
            load(cs, cos + lane * 8);               // each time: registers are for what is on its way
            load(sn, sin + lane * 8);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                a[i * 2] = low<T>(first[r].w[i]), a[i * 2 + 1] = high<T>(first[r].w[i]);
                b[i * 2] = low<T>(second[r].w[i]), b[i * 2 + 1] = high<T>(second[r].w[i]);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) x[j] = fmaf(a[j], cs[j], -__fmul_rn(b[j], sn[j])), y[j] = fmaf(b[j], cs[j], __fmul_rn(a[j], sn[j]));
            T* const to = (head < H ? rotated + (t * H + head) * D : k_cache + (slot * G + head - H) * D) + lane * 8;
            store(to, x);
            store(to + R, y);
        }
        __syncthreads();
    }
    pdl_wait();
}
