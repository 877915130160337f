{# What kernels include in which a warp multiplies packed codes with one row of activations. #}
{% include "common/prelude.cuh" %}
{% include "common/vec.cuh" %}
{% include "common/async_copy.cuh" %}
{% include "common/stored.cuh" %}
{% include "common/coded.cuh" %}
{% include "common/mma.cuh" %}

// Twice eight rows of codes times a row x of K activations, by a warp: values of the codes, rounded to E, by tensor cores, of which
// it uses one column. STAGES units of columns are in flight or in use, in a ring of the warp's own: STAGES * 2 * P::BYTES bytes.
// Order of summation: 16 columns after 16 columns, ascending.
template <class P, class E, int K, int STAGES> struct CodedDot {
    typedef Values<P, E> V;
    static constexpr int ACROSS = (K + P::COLUMNS - 1) / P::COLUMNS, BAND = ACROSS * P::BYTES;
    static_assert(K % 64 == 0 && STAGES >= 2, "shape");
    u32 ring;
    int lane;

    __device__ __forceinline__ void ask(const u8* first, const u8* second, int unit) const {
        if (unit < ACROSS) {
            const u32 to = ring + unit % STAGES * (2 * P::BYTES);
            for (int i = lane * 16; i < P::BYTES; i += 512) {
                copy16_async(to + i, first + (i64)unit * P::BYTES + i);
                copy16_async(to + P::BYTES + i, second + (i64)unit * P::BYTES + i);
            }
        }
        copy_commit();
    }
    // sums[0] and sums[2] are of row lane / 4 of the first and of the second eight, in all four lanes.
    __device__ __forceinline__ void multiply(float (&sums)[4], const u8* first, const u8* second, const E* x) const {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] = 0;
#pragma unroll 1
        for (int unit = 0; unit < STAGES - 1; unit++) ask(first, second, unit);
#pragma unroll 1
        for (int unit = 0; unit < ACROSS; unit++) {
            ask(first, second, unit + STAGES - 1);
            copy_wait<STAGES - 1>();
            __syncwarp();
            const u32 from = ring + unit % STAGES * (2 * P::BYTES);
            typename V::Row rows[2];
#pragma unroll
            for (int r = 0; r < 2; r++) V::load_row(rows[r], from + r * P::BYTES, lane / 4);
            chunks<0>(sums, from, rows, (const u32*)(x + unit * P::COLUMNS) + lane % 4, unit * P::COLUMNS);
            __syncwarp();
        }
        copy_wait<0>();
    }
    template <int C> __device__ __forceinline__ void chunks(float (&sums)[4], u32 from, const typename V::Row (&rows)[2], const u32* x, int column) const {
        if constexpr (C * 128 < P::COLUMNS) {
            typename V::Chunk words[2];
#pragma unroll
            for (int r = 0; r < 2; r++) V::load(words[r], from + r * P::BYTES, C, lane);
            block<C, 0>(sums, words, rows, x, column);
            block<C, 1>(sums, words, rows, x, column);
            block<C, 2>(sums, words, rows, x, column);
            block<C, 3>(sums, words, rows, x, column);
            chunks<C + 1>(sums, from, rows, x, column);
        }
    }
    // 32 columns.
    template <int C, int B> __device__ __forceinline__ void block(float (&sums)[4], const typename V::Chunk (&words)[2], const typename V::Row (&rows)[2], const u32* x, int column) const {
        constexpr int AT = C * 128 + B * 32;
        if (K % P::COLUMNS != 0 && column + AT >= K) return;
        u32 a[4], b[4];
        x += AT / 2;
        V::template step<C, B, 0>(a, words, rows);
        V::template step<C, B, 1>(b, words, rows);
        mma(sums, a[0], a[1], a[2], a[3], x[0], x[4], E{});
        mma(sums, b[0], b[1], b[2], b[3], x[8], x[12], E{});
    }
};
