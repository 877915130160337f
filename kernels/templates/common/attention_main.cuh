// Attention over the cache's blocks, by the kernel of the variant. The template says what is made, `output`, and whether heads' rows are
// rounded to 8 bits (`rounds`).
{% include "common/attention.cuh" %}
{% include "common/vec.cuh" %}
{% if k_state.quantised %}
{% include "common/coded_cache.cuh" %}
{% endif %}
{% if p.kind == 0 %}
{% include "common/attention_plain.cuh" %}
{% else %}
{% include "common/attention_mma.cuh" %}
{% include "common/attention_output.cuh" %}
{% endif %}
{% if p.kind == 1 %}
{% include "common/attention_decode.cuh" %}
{% elif p.kind == 2 %}
{% include "common/attention_softmax.cuh" %}
{% include "common/attention_prefill.cuh" %}
{% elif p.kind == 3 %}
{% include "common/attention_softmax.cuh" %}
{% include "common/attention_wgmma.cuh" %}
{% include "common/attention_hopper.cuh" %}
{% elif p.kind == 4 %}
{% include "common/barriers.cuh" %}
{% include "common/attention_softmax.cuh" %}
{% include "common/attention_wgmma.cuh" %}
{% include "common/attention_ring.cuh" %}
{% endif %}
