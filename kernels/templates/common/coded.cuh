// What a packed weight holds, as crates/ir/src/encoding/packing.rs lays it out: units of 8 rows by P::COLUMNS columns, of
// which a lane of a warp has the codes of row lane / 4 that it multiplies. `P` is the text that the compiler writes for the
// weight: sizes, where planes of codes and scales begin in a unit, and what kind of numbers they are.
//
// Codes become 16-bit floats without a conversion: the bits of a whole number u are put in the lowest bits of the mantissa of
// 2^M, M the mantissa's bits, which makes 2^M + u; floats of 8 and 4 bits are put where they are numbers of the same mantissa,
// and multiplied by a power of two. Whole numbers of 8 bits do not fit bf16's mantissa: two floats are made of the halves,
// 2^M + low and 16 (2^M + high), and both are multiplied. What the powers add to a sum, and what was added to a code to
// make it a whole number from 0 on, is OFFSET times the sum of the activations.
enum { WHOLE, E4M3, E5M2, E2M1 };                      // kinds of codes
enum { AS_F16, AS_BF16, AS_F32, AS_U8, AS_I8, AS_E8M0 };   // types of scales

// Bytes of a unit, which is in shared memory or where it is stored: what a warp reads of codes there lies side by side, so no copy is needed.
__device__ __forceinline__ Vec16 unit16(u32 at) { return load16_shared(at); }
__device__ __forceinline__ Vec16 unit16(const u8* at) { return load16_stream(at); }
__device__ __forceinline__ void unit8(u32 at, u32& a, u32& b) { load8_shared(at, a, b); }
__device__ __forceinline__ void unit8(const u8* at, u32& a, u32& b) {
    asm volatile("ld.global.nc.v2.u32 { %0, %1}, [%2];" : "=r"(a), "=r"(b) : "l"(at));
}
__device__ __forceinline__ u32 unit4(u32 at) { return load4_shared(at); }
__device__ __forceinline__ u32 unit4(const u8* at) {
    u32 v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}
__device__ __forceinline__ u32 unit2(u32 at) { return load2_shared(at); }
__device__ __forceinline__ u32 unit2(const u8* at) { return *(const u16*)at; }
__device__ __forceinline__ u32 unit1(u32 at) { return load1_shared(at); }
__device__ __forceinline__ u32 unit1(const u8* at) { return *at; }

template <class E> struct Bits;
// One, and two to the power of MANTISSA, twice.
template <> struct Bits<bf16> { static constexpr int MANTISSA = 7; static constexpr u32 ONE = 0x3f803f80, BASE = 0x43004300; };
template <> struct Bits<f16> { static constexpr int MANTISSA = 10; static constexpr u32 ONE = 0x3c003c00, BASE = 0x64006400; };

// The bits of both halves that are the lowest N from bit AT on, moved from bit FROM; others are not cleared.
template <int FROM, int TO> __device__ __forceinline__ u32 moved(u32 x) {
    if (FROM > TO) return x >> (FROM > TO ? FROM - TO : 0);
    return x << (TO > FROM ? TO - FROM : 0);
}
__device__ __forceinline__ constexpr u32 both(u32 x) { return x << 16 | x; }
// The lowest bit of a pair of a block in a word of a plane of 4, 2 or 1 bits: a byte has two pairs of each of the word's 4 / bits blocks.
__device__ __forceinline__ constexpr int plane_bit(int bits, int block, int pair) { return pair / 2 * 8 + (block % (4 / bits) * 2 + pair % 2) * bits; }
// x & MASK | SET in one instruction: of two constants, compilers make two.
template <u32 MASK, u32 SET> __device__ __forceinline__ u32 masked(u32 x) {
    u32 y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(MASK), "r"(SET));
    return y;
}

