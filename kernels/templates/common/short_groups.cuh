// One token's products of whole codes in groups of 16 columns: what scaled_row.cuh has of longer ones.
//
// A tensor core's product has eight columns of activations, of which one token has two, its digits. Here 64 columns of x make all eight:
// column n has digit n % 2 of quarter n / 2 and zeros elsewhere. So a product of 16 rows by 32 codes has the sums of four quarters
// side by side, and each lane those of one, which it scales: no lane does what another does. The sum of a quarter's activations, which
// minimums are multiplied by, is a product of the same kind, with ones for codes.
//
// Codes of a lane are pairs 0 to 3 of block b and of block b + 1, both in a byte of each half of a word (first ones, second ones). Pairs 0 and 2
// are multiplied together, and pairs 1 and 3: of the 32 places of a product the first 16 are of the first half of both blocks.
// Blocks are told apart by bytes and halves by places; x is laid out likewise, by a selection of bytes that is the lane's.

// Whether codes of P are for this. (Groups of 32 with a minimum would need fewer instructions so, too, but an 8B model with Q4_K was not
// faster by more than 1 %, and a 1B model slower by 8 %.)
template <class P> __device__ __forceinline__ constexpr bool in_short_groups() { return P::KIND == WHOLE && P::GROUP == 16; }

// A lane's codes of 64 columns, the T-th of a unit.
template <class P, int T> struct QuarterCodes {
    u32 w[P::PLANES][2];                               // of planes of four bits pairs 0 and 1, and pairs 2 and 3; of others all in the first
    template <class Chunk> __device__ __forceinline__ void gather(const Chunk& c) {
        plane<P::BITS0, 0>(c);
        if constexpr (P::PLANES > 1) plane<P::BITS1, 1>(c);
        if constexpr (P::PLANES > 2) plane<P::BITS2, 2>(c);
    }
    template <int BITS, int I, class Chunk> __device__ __forceinline__ void plane(const Chunk& c) {
        constexpr int B = T % 2 * 2;
        const u32 x = c.w[B][I];
        if constexpr (BITS == 4) {
            const u32 y = c.w[B + 1][I];
            w[I][0] = __byte_perm(x, y, 0x6240), w[I][1] = __byte_perm(x, y, 0x7351);
        } else if constexpr (BITS == 2) {
            w[I][0] = x;
        } else {                                       // the blocks of a byte, of a half's two, become two bytes
            w[I][0] = (moved<B * 4, 0>(x) & 0x000f000f) | (moved<B * 4, 4>(x) & 0x0f000f00);
        }
    }
    // Pair PAIR of both blocks as bytes.
    template <int PAIR> __device__ __forceinline__ u32 pair() const {
        u32 bytes = placed<P::BITS0, 0, 0, PAIR>();
        if constexpr (P::PLANES > 1) bytes |= placed<P::BITS1, P::BITS0, 1, PAIR>();
        if constexpr (P::PLANES > 2) bytes |= placed<P::BITS2, P::BITS0 + P::BITS1, 2, PAIR>();
        return bytes;
    }
    template <int BITS, int ABOVE, int I, int PAIR> __device__ __forceinline__ u32 placed() const {
        constexpr int FROM = BITS == 4 ? PAIR % 2 * 4 : PAIR * BITS;
        return moved<FROM, ABOVE>(w[I][BITS == 4 ? PAIR / 2 : 0]) & (((1u << BITS) - 1) << ABOVE) * 0x01010101u;
    }
};

// Lane's activations of 64 columns, as the tensor core takes them: of pairs 0 and 2, and of pairs 1 and 3.
struct QuarterColumns {
    u32 b[2][2];
    // How bytes are selected for places of half `half`, in the lanes of column n.
    __device__ __forceinline__ static u32 selector(int n, int half) {
        if (n / 2 % 2 != half) return 0x4444;
        return n / 4 == 0 ? 0x4240 + half * 0x0101 : 0x2404 + half * 0x1010;
    }
    // Pairs h and h + 2 of the lane's block are a word of each h at `at`, as `store_scaled` lays them.
    __device__ __forceinline__ void load(u32 at, const u32 (&selectors)[2], bool there) {
        u32 x[2] = {};
        if (there) load8_shared(at, x[0], x[1]);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int half = 0; half < 2; half++) b[h][half] = __byte_perm(x[h], 0, selectors[half]);
    }
    // Onto c, of both digits of each column the sum times FACTOR.
    template <int FACTOR> __device__ __forceinline__ void add_sums(int (&c)[4]) const {
        constexpr u32 ALL = (u32)(FACTOR & 0xff) * 0x01010101u;
        static_assert(FACTOR >= -128 && FACTOR < 128, "a factor is a byte");
        const u32 a[4] = {ALL, ALL, ALL, ALL};
        mma_signed_bytes(c, a, b[0][0], b[0][1]);
        mma_signed_bytes(c, a, b[1][0], b[1][1]);
    }
    // Onto c, codes of two rows times x.
    template <class Codes> __device__ __forceinline__ void add_products(int (&c)[4], const Codes& first, const Codes& second) const {
        const u32 even[4] = {first.template pair<0>(), second.template pair<0>(), first.template pair<2>(), second.template pair<2>()};
        mma_bytes(c, even, b[0][0], b[0][1]);
        const u32 odd[4] = {first.template pair<1>(), second.template pair<1>(), first.template pair<3>(), second.template pair<3>()};
        mma_bytes(c, odd, b[1][0], b[1][1]);
    }
};

// Scales (or minimums) of a lane's row that are its own, those of every fourth quarter: otherwise as `Scales` has them.
template <int GROUPS, int TYPE, int AT, int OUTER, int OUTER_AT> struct QuarterScales {
    static constexpr int BYTES = bytes_of(TYPE);
    u32 w[GROUPS / 4];
    float outer;
    __device__ __forceinline__ void load(u32 unit, int row, int quad) {
        const u32 at = unit + AT + (row * GROUPS + quad) * BYTES;
#pragma unroll
        for (int t = 0; t < GROUPS / 4; t++) {
            const u32 own = at + t * 4 * BYTES;
            w[t] = TYPE == AS_I8 ? load1_signed_shared(own) : BYTES == 1 ? load1_shared(own) : BYTES == 2 ? load2_shared(own) : load4_shared(own);
        }
        outer = 1;
        if constexpr (OUTER >= 0) {
            const u32 o = unit + OUTER_AT + row * bytes_of(OUTER);
            outer = widened(OUTER == AS_F32 ? load4_shared(o) : load2_shared(o), OUTER);
        }
    }
    // That of the T-th 64 columns.
    template <int T> __device__ __forceinline__ float get() const {
        const float inner = TYPE == AS_I8 || TYPE == AS_U8 ? (float)(int)w[T] : widened(w[T], TYPE);
        return OUTER >= 0 ? inner * outer : inner;
    }
};
