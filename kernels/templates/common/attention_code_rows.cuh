// Tiles of COLS rows of the cache whose rows are codes, for tensor cores that take 16-bit floats from shared memory: a thread has eight
// columns of a row in registers from when they are asked for until their tile is free, and makes values of them then, which are those that `kv_read`
// yields. Needs COLS, THREADS and place_of, which says where chunk c of row r is in a tile.
template <int DIM> struct CodedRows {
    static constexpr int CHUNKS = DIM / 8, EACH = (COLS * CHUNKS + THREADS - 1) / THREADS;
    uint2 codes[EACH];
    float scale[EACH];
    // Of the rows those from `first` on and before `left` are there; `block` is, in lane i, the cache row at which the i-th 16 of them begin.
    __device__ __forceinline__ void fetch(const u8* plane, int kv, int block, int first, int left) {
        typedef CodedPlane<HKV, DIM> Plane;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int i = threadIdx.x + j * THREADS, r = i / CHUNKS, c = i % CHUNKS;
            const int row = __shfl_sync(0xffffffffu, block, r / 16 % (COLS / 16)) + r % 16;
            codes[j] = make_uint2(0, 0), scale[j] = 0.0f;
            if ((COLS * CHUNKS % THREADS == 0 || r < COLS) && (!WINDOW || r >= first) && r < left) {
                codes[j] = *(const uint2*)(plane + Plane::codes(row, kv) + c * 8);
                scale[j] = *(const float*)(plane + Plane::scale(row, kv));
            }
        }
    }
    __device__ __forceinline__ void put(u32 to) const {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int i = threadIdx.x + j * THREADS, r = i / CHUNKS, c = i % CHUNKS;
            if (COLS * CHUNKS % THREADS != 0 && r >= COLS) continue;
            u32 w[4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 four = half ? codes[j].y : codes[j].x, even = as_bf16<false>(four), odd = as_bf16<true>(four);
                w[2 * half] = pack_pair(low<bf16>(even) * scale[j], low<bf16>(odd) * scale[j]);
                w[2 * half + 1] = pack_pair(high<bf16>(even) * scale[j], high<bf16>(odd) * scale[j]);
            }
            asm volatile("st.shared.v4.u32 [%0], { %1, %2, %3, %4};" ::"r"(to + place_of<DIM>(r, c)), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
        }
    }
};
