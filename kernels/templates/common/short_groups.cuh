// One token's products of whole codes in groups of 16 columns: what scaled_row.cuh has of longer ones.
//
// A tensor core's product has eight columns of activations, of which one token has two, its digits. Here 64 columns of x make all eight:
// column n has digit n % 2 of quarter n / 2 and zeros elsewhere. So a product of 16 rows by 32 codes has the sums of four quarters
// side by side, and each lane those of one, which it scales: no lane does what another does. The sum of a quarter's activations, which
// minimums are multiplied by, is a product of the same kind, with ones for codes.
//
// Codes of a lane are pairs 0 to 3 of two blocks. Pairs 0 and 2 of both are multiplied together, and pairs 1 and 3: of the 32 places of a product
// the first 16 are of the first block, and of a lane's four bytes there, as `code_bytes` has them, the first and the third are of the first half.
// Blocks are told apart by places and halves by bytes; x is laid out likewise, by a selection of bytes that is the lane's.

// Whether codes of P are for this. (Groups of 32 with a minimum would need fewer instructions so, too, but an 8B model with Q4_K was not
// faster by more than 1 %, and a 1B model slower by 8 %.)
template <class P> __device__ __forceinline__ constexpr bool in_short_groups() { return P::KIND == WHOLE && P::GROUP == 16; }

// Lane's activations of 64 columns, as the tensor core takes them: of pairs 0 and 2, and of pairs 1 and 3, of both blocks each.
struct QuarterColumns {
    u32 b[2][2];
    // How bytes are selected for places of block `block`, in the lanes of column n: those of its quarter's half, others are 0.
    __device__ __forceinline__ static u32 selector(int n, int block) {
        if (n / 4 != block) return 0x4444;
        return n / 2 % 2 == 0 ? 0x4240 : 0x3414;
    }
    // Pairs h and h + 2 of the lane's block are a word of each h at `at`, as `store_scaled` lays them.
    __device__ __forceinline__ void load(u32 at, const u32 (&selectors)[2], bool there) {
        u32 x[2] = {};
        if (there) load8_shared(at, x[0], x[1]);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int block = 0; block < 2; block++) b[h][block] = __byte_perm(x[h], 0, selectors[block]);
    }
    // Onto c, of both digits of each column the sum times FACTOR.
    template <int FACTOR> __device__ __forceinline__ void add_sums(int (&c)[4]) const {
        constexpr u32 ALL = (u32)(FACTOR & 0xff) * 0x01010101u;
        static_assert(FACTOR >= -128 && FACTOR < 128, "a factor is a byte");
        const u32 a[4] = {ALL, ALL, ALL, ALL};
        mma_signed_bytes(c, a, b[0][0], b[0][1]);
        mma_signed_bytes(c, a, b[1][0], b[1][1]);
    }
    // Onto c, codes of blocks B and B + 1 of two rows times x.
    template <class P, int B, class Chunk> __device__ __forceinline__ void add_products(int (&c)[4], const Chunk& first, const Chunk& second) const {
        half<P, B, 0>(c, first, second);
        half<P, B, 1>(c, first, second);
    }
    template <class P, int B, int H, class Chunk> __device__ __forceinline__ void half(int (&c)[4], const Chunk& first, const Chunk& second) const {
        const u32 a[4] = {code_bytes<P, B, H>(first), code_bytes<P, B, H>(second), code_bytes<P, B + 1, H>(first), code_bytes<P, B + 1, H>(second)};
        mma_bytes(c, a, b[H][0], b[H][1]);
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