// Products of two pairs, exact here.
__device__ __forceinline__ u32 times2(u32 a, u32 b, bf16) {
    u32 y = 0;
#if __CUDA_ARCH__ >= 800
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
    return y;
}
__device__ __forceinline__ u32 times2(u32 a, u32 b, f16) {
    u32 y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

template <class P, class E> struct Codes {
    static constexpr int M = Bits<E>::MANTISSA;
    static constexpr bool FLOATS = P::KIND != WHOLE;
    static constexpr bool HALVED = !FLOATS && P::BITS > M;          // low and high four bits apart
    static constexpr int WORDS = P::BITS == 8 ? 2 : P::PLANES;      // of a lane for 32 columns
    // What codes are multiplied as, more than they are.
    static constexpr float OFFSET = FLOATS ? 0.0f : (HALVED ? 17 << M : 1 << M) + P::ZERO;

    // A lane's words of a chunk of 128 columns, of a unit at `from`.
    struct Chunk { u32 w[4][WORDS]; };
    template <class From> __device__ __forceinline__ static void load(Chunk& c, From from, int chunk, int lane) {
        if constexpr (P::BITS == 8 && P::PLANES == 1) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const Vec16 v = unit16(from + P::AT0 + (chunk * 2 + i) * 512 + lane * 16);
                c.w[2 * i][0] = v.w[0], c.w[2 * i][1] = v.w[1], c.w[2 * i + 1][0] = v.w[2], c.w[2 * i + 1][1] = v.w[3];
            }
        } else {
            plane<P::BITS0, 0>(c, from + P::AT0, chunk, lane);
            if constexpr (P::PLANES > 1) plane<P::BITS1, 1>(c, from + P::AT1, chunk, lane);
            if constexpr (P::PLANES > 2) plane<P::BITS2, 2>(c, from + P::AT2, chunk, lane);
        }
    }
    template <int BITS, int I, class From> __device__ __forceinline__ static void plane(Chunk& c, From at, int chunk, int lane) {
        if constexpr (BITS == 4) {
            const Vec16 v = unit16(at + chunk * 512 + lane * 16);
#pragma unroll
            for (int b = 0; b < 4; b++) c.w[b][I] = v.w[b];
        } else if constexpr (BITS == 2) {
            u32 v[2];
            unit8(at + chunk * 256 + lane * 8, v[0], v[1]);
#pragma unroll
            for (int b = 0; b < 4; b++) c.w[b][I] = v[b / 2];
        } else {
            const u32 v = unit4(at + chunk * 128 + lane * 4);
#pragma unroll
            for (int b = 0; b < 4; b++) c.w[b][I] = v;
        }
    }

    // Pair PAIR of block B of 32 columns as two floats; of HALVED codes those of the low (PART 0) or high four bits.
    template <int B, int PAIR, int PART> __device__ __forceinline__ static u32 pair(const Chunk& c) {
        if constexpr (P::KIND == E4M3 || P::KIND == E5M2) {
            // In the upper byte of each half: sign, exponent, mantissa.
            const u32 t = PAIR % 2 ? c.w[B][PAIR / 2] << 8 : c.w[B][PAIR / 2];
            constexpr int MANTISSA = P::KIND == E4M3 ? 3 : 2;
            if constexpr (P::KIND == E5M2 && M == 10) return t & 0xff00ff00;
            constexpr int SHIFT = 8 - (M - MANTISSA);               // from bit 8 to the lowest bit of the mantissa
            const u32 r = (moved<SHIFT < 0 ? 0 : SHIFT, 0>(t) & both(0x7fu << (M - MANTISSA))) | (t & 0x80008000);
            constexpr u32 POWER = M == 7 ? (P::KIND == E4M3 ? 0x7b80 : 0x7780) : 0x5c00;
            return times2(r, both(POWER), E{});
        } else if constexpr (P::KIND == E2M1) {
            const u32 r = (moved<PAIR * 4, M - 1>(c.w[B][0]) & both(7u << (M - 1))) | (moved<PAIR * 4 + 3, 15>(c.w[B][0]) & 0x80008000);
            return times2(r, both(M == 7 ? 0x7e80 : 0x7400), E{});
        } else if constexpr (HALVED) {
            return masked<both(15), Bits<E>::BASE + (PART ? both(4u << M) : 0)>(moved<PAIR * 4, 0>(c.w[B][PART]));
        } else {
            u32 r = masked<both((1u << P::BITS0) - 1), Bits<E>::BASE>(moved<plane_bit(P::BITS0, B, PAIR), 0>(c.w[B][0]));
            if constexpr (P::PLANES > 1)
                r |= moved<plane_bit(P::BITS1, B, PAIR), P::BITS0>(c.w[B][1]) & both(((1u << P::BITS1) - 1) << P::BITS0);
            if constexpr (P::PLANES > 2)
                r |= moved<plane_bit(P::BITS2, B, PAIR), P::BITS0 + P::BITS1>(c.w[B][2]) & both(((1u << P::BITS2) - 1) << (P::BITS0 + P::BITS1));
            return r;
        }
    }
};

