// The kernels of latent_qkv and latent_qkv_packed, which say where a token's queries and its row of the cache begin: `q_row` and
// `kv_row`, expressions over t, and `q_step`, the elements from one token's queries to the next one's. Blocks either multiply
// queries by a head's w, or turn queries and write the cache.
{% from "common/shape.j2" import product %}
{% include "common/prelude.cuh" %}
{% include "common/vec.cuh" %}
{% include "common/row.cuh" %}
{% include "common/rope.cuh" %}
typedef {{ q_latent.type }} X;
constexpr int H = {{ w.shape[0] }}, R = {{ w.shape[1] }}, K = {{ w.shape[2] }}, P = {{ keys.dim }}, F = {{ freqs.size }};
constexpr int WIDTH = {{ "1" if p.split < 0 else "wide<X>(R)" }};    // elements of a latent that are read at once

// A token's queries turned, and its row of the cache: its latent normed, its key turned.
template <int THREADS>
__device__ __forceinline__ void finish_token(const Step* step, int t, const X* q, const X* kv,
        const {{ positions.type }}* positions, const {{ freqs.type }}* freqs, {{ "const " ~ norm.type ~ "* norm, " if norm is not none }}X* q_rope, X* latents, X* keys) {
    __shared__ float cos[F], sin[F], scratch[32];
    __syncthreads();                                // the token before is done with these
    for (int i = threadIdx.x; i < F; i += THREADS) {
        const Turn turn = turn_of(positions[t], to_f32(freqs[i]), {{ scale | f32 }});
        cos[i] = turn.cos, sin[i] = turn.sin;
    }
    __syncthreads();
    const i64 slot = step->slots[t];
    constexpr int UNITS = P - F;                    // of a head: its pairs, and what stays as it is
    for (int i = threadIdx.x; i < (H + 1) * UNITS; i += THREADS) {
        const int head = i / UNITS, unit = i % UNITS;
        const X* from = head < H ? q + head * (K + P) + K : kv + R;
        X* to = head < H ? q_rope + ((i64)t * H + head) * P : keys + slot * P;
        if (unit >= F) {
            to[unit + F] = from[unit + F];
            continue;
        }
{%- if style == "interleaved" %}
        const int first = 2 * unit, second = first + 1;
{%- else %}
        const int first = unit, second = unit + F;
{%- endif %}
        const float a = to_f32(from[first]), b = to_f32(from[second]);
        to[first] = from_f32<X>(a * cos[unit] - b * sin[unit]);
        to[second] = from_f32<X>(b * cos[unit] + a * sin[unit]);
    }
    Row<R, THREADS, WIDTH> row;
    row.read(kv);
    const float inverse = row.inverse_rms({{ eps | f32 }}, scratch);
    row.each([&](int c, float (&v)[WIDTH]) {
{%- if norm is not none %}
        float weight[WIDTH];
        load(weight, norm + c);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) v[j] *= inverse * (weight[j] + {{ offset | f32 }});
{%- else %}
#pragma unroll
        for (int j = 0; j < WIDTH; j++) v[j] *= inverse;
{%- endif %}
    });
    row.write(latents + slot * R);
}
{% set finish = "finish_token<" ~ block ~ ">(step, t, " ~ q_row ~ ", " ~ kv_row ~ ", positions, freqs, " ~ ("norm, " if norm is not none else "") ~ "q_rope, latents, keys)" %}
{% if p.split == 0 %}
{% include "common/async_copy.cuh" %}
{% include "common/head_product.cuh" %}
#define mma head_mma
{% include "common/product_mma.cuh" %}
struct Op {
    typedef ::X X;
    static constexpr int K = ::K, N = R, PARTS = 1, NORM = 0;
    static constexpr i64 ROW = {{ q_step }};
    const X* x;
    const X* w;
    X* to;
    int tokens;
    __device__ __forceinline__ i64 source(int t) const { return t; }
    __device__ __forceinline__ void finish(int n, int t, float (&v)[8], const float (&)[8]) const { store(to + (i64)t * H * R + n, v); }
};
extern "C" __global__ void __launch_bounds__({{ block }}) {{ kernel }}({{ params }}) {
    extern __shared__ __align__(128) u8 shared[];
    const int h = blockIdx.y;
    if (h < H) {
        const int t = 0;
        const Op op{ {{ q_row }} + h * (K + P), w + (i64)h * R * K, q_latent + h * R, step->T};
        return ProductMma<Op, 64, 64, 2, 2, {{ p.stages }}>(op, shared).run();
    }
    pdl_launch();
    pdl_wait();
    for (int t = (h - H) * gridDim.x + blockIdx.x; t < step->T; t += (gridDim.y - H) * gridDim.x) {{ finish }};
}
{% elif p.split > 0 %}
{% include "common/head_product.cuh" %}
extern "C" __global__ void __launch_bounds__({{ block }}) {{ kernel }}({{ params }}) {
    constexpr int TILES = R / 16, PRODUCTS = (H * TILES + 3) / 4;
    const int t0 = blockIdx.y * 16, tokens = step->T;
    const int job = blockIdx.x * 4 + threadIdx.x / 32, h = job / TILES, n0 = job % TILES * 16;
    if (blockIdx.x < PRODUCTS && h < H && t0 < tokens) {
        return head_product<K, 2, 1>(
            w + ((i64)h * R + n0) * K, [&](int t) { return {{ q_row }} + h * (K + P); }, t0, tokens,
            [&](int row, int t, float sum) { q_latent[((i64)t * H + h) * R + n0 + row] = from_f32<X>(sum); });
    }
    pdl_launch();
    pdl_wait();
    const int t = t0 + blockIdx.x - PRODUCTS;
    if (blockIdx.x >= PRODUCTS && t < tokens) {{ finish }};
}
{% else %}
extern "C" __global__ void __launch_bounds__({{ block }}) {{ kernel }}({{ params }}) {
    pdl_launch();
    pdl_wait();
    for (i64 i = thread_index() / 32; i < (i64)step->T * H * R; i += thread_count() / 32) {
        const int t = (int)(i / (H * R)), n = (int)(i % (H * R));
        const X* const x = {{ q_row }} + n / R * (K + P);
        const auto* const row = w + (i64)n * K;
        float dot = 0.0f;
        for (int k = threadIdx.x % 32; k < K; k += 32) dot += to_f32(x[k]) * to_f32(row[k]);
        dot = warp_sum(dot);
        if (threadIdx.x % 32 == 0) q_latent[i] = from_f32<X>(dot);
    }
    for (int t = blockIdx.x; t < step->T; t += gridDim.x) {{ finish }};
}
{% endif %}
