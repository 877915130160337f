// Sums of a warpgroup's tile whose K several blocks part between them: each leaves its own in memory, and the last one to do so adds up
// all of them, in the order of K, so that it does not matter which one that is. Four sums of a thread lie side by side, and those of
// the 128 threads after one another.

// `to` is where the thread's first four go.
template <int N> __device__ __forceinline__ void leave_sums(float4* to, const float (&sums)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; j++) __stcg(to + j * 128, make_float4(sums[j][0], sums[j][1], sums[j][2], sums[j][3]));
}
// Whether `others` have left theirs before; `count` is 0 again then, for the next launch. `group` is the warpgroup's number in the block, less
// than GROUPS, and `me` the thread's in the warpgroup. One thread's release and acquire stand for all of them, as barriers are before
// and after it: nobody else needs a fence.
template <int GROUPS> __device__ __forceinline__ bool is_last_to_leave(u32* count, int others, int group, int me) {
    __shared__ u32 left[GROUPS];
    const auto together = [&]() { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); };
    together();
    if (me == 0) asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(left[group]) : "l"(count) : "memory");
    together();
    if (left[group] != others) return false;
    if (me == 0) *count = 0;
    return true;
}
// The sums of `parts` blocks; from(i) is where the thread's first four of part i are.
template <int N, class From> __device__ __forceinline__ void add_left_sums(float (&sums)[N][4], int parts, From from) {
    // Several blocks' at a time: each load takes as long as all of them.
    constexpr int SOME = N < 8 ? N : 8, BLOCKS = 16 / SOME;
#pragma unroll
    for (int c = 0; c < N; c += SOME) {
        float total[SOME][4] = {};
#pragma unroll 1
        for (int first = 0; first < parts; first += BLOCKS) {
            float4 v[BLOCKS][SOME];
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
#pragma unroll
                for (int j = 0; j < SOME; j++) v[b][j] = __ldcg(from(min(first + b, parts - 1)) + (c + j) * 128);
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) {
                if (first + b >= parts) continue;
#pragma unroll
                for (int j = 0; j < SOME; j++)
                    total[j][0] += v[b][j].x, total[j][1] += v[b][j].y, total[j][2] += v[b][j].z, total[j][3] += v[b][j].w;
            }
        }
#pragma unroll
        for (int j = 0; j < SOME; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[c + j][i] = total[j][i];
        asm volatile("" ::: "memory");                 // registers do not hold what all others left
    }
}