// A power of two by its exponent's byte: that of 0 has no leading one, and 255 is not a number.
__device__ __forceinline__ float power_of(u32 shifted) {
    const float x = __uint_as_float(max(shifted, 0x00400000u));
    return fmaf(x, 0.0f, x);                           // of infinity not a number, of others themselves
}
__device__ __forceinline__ float widened(u32 bits, int type) {
    if (type == AS_E8M0) return power_of((bits & 0xff) << 23);
    if (type == AS_F16) return to_f32(f16{(u16)bits});
    if (type == AS_BF16) return __uint_as_float(bits << 16);
    if (type == AS_U8) return (float)(bits & 0xff);
    if (type == AS_I8) return (float)(signed char)bits;
    return __uint_as_float(bits);
}
static constexpr __device__ int bytes_of(int type) { return type == AS_F32 ? 4 : type == AS_F16 || type == AS_BF16 ? 2 : 1; }

// The scales (or minimums) of a lane's row of a unit: GROUPS numbers of TYPE at AT, a row's after another, times one of OUTER
// of the row at OUTER_AT, if OUTER is not negative.
template <int GROUPS, int TYPE, int AT, int OUTER, int OUTER_AT> struct Scales {
    static constexpr int BYTES = bytes_of(TYPE), ROW = GROUPS * BYTES, WORDS = (ROW + 3) / 4;
    u32 w[WORDS];
    float outer;
    template <class From> __device__ __forceinline__ void load(From unit, int row) {
        const From at = unit + AT + row * ROW;
        if constexpr (ROW % 4 != 0) w[0] = ROW == 2 ? unit2(at) : unit1(at);
        else
#pragma unroll
            for (int i = 0; i < WORDS; i++) w[i] = unit4(at + i * 4);
        outer = 1;
        if constexpr (OUTER >= 0) {
            const From o = unit + OUTER_AT + row * bytes_of(OUTER);
            outer = widened(OUTER == AS_F32 ? unit4(o) : unit2(o), OUTER);
        }
    }
    template <int G> __device__ __forceinline__ float get() const {
        const u32 word = w[G * BYTES / 4];
        if constexpr (TYPE == AS_F32) return OUTER >= 0 ? __uint_as_float(word) * outer : __uint_as_float(word);
        // Two mantissas side by side: the byte below 2^23, whose product with `outer` is one of 24 bits or is rounded once.
        if constexpr (TYPE == AS_U8) {
            const float above = __uint_as_float(__byte_perm(word, 0x4b000000, 0x7440 + G % 4));
            return fmaf(above, outer, -8388608.0f * outer);
        }
        if constexpr (TYPE == AS_I8) {
            const float above = __uint_as_float(__byte_perm(word ^ 0x80808080, 0x4b000000, 0x7440 + G % 4));
            return (above - 8388736.0f) * outer;
        }
        if constexpr (TYPE == AS_E8M0) {
            const float inner = power_of(moved<G % 4 * 8, 23>(word) & 0x7f800000);
            return OUTER >= 0 ? inner * outer : inner;
        }
        const u32 half = G % 2 ? word >> 16 : word & 0xffff;
        const float inner = TYPE == AS_BF16 ? __uint_as_float(G % 2 ? word & 0xffff0000 : word << 16) : to_f32(f16{(u16)half});
        return OUTER >= 0 ? inner * outer : inner;
    }
    // The same with an outer scale that is not finite, too: `get` has infinity less infinity there.
    template <int G> __device__ __forceinline__ float stored() const {
        if constexpr (TYPE == AS_U8) return (__uint_as_float(__byte_perm(w[G / 4], 0x4b000000, 0x7440 + G % 4)) - 8388608.0f) * outer;
        return get<G>();
    }
};

// a * b + c of pairs, rounded once.
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c, bf16) {
    u32 y = 0;
#if __CUDA_ARCH__ >= 800
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
#endif
    return y;
}

