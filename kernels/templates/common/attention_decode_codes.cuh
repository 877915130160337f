// Tiles of the cache whose rows are codes: they come to shared memory as they are stored, half as many bytes, and become 16-bit
// floats in registers, where tensor cores take them from. Scales are applied where they are few: to scores after their product, and
// to probabilities before theirs, which are bf16 whatever the queries are, since its exponents hold any scale.
constexpr int K_ROW = D + (D / 16 % 2 ? 0 : 16), V_ROW = DV + (DV / 16 % 2 ? 0 : 16);   // bytes; an odd number of 16: banks differ
constexpr int K_TILE = TILE * K_ROW, V_TILE = TILE * V_ROW, STAGE = K_TILE + V_TILE + 2 * TILE * 4;
static_assert(D % 32 == 0 && DV % 32 == 0 && PAGE % TILE == 0, "");

// A tile's rows of a head lie one behind the other. Zeros from `rows` on.
template <int DIM, int ROW> __device__ __forceinline__ void copy_codes(u32 to, const u8* from, int rows, int lane) {
    constexpr int CHUNKS = DIM / 16;
#pragma unroll
    for (int j = 0; j < (TILE * CHUNKS + 31) / 32; j++) {
        const int i = lane + 32 * j, r = i / CHUNKS, c = i % CHUNKS;
        copy16_async(to + r * ROW + c * 16, from + i * 16, r < rows);
    }
}
__device__ __forceinline__ void copy_stage(u32 to, const u8* k_state, const u8* v_state, int row, int rows, int head, int lane) {
    typedef CodedPlane<HKV, D> Keys;
    typedef CodedPlane<HKV, DV> Values;
    copy_codes<D, K_ROW>(to, k_state + Keys::codes(row, head), rows, lane);
    copy_codes<DV, V_ROW>(to + K_TILE, v_state + Values::codes(row, head), rows, lane);
    if (lane < 8) {
        const u8* const scales = lane < 4 ? k_state + Keys::scale(row, head) : v_state + Values::scale(row, head);
        copy16_async(to + K_TILE + V_TILE + lane * 16, scales + lane % 4 * 16, true);
    }
}
__device__ __forceinline__ void prefetch(const u8* k_state, const u8* v_state, int row, int rows, int head, int lane) {
    for (int i = lane * 128; i < TILE * D; i += 32 * 128) prefetch_l2(k_state + CodedPlane<HKV, D>::codes(row, head) + i);
    for (int i = lane * 128; i < TILE * DV; i += 32 * 128) prefetch_l2(v_state + CodedPlane<HKV, DV>::codes(row, head) + i);
}

// Of the lane's rows of a tile, of which those in [from, to) are seen: what is not there may have any scale.
struct Scales {
    float k[2], v[2];
    __device__ __forceinline__ Scales(u32 stage, int from, int to, int lane) {
        const u32 at = stage + K_TILE + V_TILE;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int row = lane / 4 + j * 8;
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(k[j]) : "r"(at + row * 4));
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v[j]) : "r"(at + (TILE + row) * 4));
            if (row < from || row >= to) v[j] = 0.0f;
        }
    }
    __device__ __forceinline__ float key(int j) const { return k[j]; }
    __device__ __forceinline__ float value(int j) const { return v[j]; }
};

// Codes 0 and 2 of four (ODD: 1 and 3) as two floats of the queries' type.
template <bool ODD> __device__ __forceinline__ u32 as_query(u32 codes) {
{% if q.type == "bf16" %}
    return as_bf16<ODD>(codes);
{% else %}
    const u32 bits = (ODD ? codes >> 1 : codes << 7) & 0x3f803f80u, sign = (ODD ? codes : codes << 8) & 0x80008000u;
    u32 y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(bits | sign), "r"(0x5c005c00u));
    return y;
{% endif %}
}

// Query heads of a KV head as the 8 side of the products; those beyond the group are zeros. Of each 16 columns a lane has four
// neighbours, as it has of codes: first 0 and 2, then 1 and 3.
__device__ __forceinline__ void load_query(u32 (&query)[NT][D / 16][2], const Q* q, int lane) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const int head = n * 8 + lane / 4;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            const uint2 four = head < GROUP ? *(const uint2*)(q + head * D + i * 16 + lane % 4 * 4) : make_uint2(0, 0);
            query[n][i][0] = __byte_perm(four.x, four.y, 0x5410);
            query[n][i][1] = __byte_perm(four.x, four.y, 0x7632);
        }
    }
}
// s += K q' of a tile without its scales, in two sums: half the chain of dependent products. Matrices of a load are rows 0 to 7 and 8
// to 15 of 16 columns, and of the 16 after them.
__device__ __forceinline__ void add_scores(float (&s)[2][NT][4], u32 stage, const u32 (&query)[NT][D / 16][2], int lane) {
    const u32 k = stage + (lane % 16) * K_ROW + lane / 16 * 16;
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        u32 codes[4];
        load_matrices(codes, k + i * 32);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 upper = codes[half * 2], lower = codes[half * 2 + 1];
            const u32 a[4] = {as_query<false>(upper), as_query<false>(lower), as_query<true>(upper), as_query<true>(lower)};
#pragma unroll
            for (int n = 0; n < NT; n++) mma(s[half][n], a, query[n][i * 2 + half][0], query[n][i * 2 + half][1]);
        }
    }
}
// Probabilities, of which rows are the 16 side of the next product: in one bf16 beside queries of that type, in two, of which the second is
// what the first leaves, beside those that have more bits.
constexpr int PARTS = {{ 1 if q.type == "bf16" else 2 }};
struct Probabilities {
    u32 p[PARTS][NT][2];
    __device__ __forceinline__ void set(int n, const float (&s)[4]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 first = pack2<bf16>(s[half * 2], s[half * 2 + 1]);
            p[0][n][half] = transpose8x8(first);
            if constexpr (PARTS == 2)
                p[PARTS - 1][n][half] = transpose8x8(pack2<bf16>(s[half * 2] - low<bf16>(first), s[half * 2 + 1] - high<bf16>(first)));
        }
    }
};
__device__ __forceinline__ void value_product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{ %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// acc += V' p. Transposed, a matrix of pairs of codes gives a lane two neighbouring columns of two neighbouring rows.
__device__ __forceinline__ void add_values(float (&acc)[DV / 16][NT][4], u32 stage, const Probabilities& p, int lane) {
    const u32 v = stage + K_TILE + (lane % 16) * V_ROW + lane / 16 * 16;
#pragma unroll
    for (int i = 0; i < DV / 32; i++) {
        u32 codes[4];
        load_matrices_transposed(codes, v + i * 32);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 upper = codes[half * 2], lower = codes[half * 2 + 1];
            const u32 a[4] = {as_bf16<false>(upper), as_bf16<true>(upper), as_bf16<false>(lower), as_bf16<true>(lower)};
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int part = 0; part < PARTS; part++) value_product(acc[i * 2 + half][n], a, p.p[part][n][0], p.p[part][n][1]);
        }
    }
}
// The column of 16 that a lane's sums 0 and 1 are of, and the one that 2 and 3 are of.
__device__ __forceinline__ int column_of(int half, int lane) { return lane / 4 * 2 + half; }
