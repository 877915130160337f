// Block-quantised weights of GGUF (ggml-common.h): value `i` of the block at `b`.
__device__ __forceinline__ float half_at(const u8* p) { return to_f32(f16{(u16)(p[0] | p[1] << 8)}); }

struct Q4_0 {
    static constexpr int VALUES = 32, BYTES = 18;
    static __device__ __forceinline__ float at(const u8* b, int i) {
        const int q = i < 16 ? b[2 + i] & 15 : b[2 + i - 16] >> 4;
        return half_at(b) * (q - 8);
    }
};
struct Q8_0 {
    static constexpr int VALUES = 32, BYTES = 34;
    static __device__ __forceinline__ float at(const u8* b, int i) { return half_at(b) * (signed char)b[2 + i]; }
};
// Eight groups of 32, each with a scale and a minimum of six bits, packed in 12 bytes.
struct Q4_K {
    static constexpr int VALUES = 256, BYTES = 144;
    static __device__ __forceinline__ float at(const u8* b, int i) {
        const u8 *s = b + 4, *q = b + 16;
        const int g = i / 32;
        const int scale = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
        const int least = g < 4 ? s[g + 4] & 63 : (s[g + 4] >> 4) | (s[g] >> 6) << 4;
        const int byte = q[g / 2 * 32 + i % 32], value = g % 2 ? byte >> 4 : byte & 15;
        return half_at(b) * scale * value - half_at(b + 2) * least;
    }
};
// Sixteen groups of 16 with signed scales; four low bits of each value, then two high ones.
struct Q6_K {
    static constexpr int VALUES = 256, BYTES = 210;
    static __device__ __forceinline__ float at(const u8* b, int i) {
        const int half = i / 128, r = i % 128, quarter = r / 32, l = r % 32;
        const int low = b[half * 64 + l + quarter % 2 * 32] >> (quarter / 2 * 4) & 15;
        const int high = b[128 + half * 32 + l] >> (quarter * 2) & 3;
        const int scale = (signed char)b[192 + half * 8 + r / 16];
        return half_at(b + 208) * scale * ((low | high << 4) - 32);
    }
};
