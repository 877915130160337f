extern "C" __global__ void __launch_bounds__({{ block }}, 1) {{ kernel }}({{ params }}) {
    extern __shared__ __align__(128) u8 shared[];
    Op op;
    op.x = x, op.ids = ids, op.order = order, op.starts = starts, op.choices = (u32)({{ ids.rows }} * Op::CHOSEN);
    op.take({{ taken }});
{% if setting is defined %}
    {{ setting }}
{% endif %}
    pdl_wait();                                        // which weights are read is not known before
    op.setup();
    Product<Op, {{ p.groups }}, {{ p.tokens }}, {{ p.ring // (p.groups * 8 * of.packing.unit) if of.packing else p.weights }}, {{ p.activations }}, 1>(op, &{{ first_tiles }}, &{{ second_tiles }}, nullptr, shared).run();
}