// ---- values of codes, for products of many tokens: code * scale - minimum, rounded to activations' type. In f32, as a decoded copy
// of the weight is (but for a product and a difference that are fused here); with bf16 and no minimum two at a time, which takes fewer
// instructions, and these are what such products wait for: the scale is the sum of two bf16 there, of which the second is what the
// first lacks. With a scale that is one bf16 the squared error of three small checkpoints' logits was twice as large.
__device__ __forceinline__ u32 sum2(u32 a, u32 b, bf16) {
    u32 y = 0;
#if __CUDA_ARCH__ >= 800
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(Bits<bf16>::ONE), "r"(b));
#endif
    return y;
}
__device__ __forceinline__ u32 sum2(u32 a, u32 b, f16) {
    u32 y;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

template <class P, class E> struct Values : Codes<P, E> {
    typedef Codes<P, E> C;
    static constexpr int M = C::M, GROUPS = P::COLUMNS / P::GROUP;
    static constexpr bool MINIMUM = P::MINIMUM >= 0;
    typedef Scales<GROUPS, P::SCALE, P::SCALE_AT, P::SCALE_OUTER, P::SCALE_OUTER_AT> Scale;
    typedef Scales<GROUPS, MINIMUM ? P::MINIMUM : AS_F32, P::MINIMUM_AT, P::MINIMUM_OUTER, P::MINIMUM_OUTER_AT> Minimum;

    // The scales and minimums of a lane's row of a unit.
    struct Row { Scale scale; Minimum minimum; };
    template <class From> __device__ __forceinline__ static void load_row(Row& row, From unit, int r) {
        row.scale.load(unit, r);
        if constexpr (MINIMUM) row.minimum.load(unit, r);
    }
    static constexpr u32 MINUS = 0x80008000;
    // Pair PAIR of block B, less its zero: exact, as a whole number's bits fit the mantissa.
    template <int B, int PAIR> __device__ __forceinline__ static u32 codes(const typename C::Chunk& c) {
        if constexpr (C::FLOATS) {
            return C::template pair<B, PAIR, 0>(c);
        } else if constexpr (C::HALVED) {
            constexpr int HIGH = P::ZERO / 16, LOW = P::ZERO % 16;
            constexpr u32 ABOVE = Bits<E>::BASE + both((4u << M) + HIGH + (LOW == 0 ? 8 : 0));   // and 128 that the low half has too many
            const u32 high = sum2(C::template pair<B, PAIR, 1>(c), ABOVE | MINUS, E{});
            u32 low = C::template pair<B, PAIR, 0>(c);
            if constexpr (LOW != 0) low = sum2(low, (Bits<E>::BASE + both(LOW)) | MINUS, E{});
            return sum2(high, low, E{});
        } else {
            return sum2(C::template pair<B, PAIR, 0>(c), (Bits<E>::BASE + both(P::ZERO)) | MINUS, E{});
        }
    }
    // Four pairs of a lane are a tensor core's step of 16 columns, half H of block B of chunk CHUNK, of rows r and r + 8.
    template <int CHUNK, int B, int H> __device__ __forceinline__ static void step(u32 (&a)[4], const typename C::Chunk (&c)[2], const Row (&row)[2]) {
        constexpr int G = (CHUNK * 128 + B * 32 + H * 16) / P::GROUP;
        pair<G, B, 2 * H>(a[0], c[0], row[0]);
        pair<G, B, 2 * H>(a[1], c[1], row[1]);
        pair<G, B, 2 * H + 1>(a[2], c[0], row[0]);
        pair<G, B, 2 * H + 1>(a[3], c[1], row[1]);
    }
    // What was lost when `of` was rounded to the halves of `rounded`, rounded itself, in both halves.
    __device__ __forceinline__ static u32 lacking(float of, u32 rounded) {
        const float rest = of - low<E>(rounded);
        return round2(rest, rest, E{});
    }
    template <int G, int B, int PAIR> __device__ __forceinline__ static void pair(u32& to, const typename C::Chunk& c, const Row& row) {
        const float scale = row.scale.template get<G>();
        if constexpr (MINIMUM) {
            // Whole numbers that fit the mantissa keep their OFFSET, which is subtracted with the minimum, once a group.
            constexpr bool KEEPS_OFFSET = !C::FLOATS && !C::HALVED;
            u32 code;
            if constexpr (KEEPS_OFFSET) code = C::template pair<B, PAIR, 0>(c);
            else code = codes<B, PAIR>(c);
            const float less = fmaf(KEEPS_OFFSET ? -C::OFFSET : 0.0f, scale, -row.minimum.template get<G>());
            to = round2(fmaf(low<E>(code), scale, less), fmaf(high<E>(code), scale, less), E{});
        } else if constexpr (M == 7) {
            const u32 code = codes<B, PAIR>(c);
            const u32 scales = round2(scale, scale, E{});
            constexpr bool LOSES_NOTHING = (P::SCALE == AS_BF16 || P::SCALE == AS_E8M0) && P::SCALE_OUTER < 0;
            if constexpr (LOSES_NOTHING) to = times2(code, scales, E{});
            else to = fma2(code, scales, times2(code, lacking(scale, scales), E{}), E{});
        } else {
            const u32 code = codes<B, PAIR>(c);
            to = round2(low<E>(code) * scale, high<E>(code) * scale, E{});
        }
    }
};

// ---- where a code has its bits of plane i: the word of 32 bits in its unit, in bytes, and the lowest bit there.
struct Place { int word, bit; };
template <class P> __device__ __forceinline__ constexpr int plane_bits(int i) { return i == 0 ? P::BITS0 : i == 1 ? P::BITS1 : P::BITS2; }
template <class P> __device__ __forceinline__ Place place_of(int i, int row, int column) {
    const int block = column / 32, j = column % 32, bits = plane_bits<P>(i), at = i == 0 ? P::AT0 : i == 1 ? P::AT1 : P::AT2;
    const int quad = j % 8 / 2, pair = j / 8;          // a lane has two neighbours of each eight columns
    const int lane = row * 4 + quad;
    if (bits == 8) return Place{at + block / 2 * 512 + lane * 16 + block % 2 * 8 + pair / 2 * 4, j % 2 * 16 + 8 - pair % 2 * 8};
    const int blocks = 4 / bits, b = block % 4;        // blocks of a word
    return Place{at + (block / 4 * 32 + lane) * (16 / blocks) + b / blocks * 4, j % 2 * 16 + plane_bit(bits, b, pair)};
}

// ---- one value, slowly: the same bits as what is stored decodes to.
template <class P> __device__ __forceinline__ float packed_factor(const u8* unit, int row, int group, int type, int at, int outer, int outer_at) {
    const int groups = P::COLUMNS / P::GROUP, size = bytes_of(type);
    const auto read = [&](const u8* p, int type) {
        const int size = bytes_of(type);
        return widened(size == 1 ? *p : size == 2 ? *(const u16*)p : *(const u32*)p, type);
    };
    const float inner = read(unit + at + (row * groups + group) * size, type);
    return outer < 0 ? inner : __fmul_rn(read(unit + outer_at + row * bytes_of(outer), outer), inner);
}
template <class P> __device__ __forceinline__ float packed_value(const u8* w, int columns, i64 n, int k) {
    const int across = (columns + P::COLUMNS - 1) / P::COLUMNS;
    const u8* const unit = w + (n / 8 * across + k / P::COLUMNS) * P::BYTES;
    const int row = n % 8, column = k % P::COLUMNS;
    u32 code = 0;
    int above = 0;
#pragma unroll
    for (int i = 0; i < P::PLANES; i++) {
        const int bits = plane_bits<P>(i);
        const Place place = place_of<P>(i, row, column);
        code |= (*(const u32*)(unit + place.word) >> place.bit & ((1u << bits) - 1)) << above;
        above += bits;
    }
    float value = (float)((int)code - P::ZERO);
    const u8 byte = (u8)code;
    if (P::KIND == E4M3) value = stored_f8e4m3(&byte);
    if (P::KIND == E5M2) value = stored_f8e5m2(&byte);
    if (P::KIND == E2M1) {
        const u32 magnitude = code & 7;                // 0, 0.5, 1, 1.5, 2, 3, 4, 6
        value = magnitude < 4 ? 0.5f * magnitude : magnitude < 6 ? (float)magnitude - 2 : magnitude == 6 ? 4.0f : 6.0f;
        if (code & 8) value = -value;
    }
    const int group = column / P::GROUP;
    const float scaled = __fmul_rn(value, packed_factor<P>(unit, row, group, P::SCALE, P::SCALE_AT, P::SCALE_OUTER, P::SCALE_OUTER_AT));
    return P::MINIMUM < 0 ? scaled
                          : __fsub_rn(scaled, packed_factor<P>(unit, row, group, P::MINIMUM, P::MINIMUM_AT, P::MINIMUM_OUTER, P::MINIMUM_OUTER_AT));
}
