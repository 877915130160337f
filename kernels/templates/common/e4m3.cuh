// Floats of 8 bits with four of exponent and three of mantissa: rounded to nearest, ties to even, and beyond the largest, 448, that.
__device__ __forceinline__ u32 e4m3(float x) {
    const u32 sign = __float_as_uint(x) >> 24 & 128;
    const float magnitude = fminf(fabsf(x), 448.0f);
    const int exponent = max((int)(__float_as_uint(magnitude) >> 23) - 127, -6);
    // In steps of the last bit, from 8 to 16 for normal numbers: 16 is 8 of the next exponent.
    const u32 steps = (u32)rintf(magnitude * __uint_as_float((u32)(130 - exponent) << 23));
    return sign | (((u32)(exponent + 6) << 3) + steps);
}
// Two side by side, the first in the low byte.
__device__ __forceinline__ u32 e4m3x2(float first, float second) {
#if __CUDA_ARCH__ >= 890
    u16 y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(second), "f"(first));
    return y;
#else
    return e4m3(first) | e4m3(second) << 8;
#endif
}
// Four, the first in the lowest byte.
__device__ __forceinline__ u32 e4m3x4(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
    u32 y;
    asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high}; }"
        : "=r"(y) : "f"(a), "f"(b), "f"(c), "f"(d));
    return y;
#else
    return e4m3x2(a, b) | e4m3x2(c, d) << 16;
#endif
}
