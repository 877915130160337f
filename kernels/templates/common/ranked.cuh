// Numbers and where they stand as one number, so that the first of the largest is the largest.
#define NONE __int_as_float(0xff800000)
#define BROKEN 0xff80000000000000ull              // ranked(inf, NO_TOKEN), above all ranks: a row with a NaN

// NaN is no number to choose by, an infinite one is the largest finite one, and -0 is 0.
__device__ __forceinline__ float sane(float v) {
    return v >= -3.4028235e38f ? fminf(v, 3.4028235e38f) + 0.0f : NONE;
}
// A number that is larger the larger `value` is and, of equal ones, the earlier the token.
__device__ __forceinline__ u64 ranked(float value, u32 token) {
    const u32 bits = __float_as_uint(value);
    const u32 key = bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
    return (u64)key << 32 | (u32)~token;
}
__device__ __forceinline__ u32 token_of(u64 rank) { return ~(u32)rank; }
__device__ __forceinline__ float value_of(u64 rank) {
    const u32 key = (u32)(rank >> 32);
    return __uint_as_float(key ^ ((u32)((int)~key >> 31) | 0x80000000u));
}
