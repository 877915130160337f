// What the kernels of paged_attention share: sizes, logits, the sink, tensor-core pieces.
typedef {{ q.type }} Q;
typedef {{ v_state.type }} V;
constexpr int H = {{ q.shape[1] }}, HKV = {{ k_state.heads }}, GROUP = H / HKV;
constexpr int D = {{ q.shape[2] }}, DV = {{ v_state.dim }};
{% include "common/attention_math.cuh" %}
