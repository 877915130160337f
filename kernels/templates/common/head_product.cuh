// 16 rows of a head's w[N, K] times NT * 8 tokens by `mma.sync`, in 16-bit types, for few tokens: nothing passes through
// shared memory but what SPLIT warps, which part K, have summed. Rows of w are the tensor core's M and tokens its N. Which 16
// columns it multiplies at once is free as long as both operands agree, so a lane reads 16 bytes of a row at a time: of 32
// columns, lane 4r + i has columns 8i to 8i + 7, the first four in the first product.
__device__ __forceinline__ void head_mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, bf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void head_mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, f16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// `w` begins with the first of the rows, `from(t)` is where token t's K values of x begin, and `put(row, t, sum)` gets the sums.
// All warps of the block must call; weights are asked for before the kernel before has ended.
template <int K, int NT, int SPLIT, class E, class From, class Put>
__device__ __forceinline__ void head_product(const E* w, From from, int t0, int tokens, Put put) {
    constexpr int CHUNKS = K / 32, MINE = CHUNKS / SPLIT, HELD = MINE < 4 ? MINE : 4;
    static_assert(K % (32 * SPLIT) == 0, "columns of a warp");
    const int lane = threadIdx.x % 32, part = threadIdx.x / 32 % SPLIT, group = lane / 4, quad = lane % 4;
    const E* const rows = w + group * K + part * 32 + quad * 8;
    Vec16 a[HELD][2];
    const auto fetch = [&](int c0) {
#pragma unroll
        for (int j = 0; j < HELD; j++)
            if (c0 + j < MINE) {
                a[j][0] = load16_stream(rows + (c0 + j) * (32 * SPLIT));
                a[j][1] = load16_stream(rows + 8 * K + (c0 + j) * (32 * SPLIT));
            }
    };
    fetch(0);
    pdl_launch();
    pdl_wait();
    const E* x[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) x[n] = from(min(t0 + n * 8 + group, tokens - 1)) + part * 32 + quad * 8;
    float sums[NT][4] = {};
#pragma unroll
    for (int c0 = 0; c0 < MINE; c0 += HELD) {
        Vec16 b[HELD][NT];
#pragma unroll
        for (int j = 0; j < HELD; j++)
#pragma unroll
            for (int n = 0; n < NT; n++)
                if (c0 + j < MINE) b[j][n] = load16(x[n] + (c0 + j) * (32 * SPLIT));
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            if (c0 + j >= MINE) continue;
            const Vec16 &top = a[j][0], &bottom = a[j][1];
#pragma unroll
            for (int n = 0; n < NT; n++) {
                head_mma(sums[n], top.w[0], bottom.w[0], top.w[1], bottom.w[1], b[j][n].w[0], b[j][n].w[1], E{});
                head_mma(sums[n], top.w[2], bottom.w[2], top.w[3], bottom.w[3], b[j][n].w[2], b[j][n].w[3], E{});
            }
        }
        if (c0 + HELD < MINE) fetch(c0 + HELD);
    }
    // A lane has rows r and r + 8 of tokens 2i and 2i + 1.
    if constexpr (SPLIT == 1) {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (t0 + n * 8 + quad * 2 + j % 2 < tokens) put(group + j / 2 * 8, t0 + n * 8 + quad * 2 + j % 2, sums[n][j]);
    } else {
        __shared__ float parts[SPLIT][NT * 128];
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) parts[part][(quad * 2 + j % 2 + n * 8) * 16 + group + j / 2 * 8] = sums[n][j];
        __syncthreads();
        for (int i = threadIdx.x; i < NT * 128; i += SPLIT * 32) {
            float sum = 0.0f;
#pragma unroll
            for (int k = 0; k < SPLIT; k++) sum += parts[k][i];
            if (t0 + i / 16 < tokens) put(i % 16, t0 + i / 16, sum);
        }
    }
}
