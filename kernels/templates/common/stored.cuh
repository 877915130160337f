// Elements as weights are stored, at any alignment, and whole numbers as encodings compute with them:
// the same as crates/ir/src/encoding/, bit for bit.
__device__ __forceinline__ u16 stored_16(const u8* p) { return (u16)(p[0] | p[1] << 8); }
__device__ __forceinline__ u32 stored_32(const u8* p) { return stored_16(p) | (u32)stored_16(p + 2) << 16; }
__device__ __forceinline__ i64 stored_u8(const u8* p) { return *p; }
__device__ __forceinline__ i64 stored_i8(const u8* p) { return (signed char)*p; }
__device__ __forceinline__ i64 stored_u16(const u8* p) { return stored_16(p); }
__device__ __forceinline__ i64 stored_i16(const u8* p) { return (short)stored_16(p); }
__device__ __forceinline__ i64 stored_u32(const u8* p) { return stored_32(p); }
__device__ __forceinline__ i64 stored_i32(const u8* p) { return (int)stored_32(p); }
__device__ __forceinline__ float stored_f16(const u8* p) { return to_f32(f16{stored_16(p)}); }
__device__ __forceinline__ float stored_bf16(const u8* p) { return to_f32(bf16{stored_16(p)}); }
__device__ __forceinline__ float stored_f32(const u8* p) { return __uint_as_float(stored_32(p)); }
__device__ __forceinline__ float stored_f8e4m3(const u8* p) {
    const u32 exponent = *p >> 3 & 15, mantissa = *p & 7;
    // 2^(exponent - 10) (8 + mantissa), or 2^-9 mantissa; no infinities, one NaN of each sign.
    const float magnitude = exponent == 15 && mantissa == 7 ? __uint_as_float(0x7fc00000)
                            : exponent == 0                 ? mantissa * 0.001953125f
                                            : (8 + mantissa) * __uint_as_float((exponent + 117) << 23);
    return *p & 128 ? -magnitude : magnitude;
}
// The upper half of an f16.
__device__ __forceinline__ float stored_f8e5m2(const u8* p) { return to_f32(f16{(u16)(*p << 8)}); }
__device__ __forceinline__ float stored_f8e8m0(const u8* p) {
    return __uint_as_float(*p == 255 ? 0x7fc00000 : *p == 0 ? 1u << 22 : (u32)*p << 23);
}

// The index nearest to i among so many.
__device__ __forceinline__ i64 inside(i64 i, i64 count) { return i < 0 ? 0 : i < count ? i : count - 1; }
// Rounded down, and up; 0 where b is.
__device__ __forceinline__ i64 divide_down(i64 a, i64 b) {
    return b == 0 ? 0 : a / b - (a % b != 0 && (a % b < 0) != (b < 0));
}
__device__ __forceinline__ i64 divide_up(i64 a, i64 b) {
    return b == 0 ? 0 : a / b + (a % b != 0 && (a % b < 0) == (b < 0));
}
__device__ __forceinline__ i64 remainder_of(i64 a, i64 b) { return b == 0 ? 0 : a % b; }
__device__ __forceinline__ i64 whole_abs(i64 a) { return a < 0 ? -a : a; }
__device__ __forceinline__ i64 whole_min(i64 a, i64 b) { return a < b ? a : b; }
__device__ __forceinline__ i64 whole_max(i64 a, i64 b) { return a > b ? a : b; }
__device__ __forceinline__ i64 whole_power(i64 a, i64 b) {
    i64 y = 1;
    for (i64 i = 0; i < inside(b, 64); i++) y *= a;
    return y;
}
