// What a product of rows that go to experts adds to product.cuh. `order` has the choices by expert, `starts` where each expert's
// begin (`group_rows`): they are the product's tokens, and a tile of them is of one expert, whose rows of w it takes. Which experts
// have how many is known on the device alone, so a block works out for itself which tiles there are.
template <int COUNT, int TOKENS> struct Experts {
    static constexpr bool GROUPED = true, EIGHT = false, AHEAD = false;
    const u32 *order, *starts;
    u32 choices;                                       // of all tokens
    u32 *rows, *tiles;                                 // in shared memory: where an expert's choices begin, and its tiles of tokens
    struct Early {};
    __device__ __forceinline__ Early early(int, int) const { return Early(); }

    // All threads; what is read was written by launches before.
    __device__ __forceinline__ void setup() {
        __shared__ u32 memory[2][COUNT + 1];
        rows = memory[0], tiles = memory[1];
        for (int e = threadIdx.x; e <= COUNT; e += blockDim.x) rows[e] = min(starts[e], choices);
        __syncthreads();
        if (threadIdx.x < 32) {
            u32 before = 0;
            for (int e0 = 0; e0 <= COUNT; e0 += 32) {
                const int e = e0 + threadIdx.x;
                const u32 own = e < COUNT && rows[e + 1] > rows[e] ? (rows[e + 1] - rows[e] + TOKENS - 1) / TOKENS : 0;
                u32 sum = own;
#pragma unroll
                for (int d = 1; d < 32; d *= 2) {
                    const u32 other = __shfl_up_sync(0xffffffffu, sum, d);
                    if (threadIdx.x >= d) sum += other;
                }
                if (e <= COUNT) tiles[e] = before + sum - own;
                before += __shfl_sync(0xffffffffu, sum, 31);
            }
        }
        __syncthreads();
    }
    __device__ __forceinline__ int token_tiles() const { return tiles[COUNT]; }
    // The expert of a tile of tokens, by halving.
    __device__ __forceinline__ int expert_of(u32 tile) const {
        int low = 0, high = COUNT;                     // tiles[low] <= tile < tiles[high]
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (tiles[middle] <= tile) low = middle;
            else high = middle;
        }
        return low;
    }
};
