// How items of work, a sequence and a group of heads each, are cut into pieces for the blocks of a step with one token a
// sequence, and how what pieces give is put together. Needs TILE, RESIDENT, PIECES, LEAST_PIECE, SPLIT, HEAD_GROUPS, QHEADS and DV;
// and MERGE, how long it takes to put a piece's sums to others' beside how long a tile takes, 0 where that is nothing.

// Tiles [tile, end) of what sequence b sees, the k-th of `pieces`, for a group of heads.
struct Piece { int b, context, group, k, pieces, tile, end; };

__device__ __forceinline__ int first_tile(int context) { return first_seen(context - 1) / TILE; }
__device__ __forceinline__ int tiles_of(int context) {
    return context > 0 ? (context + TILE - 1) / TILE - first_tile(context) : 0;
}
// The longest piece of an item of n tiles: what has the same length is always cut alike.
__device__ __forceinline__ int piece_of(int n) {
    int piece = LEAST_PIECE;
    while (piece * PIECES < n) piece *= 2;
    return piece;
}
__device__ __forceinline__ Piece plan(const Step* step, int id) {
    const int lane = threadIdx.x % 32, B = step->seqs, each = (B + 31) / 32, from = lane * each, to = min(from + each, B);
    const int* const context = step->context;
    int longest = 0, total = 0;
    for (int b = from; b < to; b++) {
        const int n = tiles_of(context[b]);
        longest = max(longest, n);
        total += n;
    }
    longest = __reduce_max_sync(0xffffffffu, longest);
    total = __reduce_add_sync(0xffffffffu, total) * HEAD_GROUPS;
    // limit >= total / slots, so that pieces are fewer than slots + items, which the grid has.
    const int slots = RESIDENT * {{ device.sms }};
    const int cuts = max((int)((float)slots * (float)longest / (float)max(total, 1)), 1);
    int limit = max((longest + cuts - 1) / cuts, SPLIT);
    // One block puts all pieces of an item together: n / limit of them take MERGE n / limit, while each takes limit itself.
    if (MERGE > 0.0f) limit = max(limit, (int)ceilf(sqrtf(MERGE * (float)longest)));
    const auto pieces_of = [&](int b) {
        const int n = tiles_of(context[b]), most = PIECES ? piece_of(n) : limit;
        return (n + most - 1) / most;
    };
    int sum = 0;
    for (int b = from; b < to; b++) sum += pieces_of(b);
    int before = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int x = __shfl_up_sync(0xffffffffu, before, d);
        if (lane >= d) before += x;
    }
    const int wanted = id / HEAD_GROUPS;   // groups of heads next to each other: so is what they read
    const u32 after = __ballot_sync(0xffffffffu, before > wanted);
    if (after == 0) return Piece{0, 0, 0, 0, 1, 0, 0};
    before -= sum;
    int b = from;
    if (lane == __ffs(after) - 1)
        while (before + pieces_of(b) <= wanted) before += pieces_of(b++);
    b = __shfl_sync(0xffffffffu, b, __ffs(after) - 1);
    const int k = wanted - __shfl_sync(0xffffffffu, before, __ffs(after) - 1);
    const int rows = context[b], n = tiles_of(rows), pieces = pieces_of(b), group = id % HEAD_GROUPS;
    const int least = n / pieces, more = n % pieces, tile = k * least + min(k, more);
    return Piece{b, rows, group, k, pieces, tile, tile + least + (k < more)};
}

// Parts [0, pieces) of an item, `stride` floats apart, as one: sums of N columns from d on.
template <int N> struct Sums { float m, l, v[N]; };
template <int N> __device__ __forceinline__ Sums<N> join(const float* parts, i64 stride, int pieces, int head, int d) {
    Sums<N> s{minus_infinity(), 0.0f, {}};
    for (int from = 0; from < pieces; from += 8) {  // 8 at a time: their latencies overlap
        float2 ml[8], v[8][N / 2];
        float top = s.m;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const bool there = from + k < pieces;
            const float* part = parts + (from + k) * stride;
            ml[k] = there ? __ldcg((const float2*)part + head) : make_float2(minus_infinity(), 0.0f);
#pragma unroll
            for (int j = 0; j < N / 2; j++)
                v[k][j] = there ? __ldcg((const float2*)(part + QHEADS * 2 + head * DV + d) + j) : make_float2(0.0f, 0.0f);
        }
#pragma unroll
        for (int k = 0; k < 8; k++) top = fmaxf(top, ml[k].x);
        const float old = ex2(s.m - top);
        s.m = top;
        s.l *= old;
#pragma unroll
        for (int j = 0; j < N; j++) s.v[j] *= old;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float f = ex2(ml[k].x - top);
            s.l += f * ml[k].y;
#pragma unroll
            for (int j = 0; j < N / 2; j++) {
                s.v[j * 2] += f * v[k][j].x;
                s.v[j * 2 + 1] += f * v[k][j].y;
            }
        }
    }
    return s;
}

// Whether this block is the last of an item's `pieces` to come here; all of its threads ask. The counter is then as it was.
__device__ __forceinline__ bool comes_last(u32* counter, int pieces) {
    __shared__ int arrived;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        arrived = (int)atomicAdd(counter, 1);
        __threadfence();
    }
    __syncthreads();
    if (arrived != pieces - 1) return false;
    if (threadIdx.x == 0) *counter = 0;
    return true;
}
