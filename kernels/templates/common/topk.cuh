// The choice of a token's experts, by one warp.

// Orders as f64::total_cmp does; 0 is below all.
__device__ __forceinline__ u32 ordered(float x) {
    const u32 u = __float_as_uint(x);
    return u >> 31 ? ~u : u | 0x80000000u;
}
// The index of the largest of n keys, the lowest of several.
__device__ __forceinline__ int warp_argmax(const u32* keys, int n) {
    u32 best = 0, at = 0xffffffffu;
    for (int i = threadIdx.x % 32; i < n; i += 32)
        if (at == 0xffffffffu || keys[i] > best) best = keys[i], at = i;
#if __CUDA_ARCH__ >= 800
    u32 largest, lowest;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(best));
    asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(lowest) : "r"(best == largest ? at : 0xffffffffu));
    return (int)lowest;
#else
    u64 key = (u64)best << 32 | (u32)~at;
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        const u64 other = __shfl_xor_sync(0xffffffffu, key, d);
        if (other > key) key = other;
    }
    return (int)~(u32)key;
#endif
}
// The largest of n keys is taken, and so is no longer there.
__device__ __forceinline__ int take_largest(u32* keys, int n) {
    const int best = warp_argmax(keys, n);
    __syncwarp();
    if (threadIdx.x % 32 == 0) keys[best] = 0;
    __syncwarp();
    return best;
}

// Calls f(j, expert), in all lanes, for the K experts of the highest choice(expert), highest first. `keys` holds
// E + GROUPS values in shared memory.
template <int E, int K, int GROUPS, int KEEP, class Choice, class F>
__device__ __forceinline__ void warp_topk(u32* keys, Choice choice, F f) {
    const int lane = threadIdx.x % 32;
    for (int e = lane; e < E; e += 32) keys[e] = ordered(choice(e));
    if constexpr (GROUPS > 1) {
        constexpr int SIZE = E / GROUPS;
        const float lowest = __int_as_float(0xff800000);
        u32* ranks = keys + E;
        for (int g = lane; g < GROUPS; g += 32) {
            float best = lowest, second = lowest;
            for (int e = g * SIZE; e < (g + 1) * SIZE; e++) {
                const float v = choice(e);
                second = fmaxf(second, fminf(best, v));
                best = fmaxf(best, v);
            }
            ranks[g] = ordered(SIZE > 1 ? best + second : best);
        }
        __syncwarp();
        for (int i = 0; i < KEEP; i++) take_largest(ranks, GROUPS);
        for (int e = lane; e < E; e += 32)
            if (ranks[e / SIZE] != 0) keys[e] = ordered(lowest);
    }
    __syncwarp();
    for (int j = 0; j < K; j++) {
        const int e = take_largest(keys, E);
        f(j, e);
    }
}
