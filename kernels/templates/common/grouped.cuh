{# The kernel of an `Op` of product.cuh whose rows go to experts. The template sets `of` (a value that has their weights) and `parts`,
   and then defines `struct Op : Grouped` with `finish`, and `take`, before it includes grouped_main.cuh. #}
{% include "common/prelude.cuh" %}
{% include "common/vec.cuh" %}
{% include "common/async_copy.cuh" %}
{% include "common/wgmma.cuh" %}
{% include "common/barriers.cuh" %}
{% include "common/tile_product.cuh" %}
{% include "common/experts.cuh" %}
{% if of.packing %}
{% include "common/stored.cuh" %}
{% include "common/coded.cuh" %}
{{ of.packing.text }}
{% endif %}
{% include "common/product.cuh" %}
struct Grouped : Experts<{{ of.shape[0] }}, {{ p.tokens }}> {
    typedef {{ x.type }} X;
    static constexpr int K = {{ of.cols }}, PARTS = {{ parts }}, ROWS = {{ of.shape[1] }}, N = ROWS * PARTS, BOX = 256;
{% if of.packing %}
    typedef {{ of.packing.name }} Packed;
    typedef Values<Packed, X> Coded;
    static constexpr bool CODED = true;
    static constexpr int UNIT = Packed::BYTES, TILE_BYTES = 8 * UNIT, TILE_STEPS = Packed::COLUMNS / 64;
{% else %}
    static constexpr bool CODED = false;
    static constexpr int UNIT = 0, TILE_BYTES = 64 * 128, TILE_STEPS = 1;
{% endif %}
    static constexpr bool ROUNDS = false;
    static constexpr int GATHERS = {{ p.gathers }}, CHOSEN = {{ ids.cols }};
    const {{ x.type }}* x;
    const u32* ids;
    int tokens = 0;
    __device__ __forceinline__ static int row(int q, int) { return q; }
    __device__ __forceinline__ void prepare() const {}
    // The choice that comes to place i when they are sorted by expert, and the row of x that it takes.
    __device__ __forceinline__ i64 choice(int i) const { return min(order[i], choices - 1); }
    __device__ __forceinline__ i64 source(int i) const { return choice(i){{ " / CHOSEN" if x.rank == 2 }}; }
    // The biases of eight outputs from q on, of the expert of a choice.
    template <class B> __device__ __forceinline__ void add_bias(float (&v)[8], const B* bias, i64 choice, int q) const {
        const B* const from = bias + picked_row(ids[choice], {{ of.shape[0] }}) * ROWS + q;
#pragma unroll
        for (int n = 0; n < 8; n++) v[n] += to_f32(from[n]);
    }
};
