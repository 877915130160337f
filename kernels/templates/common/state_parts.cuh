// What kernels of recurrences over matrices share, where four warps walk from chunk to chunk and four make ready: see `state_chunks.cuh`.
// Barriers: a chunk is made, what was made has been used (two each), makers among themselves, and warps that have a half of the same columns.
constexpr int READY = 1, FREE = 3, MAKERS = 5, HALF = 6;
__device__ __forceinline__ void meet(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
__device__ __forceinline__ void pass(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

// Which 16 tokens a half of the state's keys yields the reads of, as the n-th: as many products each.
constexpr int OWN = BLOCKS / 2;
__device__ constexpr int own_block(int n, int half) { return n == 0 ? half : 3 - half; }
__device__ __forceinline__ float2 pair_at(const float* x, int tile) { return *(const float2*)(x + tile * 8 + threadIdx.x % 4 * 2); }
// The inverse of a block on the diagonal, of I + A where that holds -A, takes its place: a column a lane.
__device__ __forceinline__ void invert_diagonal(u8* made, const float* diagonal) {
    const int block = threadIdx.x / 32 - WARPS, lane = threadIdx.x % 32, column = lane % 16;
    if (block >= BLOCKS) return;
    const float4* const a = (const float4*)diagonal + block * 64;
    bf16* const to = (bf16*)(made + UNDONE_AT + lane / 16 * PART) + block * 16 * A_ROW + block * 16 + column;
    float x[16] = {};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float sums[4] = {i == column ? 1.0f : 0.0f};
#pragma unroll
        for (int l = 0; l < i; l += 4) {
            const float4 row = a[i * 4 + l / 4];
            sums[0] += row.x * x[l], sums[1] += row.y * x[l + 1], sums[2] += row.z * x[l + 2], sums[3] += row.w * x[l + 3];
        }
        x[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        const bf16 rounded = from_f32<bf16>(x[i]);
        to[i * A_ROW] = lane < 16 ? rounded : from_f32<bf16>(x[i] - to_f32(rounded));
    }
}
