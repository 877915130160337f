// Where heads' rows go, [T * H, DV]. Of a tile of queries row r is head r % GROUP of token r / GROUP, counted from the first row's.
__device__ __forceinline__ int query_row(int r) { return r / GROUP * H + r % GROUP; }
{% if not rounds %}
struct Output {
    static constexpr int COLUMNS = 2;              // that a thread has of a head
    Q* y;
    const Step* step;
    // Columns from d on of a row.
    __device__ __forceinline__ void put(i64 row, int d, const float (&v)[COLUMNS]) const {
        *(u32*)(y + row * DV + d) = pack_pair(v[0], v[1]);
    }
    // Of a tile that begins at row0 a warp's 16 rows from `first` on, of which those before `rows` are there; chunk(r, c) has eight
    // columns of the r-th of them.
    template <class Chunk> __device__ __forceinline__ void put_tile(i64 row0, int first, int rows, int lane, Chunk chunk) const {
        for (int i = lane; i < 16 * (DV / 8); i += 32) {
            const int r = i / (DV / 8), c = i % (DV / 8);
            if (first + r < rows) store16(y + (row0 + query_row(first + r)) * DV + c * 8, chunk(r, c));
        }
    }
};
{% else %}
{% if not k_state.quantised %}
{% include "common/e4m3.cuh" %}
{% endif %}
{% include "common/quantise.cuh" %}
static_assert(DV == 128, "a head is a group of columns with a scale");
// As codes and scales, which are those of all of the step's rows, whichever part of them is computed. What is rounded is what attention
// alone would give.
struct Output {
    static constexpr int COLUMNS = 4;              // that a thread has of a head: a warp has all
    u8* y;
    const Step* step;
    __device__ __forceinline__ u8* codes(i64 row) const { return y + ((i64)step->before * H + row) * DV; }
    __device__ __forceinline__ void put_scale(i64 row, float scale) const {
        const int at = (int)row;
        store_scale((float*)(y + (i64)step->all * (H * DV)), scale, step->before + at / H, step->all, at % H * DV);
    }
    __device__ __forceinline__ void put(i64 row, int, float (&v)[COLUMNS]) const {
        round_as<Q>(v);
        const float scale = quantise_fours(v, codes(row));
        if (threadIdx.x % 32 == 0) put_scale(row, scale);
    }
    template <class Chunk> __device__ __forceinline__ void put_tile(i64 row0, int first, int rows, int lane, Chunk chunk) const {
        constexpr int ABSENT = 0x7fffffff;
        u32 packs[8][4];                           // of two rows each
#pragma unroll
        for (int p = 0; p < 8; p++) {
            const Vec16 v = chunk(p * 2 + lane / 16, lane % 16);
#pragma unroll
            for (int i = 0; i < 4; i++) packs[p][i] = v.w[i];
        }
        quantise_packs<Q>(packs, codes(row0), ABSENT, [&](int p, int half) {
            const int r = first + p * 2 + half;
            return r < rows ? query_row(r) * DV : ABSENT;
        }, [&](float scale, int at) { put_scale(row0 + at / DV, scale); });
    }
};
{% endif %}
