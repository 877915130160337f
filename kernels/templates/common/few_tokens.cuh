{# What a variant's product needs, of any number of tokens, but for its `Op` and the kernel: see skinny_store.cuh, skinny_gated.cuh and
   skinny_argmax.cuh. Its constants say whose it is: `boxes` of chain.cuh, `mma_rows` of product_mma.cuh, `activations` of
   product.cuh, `outputs` of cooperative.cuh, and with x of 8 bits of eights.cuh. #}
{% include "common/prelude.cuh" %}
{% include "common/async_copy.cuh" %}
{% include "common/dense_rows.cuh" %}
{% include "common/cluster.cuh" %}
{% include "common/ahead.cuh" %}
{% if w.packing %}
{% include "common/barriers.cuh" %}
{% include "common/stored.cuh" %}
{% include "common/coded.cuh" %}
{% include "common/scaled_row.cuh" %}
{% include "common/short_groups.cuh" %}
{% endif %}
{% include "common/skinny.cuh" %}
{% include "common/wide.cuh" %}
{% if not w.packing and (p.boxes is defined or p.activations is defined or p.outputs is defined) %}
{% include "common/barriers.cuh" %}
{% endif %}
{% if w.packing %}
{% include "common/coded_rows.cuh" %}
{{ w.packing.text }}
{% endif %}
{% if p.boxes is defined %}
{% include "common/chain.cuh" %}
{% elif p.mma_rows is defined %}
{% include "common/vec.cuh" %}
{% include "common/product_mma.cuh" %}
{% elif p.activations is defined %}
{% include "common/vec.cuh" %}
{% include "common/wgmma.cuh" %}
{% include "common/tile_product.cuh" %}
{% if adapts is defined %}
{% include "common/adapted.cuh" %}
{% endif %}
{% if x.quantised %}
{% include "common/e4m3.cuh" %}
{% include "common/quantise.cuh" %}
{% endif %}
{% include "common/product.cuh" %}
{% elif p.outputs is defined %}
{% include "common/vec.cuh" %}
{% include "common/wgmma.cuh" %}
{% include "common/tile_product.cuh" %}
{% if x.quantised %}
{% include "common/e4m3.cuh" %}
{% include "common/quantise.cuh" %}
{% include "common/eights.cuh" %}
{% else %}{% include "common/cooperative.cuh" %}{% endif %}
{% endif %}
{% include "common/skinny_op.cuh" %}
