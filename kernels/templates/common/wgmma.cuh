// Hopper's asynchronous products over shared memory, whose operands lie in rows of 128 bytes (64
// elements), the 16-byte chunks of a row exchanged by its number modulo 8.
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading, u32 stride) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | 1ull << 62;
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Keeps the compiler from using sums before the wait that precedes this.
template <int N> __device__ __forceinline__ void landed(float (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])::"memory");
}
// What this thread has written to shared memory is seen by later products, and by the copy engine.
__device__ __forceinline__ void fence_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
