// The kernel of an `Op` of skinny.cuh, in the variant's body.
extern "C" __global__ void __launch_bounds__({{ block }}, {{ p.blocks }}) {{ kernel }}({{ params }}) {
    Op op;
    op.x = x;
    op.w = w;
{% if norm %}
    op.norm = norm;
{% endif %}
{% if bias %}
    op.bias = bias;
{% endif %}
    op.tokens = {{ tokens_of.rows }};
    op.take({{ taken }});
{% if p.stages > 0 %}
    extern __shared__ __align__(128) u8 shared[];
    Skinny<Op, {{ p.warps }}, {{ p.stages }}, {{ p.mt }}, {{ p.nt }}, {{ p.rows }}>(op, shared).run();
{% else %}
    plain_linear(op);
{% endif %}
}
