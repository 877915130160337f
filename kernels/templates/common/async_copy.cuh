// Copies from global to shared memory, 16 bytes each, that a thread does not wait for, and reading what they brought.
__device__ __forceinline__ void copy16_async(u32 to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
#endif
}
__device__ __forceinline__ void copy4_async(u32 to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from));
#endif
}
__device__ __forceinline__ void copy_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;");
#endif
}
template <int LEFT> __device__ __forceinline__ void copy_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}
__device__ __forceinline__ Vec16 load16_shared(u32 p) {
    Vec16 v;
    asm volatile("ld.shared.v4.u32 { %0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "r"(p));
    return v;
}
__device__ __forceinline__ void load8_shared(u32 p, u32& a, u32& b) {
    asm volatile("ld.shared.v2.u32 { %0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(p));
}
__device__ __forceinline__ u32 load4_shared(u32 p) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(p));
    return v;
}
__device__ __forceinline__ u32 load2_shared(u32 p) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(p));
    return v;
}
__device__ __forceinline__ u32 load1_shared(u32 p) {
    u32 v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(p));
    return v;
}
// A signed byte.
__device__ __forceinline__ u32 load1_signed_shared(u32 p) {
    int v;
    asm volatile("ld.shared.s8 %0, [%1];" : "=r"(v) : "r"(p));
    return (u32)v;
}
