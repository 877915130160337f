// The kernel of an `Op` of skinny.cuh, in the variant's body.
extern "C" __global__ void {% set ranks = p.ranks if p.ranks is defined else 1 %}{% if p.outputs is defined %}__cluster_dims__(2, 1, 1) {% elif ranks > 1 %}__cluster_dims__({{ ranks }}, 1, 1) {% elif p.split > 1 %}__cluster_dims__({{ p.split }}, 1, 1) {% endif %}__launch_bounds__({{ block }}, {{ p.blocks }}) {{ kernel }}({{ params }}) {
    Op op;
    op.x = x;
    op.w = w;
{% if norm is defined and norm %}
    op.norm = norm;
{% endif %}
{% if bias %}
    op.bias = bias;
{% endif %}
{% if divides %}
    op.rms = rms;
{% endif %}
    op.tokens = {{ tokens_of.rows }};
{% if looks_ahead %}
    op.ahead = Ahead{ahead, ahead_bytes};
{% endif %}
{% if adapts is defined %}
    op.adapted = Adapted{x, slots, { {% for part in adapts %}{{ part.a.name }}, {% endfor %} }, { {% for part in adapts %}{{ part.b.name }}, {% endfor %} }, scratch, op.tokens};
{% endif %}
    op.take({{ taken }});
{% if p.activations is defined %}
    extern __shared__ __align__(128) u8 shared[];
    Product<Op, {{ p.groups }}, {{ p.tokens }}, {{ p.ring // (p.groups * 8 * w.packing.unit) if w.packing else p.weights }}, {{ p.activations }}, {{ p.split }}>(op, &w_tiles, &x_tiles, {{ "scratch" if p.split == 0 else "nullptr" }}, shared).run();
{% elif p.outputs is defined %}
    extern __shared__ __align__(128) u8 shared[];
    {% if x.quantised %}Eights<Op, {{ p.outputs }}, {{ p.stages }}, {{ p.split }}>(op, &w_tiles, &x_tiles, {{ "scratch" if p.split > 1 else "nullptr" }}, shared).run();
    {% else %}Cooperative<Op, {{ p.outputs }}, {{ p.stages }}>(op, &w_tiles, &x_tiles, shared).run();{% endif %}

{% elif p.mma_rows is defined %}
    extern __shared__ __align__(128) u8 shared[];
    ProductMma<Op, {{ p.mma_rows }}, {{ p.mma_tokens }}, {{ p.row_warps }}, {{ p.token_warps }}, {{ p.stages }}>(op, shared).run();
{% elif p.boxes is defined %}
    extern __shared__ __align__(128) u8 shared[];
    Chain<Op, {{ p.warps }}, {{ p.stages }}, {{ p.boxes }}>(op, &w_tiles, shared).run();
{% elif p.ring is defined %}
    extern __shared__ __align__(128) u8 shared[];
    Coded<Op, {{ p.warps }}, {{ p.ring // (p.warps * p.mt * 2 * w.packing.unit) }}, {{ p.mt }}, {{ p.nt }}, {{ p.rows }}>(op, shared).run();
{% elif p.split > 0 %}
    extern __shared__ __align__(128) u8 shared[];
    Wide<Op, {{ p.warps }}, {{ p.stages }}, {{ p.mt }}, {{ p.nt }}, {{ p.split }}>(op, shared).run();
{% elif p.stages > 0 %}
    extern __shared__ __align__(128) u8 shared[];
    Skinny<Op, {{ p.warps }}, {{ p.stages }}, {{ p.mt }}, {{ p.nt }}, {{ p.rows }}, {{ ranks }}>(op, shared).run();
{% else %}
    plain_linear(op);
{% endif %}
{% if closes is defined %}
    op.close();
{% endif %}
}
