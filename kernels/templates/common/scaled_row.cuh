// One token's activations, each 32 columns times a power of two, so that tensor cores take codes with fewer instructions than as 16-bit
// floats of x's type: x = n · s, |n| <= 2^14. Two floats of each 32 columns come with them: s, and the sum of x times a factor.
//
// Codes that are whole numbers are multiplied as bytes, four a word, by n as a whole number: that rounds by at most 2^-14 of the largest of the
// 32, where bf16 rounds each by 2^-9 of itself. n is 256 · high + low, two digits of 8 bits, and these are neighbouring columns of the
// tensor core's B, of which one token would leave seven of eight unused. Sums of codes times digits are exact. Groups of 16 columns use the
// others of the eight: short_groups.cuh.
//
// Codes of 8-bit floats become f16 by an instruction for two (from sm_89 on); n is f16, too, in which that of a bf16 is exact unless it
// is 2^-28 of the largest or less.

// c[16, 8] += a[16, 32] b[32, 8], of bytes, those of b signed.
__device__ __forceinline__ void mma_bytes(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 { %0,%1,%2,%3}, { %4,%5,%6,%7}, { %8,%9}, { %0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
// The same, those of a signed, too.
__device__ __forceinline__ void mma_signed_bytes(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 { %0,%1,%2,%3}, { %4,%5,%6,%7}, { %8,%9}, { %0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
// Two 8-bit floats of the lower or the upper half of a word as f16.
template <int KIND, int UPPER> __device__ __forceinline__ u32 eights_as_f16(u32 word) {
    u32 two = 0;
#if __CUDA_ARCH__ >= 890
    const u16 half = (u16)(UPPER ? word >> 16 : word);
    if constexpr (KIND == E4M3) asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"(half));
    else asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(two) : "h"(half));
#endif
    return two;
}

// Whether codes of P are for this.
template <class P> __device__ __forceinline__ constexpr bool takes_scaled_row() {
#if __CUDA_ARCH__ >= 890
    constexpr bool EIGHTS = P::KIND == E4M3 || P::KIND == E5M2;
#else
    constexpr bool EIGHTS = false;
#endif
    return P::KIND == WHOLE ? P::GROUP == 16 || P::GROUP % 32 == 0 : EIGHTS && P::GROUP % 32 == 0;
}

// What a plane's word has of the codes of `code_bytes`, brought to bit ABOVE of each byte, as planes before it have the bits below.
template <int BITS, int ABOVE, int B, int HALF> __device__ __forceinline__ u32 plane_bytes(u32 w) {
    return moved<plane_bit(BITS, B, HALF), ABOVE>(w) & (((1u << BITS) - 1) << ABOVE) * 0x01010101u;
}
// Pairs HALF and HALF + 2 of block B of 32 columns as bytes: both first ones, both second ones. They lie so in each plane, in bytes side by side.
template <class P, int B, int HALF, class Chunk> __device__ __forceinline__ u32 code_bytes(const Chunk& c) {
    u32 bytes = plane_bytes<P::BITS0, 0, B, HALF>(c.w[B][0]);
    if constexpr (P::PLANES > 1) bytes |= plane_bytes<P::BITS1, P::BITS0, B, HALF>(c.w[B][1]);
    if constexpr (P::PLANES > 2) bytes |= plane_bytes<P::BITS2, P::BITS0 + P::BITS1, B, HALF>(c.w[B][2]);
    return bytes;
}

// Eight columns of x, u of all, with those of the three lanes beside it: n to `numbers` in shared memory, as lanes multiply them, if they are
// `inside`, and 32 columns' two floats to `floats`. Of whole numbers 64 columns are a line of 128 bytes: high digits, then low ones, of each
// 16 bytes of a lane's quad; of f16 32 columns are 64 bytes, 16 of a quad.
template <class P, class E> __device__ __forceinline__ void store_scaled(u8* numbers, float* floats, const Vec16& x, int u, bool inside, float factor) {
    const int j = u % 4;                               // the lane's pair of each quad
    float v[8], most = 0, sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) v[2 * i] = low<E>(x.w[i]), v[2 * i + 1] = high<E>(x.w[i]);
#pragma unroll
    for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(v[i])), sum += v[i];
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
        sum += __shfl_xor_sync(0xffffffffu, sum, d);
    }
    const u32 exponent = max(__float_as_uint(most) >> 23, 14u) - 13;   // of s, so that the largest is below 2^14 s
    const float inverse = __uint_as_float((254 - exponent) << 23);
    u32 pairs[4];                                      // of a quad each: low and high digit of the first one, and of the second one; or both as f16
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const float first = v[2 * q] * inverse, second = v[2 * q + 1] * inverse;
        if constexpr (P::KIND == WHOLE) pairs[q] = __byte_perm(__float2int_rn(first) + 128, __float2int_rn(second) + 128, 0x5410) ^ 0x00800080;
        else pairs[q] = round2(first, second, f16{});
    }
    // Words are of pairs j and j + 2, or of f16 of neighbouring ones: two lanes make those of two quads each.
    constexpr int APART = P::KIND == WHOLE ? 2 : 1;
    const bool later = j & APART;
    const int q0 = later ? 2 : 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 own = later ? pairs[2 + i] : pairs[i], other = __shfl_xor_sync(0xffffffffu, later ? pairs[i] : pairs[2 + i], APART);
        const u32 a = later ? other : own, b = later ? own : other;
        if (!inside) continue;
        if constexpr (P::KIND == WHOLE) {
            u8* const to = numbers + u / 8 * 128 + (q0 + i) * 16 + u / 4 % 2 * 8 + j % 2 * 4;
            *(u32*)to = __byte_perm(a, b, 0x7351), *(u32*)(to + 64) = __byte_perm(a, b, 0x6240);
        } else {                                       // as bytes of codes lie: the second pair's first
            u32* const to = (u32*)(numbers + u / 4 * 64 + (q0 + i) * 16 + j / 2 * 8);
            to[0] = __byte_perm(a, b, 0x1054), to[1] = __byte_perm(a, b, 0x3276);
        }
    }
    // What is not finite makes the scale so.
    if (inside && j == 0) floats[u / 4 * 2] = __uint_as_float(exponent << 23) + (sum - sum), floats[u / 4 * 2 + 1] = sum * factor;
}
