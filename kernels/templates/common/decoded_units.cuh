// Values of a weight that is packed codes: a warp a unit, whose codes and scales a lane reads to registers, all before it waits for any.
//
// What counts is memory, most of it written: whether a warp's stores are whole lines, and how much is under way. Lanes have codes as
// tensor cores take them, two neighbours of each eight columns. So values go to shared memory as the tiles of 8 x 8 that they are there,
// and from there to memory 256 bytes of a row at a time; or four lanes exchange them, and each stores 16 bytes of 32 columns.

// Codes as f16 are exact, and so are scales in f32: what is rounded is what `packed_value` rounds.
template <class P, class T> struct Decoded {
    typedef Values<P, f16> V;
    static constexpr int CHUNKS = P::COLUMNS / 128;
    // A row of a chunk of 128 columns in shared memory: 16 bytes more, so that eight rows' 16 bytes are in different banks.
    static constexpr int ROW = 256 + 16, TILE = 8 * ROW;
    // Blocks of 256 threads that a multiprocessor has at once: as many as registers hold without spilling.
    static constexpr int PER_SM = sizeof(T) > 2 ? 2 : CHUNKS > 1 ? 4 : 5;
    static_assert(P::COLUMNS % 128 == 0, "units are whole chunks");

    // What a lane has of a unit.
    typename V::Chunk words[CHUNKS];
    typename V::Row row;

    __device__ __forceinline__ void load(const u8* unit, int lane) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) V::load(words[c], unit, c, lane);
        V::load_row(row, unit, lane / 4);
    }
    // A value of a code of group G.
    template <int G> __device__ __forceinline__ float value(float code) const {
        if (P::KIND == E4M3 && fabsf(code) == 480.0f) code = __uint_as_float(0x7fc00000);   // where a finite number would be, NaN is
        const float scaled = __fmul_rn(code, row.scale.template stored<G>());
        if constexpr (V::MINIMUM) return __fsub_rn(scaled, row.minimum.template stored<G>());
        return scaled;
    }
    // The values of pair PAIR of block B of 32 columns.
    template <int B, int PAIR> __device__ __forceinline__ void pair(float (&v)[2]) const {
        constexpr int G = (B * 32 + PAIR * 8) / P::GROUP;
        const u32 codes = V::template codes<B % 4, PAIR>(words[B / 4]);
        v[0] = value<G>(low<f16>(codes)), v[1] = value<G>(high<f16>(codes));
    }
    template <int B> __device__ __forceinline__ void block(float (&v)[4][2]) const {
        pair<B, 0>(v[0]);
        pair<B, 1>(v[1]);
        pair<B, 2>(v[2]);
        pair<B, 3>(v[3]);
    }

    // ---- by exchange between the four lanes of a row
    // Blocks from B on: `to` is where a lane's row has the unit's first column, or null beyond the last row.
    template <int B> __device__ __forceinline__ void exchange(T* to, int columns, int lane) const {
        if constexpr (B < P::COLUMNS / 32) {
            if (B * 32 >= columns) return;
            float v[4][2];
            block<B>(v);
            constexpr int WORDS = sizeof(T) / 2;       // of a pair
            u32 t[WORDS][4];
#pragma unroll
            for (int p = 0; p < 4; p++) {
                if constexpr (WORDS == 1) t[0][p] = pack2<T>(v[p][0], v[p][1]);
                else t[0][p] = __float_as_uint(v[p][0]), t[1][p] = __float_as_uint(v[p][1]);
            }
#pragma unroll
            for (int i = 0; i < WORDS; i++) transpose4(t[i], lane % 4);
            T* const own = to + B * 32 + lane % 4 * 8;
            if (to != nullptr) {
                if constexpr (WORDS == 1) {
                    put(own, Vec16{ {t[0][0], t[0][1], t[0][2], t[0][3]} });
                } else {
                    put(own, Vec16{ {t[0][0], t[1][0], t[0][1], t[1][1]} });
                    put(own + 4, Vec16{ {t[0][2], t[1][2], t[0][3], t[1][3]} });
                }
            }
            exchange<B + 1>(to, columns, lane);
        }
    }

    // ---- through shared memory (sm_90)
    // Chunks from C on, through a warp's own TILE bytes: `to` is the unit's first value, `columns` and `rows` those that are the weight's.
    template <int C> __device__ __forceinline__ void lines(T* to, i64 stride, int columns, int rows, u32 tile, int lane) const {
        if constexpr (C < CHUNKS) {
            if (C * 128 >= columns) return;
            if constexpr (C > 0) __syncwarp();         // the tile is read
            const u32 at = tile + lane % 8 * ROW + lane / 8 * 16;
            matrices<C * 4>(at);
            matrices<C * 4 + 1>(at + 64);
            matrices<C * 4 + 2>(at + 128);
            matrices<C * 4 + 3>(at + 192);
            const int left = min(128, columns - C * 128);
            __syncwarp();
            T* const own = to + lane / 16 * stride + C * 128 + lane % 16 * 8;
            Vec16 v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = load16_shared(tile + (2 * i + lane / 16) * ROW + lane % 16 * 16);
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (2 * i + lane / 16 < rows && lane % 16 * 8 < left) put(own + 2 * i * stride, v[i]);
            lines<C + 1>(to, stride, columns, rows, tile, lane);
        }
    }
    // Block B as four matrices of 8 x 8, side by side: lane 8 i + r says where row r of the i-th is.
    template <int B> __device__ __forceinline__ void matrices(u32 at) const {
        float v[4][2];
        block<B>(v);
        u32 t[4];
#pragma unroll
        for (int p = 0; p < 4; p++) t[p] = pack2<T>(v[p][0], v[p][1]);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4};" ::"r"(at), "r"(t[0]), "r"(t[1]), "r"(t[2]), "r"(t[3]) : "memory");
    }
    // 16 bytes of values.
    __device__ __forceinline__ static void put(T* to, const Vec16& v) {
        asm volatile("st.global.v4.u32 [%0], { %1, %2, %3, %4};" ::"l"(to), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
    }
};
