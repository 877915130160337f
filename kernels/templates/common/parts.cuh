// Rows that are cut into parts, a block each; the last block of a row to finish puts them together.
// Needs `x`, `p.part` and `block` (p.part = 16 * block).
#define COLS {{ x.cols }}
#define PARTS ((COLS + {{ p.part }} - 1) / {{ p.part }})
#define HELD 16                                   // elements that a thread holds
#define VECTOR (16 / (int)sizeof({{ x.type }}))   // elements of one load
typedef {{ x.type }} Logit;
{% include "common/ranked.cuh" %}

// Where in the row a thread's `i`th element is.
__device__ __forceinline__ int element(int part, int i) {
    return part * {{ p.part }} + (i / VECTOR * {{ block }} + (int)threadIdx.x) * VECTOR + i % VECTOR;
}
__device__ __forceinline__ void load_vector(const Logit* row, int at, float* v, bool& sound) {
    auto read = [&](float x) { sound &= x == x; return sane(x); };
    if (COLS % VECTOR == 0) {
        union { Vec16 all; Logit one[VECTOR]; } u;
        if (at < COLS) u.all = load16(row + at);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) v[j] = at < COLS ? read(to_f32(u.one[j])) : NONE;
    } else {
#pragma unroll
        for (int j = 0; j < VECTOR; j++) v[j] = at + j < COLS ? read(to_f32(row[at + j])) : NONE;
    }
}
// False if any that this thread holds is NaN.
__device__ __forceinline__ bool load_part(const Logit* row, int part, float (&v)[HELD]) {
    bool sound = true;
#pragma unroll
    for (int i = 0; i < HELD; i += VECTOR) load_vector(row, element(part, i), v + i, sound);
    return sound;
}

// Over the block, all threads get it.
__device__ __forceinline__ u64 block_largest(u64 x) {
    __shared__ u64 of_warps[32];
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        const u64 other = __shfl_xor_sync(0xffffffffu, x, d);
        x = other > x ? other : x;
    }
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = of_warps[threadIdx.x % ({{ block }} / 32)];
#pragma unroll
    for (int d = {{ block }} / 64; d > 0; d >>= 1) {
        const u64 other = __shfl_xor_sync(0xffffffffu, x, d);
        x = other > x ? other : x;
    }
    __syncthreads();
    return x;
}

// Whether this block is the last of its row, which then sees what all of them wrote; leaves the counter
// as it was found.
__device__ __forceinline__ bool last_part(u32* counter) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (PARTS == 1) return true;
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, 1) == PARTS - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}
