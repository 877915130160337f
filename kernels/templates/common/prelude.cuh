// What every kernel sees. No CUDA header: NVRTC needs seconds for them, and none is at hand when
// only NVRTC is installed.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// 16-bit floats are storage: arithmetic is in f32.
struct bf16 { u16 bits; };
struct f16 { u16 bits; };

// By which the copy engine finds tiles of an operand: `TileMap` in crates/codegen/src/plan.rs.
struct alignas(64) TileMap { u64 words[16]; };

// What the host fills in: PAGE, FED, NO_TOKEN, BANNED, SeenToken, TokenPick and Step, as
// crates/codegen/src/cuda/abi.rs defines them.
{{ abi }}
// The row in the cache's planes of row `i` of sequence `b`'s context.
__device__ __forceinline__ i64 cache_row(const Step* step, int b, int i) {
    return (i64)step->blocks[(i64)b * step->block_stride + i / PAGE] * PAGE + i % PAGE;
}

// The row of `rows` that an id picks. An id that is none (of a row of logits without a token, of a
// damaged file) picks the last one: no kernel reads beyond a table.
__device__ __forceinline__ i64 picked_row(i64 id, i64 rows) {
    return (u64)id < (u64)rows ? id : rows - 1;
}

// ---- programmatic dependent launch: a kernel may start before the one before it has ended.
// Before pdl_wait() read only weights and *step, the rest by `guess`; write nothing. Every thread that goes on to read
// or write activations or the cache must call it, and every kernel must call it in some thread of
// every block.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel's blocks may be scheduled as room appears. Once this block needs no more of it.
__device__ __forceinline__ void pdl_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// What *p is likely to be, before pdl_wait(): a launch before may still be about to write it. It is to be read again
// after that, and what was done by a wrong guess done again. It is right if the launch before this one did not write it and
// calls pdl_launch() after its own pdl_wait().
__device__ __forceinline__ u32 guess(const u32* p) {
    u32 v;
    asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// ---- conversion
__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float to_f32(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
template <class D> struct Round;
template <> struct Round<float> {
    static __device__ __forceinline__ float of(float x) { return x; }
};
template <> struct Round<bf16> {
    static __device__ __forceinline__ bf16 of(float x) {
        bf16 y;
#if __CUDA_ARCH__ >= 800
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
        u32 u = __float_as_uint(x);
        y.bits = (u & 0x7fffffff) > 0x7f800000 ? (u16)((u >> 16) | 0x40)
                                               : (u16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
#endif
        return y;
    }
};
template <> struct Round<f16> {
    static __device__ __forceinline__ f16 of(float x) {
        f16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};
// Rounds to nearest even.
template <class D> __device__ __forceinline__ D from_f32(float x) { return Round<D>::of(x); }

// Two 16-bit floats in one register, the first in the low half.
template <class D> __device__ __forceinline__ u32 pack2(float lo, float hi) {
    return (u32)from_f32<D>(lo).bits | ((u32)from_f32<D>(hi).bits << 16);
}
// The same by one instruction, which takes a quarter of the time of two: where halves are taken apart again, the compiler makes two of pack2.
__device__ __forceinline__ u32 round2(float lo, float hi, bf16) {
#if __CUDA_ARCH__ >= 800
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
#else
    return pack2<bf16>(lo, hi);
#endif
}
__device__ __forceinline__ u32 round2(float lo, float hi, f16) {
#if __CUDA_ARCH__ >= 800
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
#else
    return pack2<f16>(lo, hi);
#endif
}
template <class D> __device__ __forceinline__ float low(u32 x) { D d; d.bits = (u16)x; return to_f32(d); }
template <class D> __device__ __forceinline__ float high(u32 x) { D d; d.bits = (u16)(x >> 16); return to_f32(d); }

// ---- 16 bytes at a time
struct alignas(16) Vec16 { u32 w[4]; };
__device__ __forceinline__ Vec16 load16(const void* p) { return *(const Vec16*)p; }
__device__ __forceinline__ void store16(void* p, Vec16 v) { *(Vec16*)p = v; }
// Weights are read once a step: they leave the rest of the cache alone.
__device__ __forceinline__ Vec16 load16_stream(const void* p) {
    Vec16 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 { %0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p));
    return v;
}

// ---- sums over threads
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}
// Over the block, all threads get it; `scratch` holds 32 floats, free for reuse on return.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    const int warps = (blockDim.x + 31) / 32, lane = threadIdx.x % 32;
    x = warp_sum(x);
    if (lane == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = warp_sum(lane < warps ? scratch[lane] : 0.0f);
    __syncthreads();
    return x;
}
__device__ __forceinline__ float block_max(float x, float* scratch) {
    const int warps = (blockDim.x + 31) / 32, lane = threadIdx.x % 32;
    x = warp_max(x);
    if (lane == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = warp_max(lane < warps ? scratch[lane] : __int_as_float(0xff800000));
    __syncthreads();
    return x;
}
