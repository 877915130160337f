// What all ops of skinny.cuh share, from the template's x, w and bias (none if the op has none), and norm: an op that
// norms x has such an operand, none if it has no weight. An op with an operand `rms` divides its sums by the root mean square
// of the row of x before it was weighted: `rms_linear`.
{% set normed = norm is defined %}
{% set divides = rms is defined and rms in operands %}
struct Linear {
{% if w.packing %}
    template <class Op, int TILES> using Weights = CodedRows<Op, TILES, {{ w.packing.name }}>;
    // As product.cuh reads them: bytes and steps of 64 columns of a stage of 64 rows, and where eight rows begin.
    typedef {{ w.packing.name }} Packed;
    typedef Values<Packed, {{ "bf16" if x.quantised else x.type }}> Coded;
    static constexpr bool CODED = true;
    static constexpr int UNIT = Packed::BYTES, TILE_BYTES = 8 * UNIT, TILE_STEPS = Packed::COLUMNS / 64;
    __device__ __forceinline__ const u8* codes(int eight, int, int) const { return w + (i64)eight * ((K + Packed::COLUMNS - 1) / Packed::COLUMNS) * Packed::BYTES; }
{% else %}
    template <class Op, int TILES> using Weights = DenseRows<Op, TILES>;
    static constexpr bool CODED = false;
    static constexpr int UNIT = 0, TILE_BYTES = 64 * 128, TILE_STEPS = 1;
{% endif %}
    typedef {{ x.type }} X;
    static constexpr bool ROUNDS = false;                              // results to 8-bit floats: see eights.cuh
    static constexpr int APART = 0;                                    // see eights.cuh
    static constexpr bool EIGHT = {{ "true" if x.quantised else "false" }};
    static constexpr int K = {{ w.cols }}, N = {{ w.rows }}, ROW = K;   // ROW: elements from one row of x to the next
    static constexpr bool GROUPED = false, AHEAD = {{ "true" if looks_ahead else "false" }};
    static constexpr int NORM = {{ 0 if not normed else 2 if norm else 1 }}, HEAD = 0;
    static constexpr float eps = {{ (eps if normed or divides else 0.0) | f32 }}, offset = {{ (offset if normed else 0.0) | f32 }};
    const {{ x.type }}* x;
    const {{ w.type }}* w;
{% if normed and norm %}
    const {{ norm.type }}* norm;
{% endif %}
{% if bias %}
    const {{ bias.type }}* bias;
    __device__ __forceinline__ float bias_of(int row) const { return to_f32(bias[row]); }
{% else %}
    __device__ __forceinline__ float bias_of(int row) const { return 0; }
{% endif %}
    int tokens;
    Ahead ahead;                                                       // with AHEAD
{% if adapts is defined %}
    Adapted adapted;
{% endif %}
{% if divides %}
    // What a token's sums are multiplied by. Each warpgroup has a copy; there is one tile of tokens.
    const {{ rms.type }}* rms;
    __device__ __forceinline__ static float* scales() {
        __shared__ float of_tokens[{{ p.groups * p.tokens }}];
        return of_tokens + threadIdx.x / 128 * {{ p.tokens }};
    }
    __device__ __forceinline__ void prepare() const {
        constexpr int PARTS = {{ rms.cols }};
        const int part = threadIdx.x % 8, row = threadIdx.x % 128 / 8;
        for (int t0 = 0; t0 < tokens; t0 += 16) {
            const int t = min(t0 + row, tokens - 1);
            float squares = 0;
#pragma unroll 8
            for (int i = part; i < PARTS; i += 8) {
                const float v = rms[(i64)t * PARTS + i];
                squares += v * v;
            }
#pragma unroll
            for (int d = 1; d < 8; d *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, d);
            if (part == 0) scales()[t0 + row] = rsqrtf(squares / PARTS + eps);
        }
    }
{% else %}
    __device__ __forceinline__ void prepare() const {}
{% endif %}
    // What eight rows give for a token, of their sums.
    __device__ __forceinline__ void complete(float (&v)[8], int row, int t) const {
{% if divides %}
        const float scale = scales()[t];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= scale;
{% endif %}
{% if bias %}
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] += bias_of(row + i);
{% endif %}
    }
    // What `finish` reads beside sums, where it can be asked for before they are there.
    struct Early {};
    __device__ __forceinline__ Early early(int, int) const { return Early(); }
    __device__ __forceinline__ i64 source(int t) const { return t; }
};
// Neighbours in w make a pair.
struct Neighbours : Linear {
    static constexpr int PARTS = 1, BOX = 256;
    static constexpr int PAIRS = (N + 1) / 2;
    __device__ __forceinline__ static int row(int q, int) { return q; }
    __device__ __forceinline__ void rows(int q, int& a, int& b) const {
        a = 2 * q;
        b = 2 * q + 1 < N ? 2 * q + 1 : -1;
    }
};
// Gate and up of a feature, w being the rows of all gates and then of all ups.
struct Gated : Linear {
    static constexpr int PARTS = 2, BOX = 256;
    static constexpr int PAIRS = N / 2;
    __device__ __forceinline__ static int row(int q, int part) { return q + part * PAIRS; }
    __device__ __forceinline__ void rows(int q, int& a, int& b) const { a = q; b = q + N / 2; }
};
// x / (1 + exp(-x)), to a few units in the last place of f32; checks of `/` for rare numbers would be most of what it takes.
__device__ __forceinline__ float silu(float x) {
    float e, r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
    return x * r;
}
__device__ __forceinline__ float gelu_tanh(float x) {
    // 0.5 (1 + tanh u) = 1 / (1 + exp(-2u))
    return x / (1.0f + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
}
