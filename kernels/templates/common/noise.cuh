// The random part of sampling: `Noise` in crates/runtime/src/sampling/noise.rs, number for number. A token's
// noise depends on the key of (seed, position) and the token alone, so that draws depend neither on
// the order in which tokens are looked at nor on the rest of the batch.
__device__ __forceinline__ u32 noise_bits(u32 key0, u32 key1, u32 token) {
    u32 x = token * 0x9e3779b9u + key0;
    x ^= x >> 16; x *= 0x21f0aaadu;
    x ^= x >> 15; x ^= key1; x *= 0x735a2d97u;
    x ^= x >> 15; x *= 0x846ca68bu;
    return x ^ (x >> 16);
}
// -log2 of a draw from the exponential distribution: what is added to a token's log2 probability, the
// largest sum being the choice (Gumbel-max). At most 1 + clz(bits).
__device__ __forceinline__ float noise_of(u32 bits) {
    const float v = ((float)bits + 0.5f) * 2.3283064e-10f;
    // -ln(1 - v): a series where 1 - v would lose digits, of what is left of 1 elsewhere.
    const float near = v * (1.0f + v * (0.5f + v * (0.33333333f + v * (0.25f + v * 0.2f))));
    const float far = -0.69314718f * __log2f(((float)~bits + 0.5f) * 2.3283064e-10f);
    return -__log2f(v < 0.0625f ? near : far);
}
