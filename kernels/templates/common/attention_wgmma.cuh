{% include "common/wgmma.cuh" %}

// s[64, COLS] = (add ? s : 0) + q[64, 16] k[COLS, 16]'
{% set n = p.cols // 2 %}
__device__ __forceinline__ void score_product(float (&s)[{{ p.cols // 8 }}][4], u64 q, u64 k, int add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %{{ n + 2 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ p.cols }}k16.f32.{{ q.type }}.{{ q.type }} { {% for i in range(n) %}%{{ i }}{{ "" if loop.last else ", " }}{% endfor %} }, "
                 "%{{ n }}, %{{ n + 1 }}, p, 1, 1, 0, 0; }\n"
                 : {% for i in range(n) %}"+f"(s[{{ i // 4 }}][{{ i % 4 }}]){{ "" if loop.last else ", " }}{% endfor %}

                 : "l"(q), "l"(k), "r"(add));
}
// acc[64, DV] += p[64, 16] v[16, DV]
{% set n = v_state.dim // 2 %}
__device__ __forceinline__ void value_product(float (&acc)[{{ v_state.dim // 8 }}][4], const u32 (&p)[4], u64 v) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n{{ v_state.dim }}k16.f32.{{ q.type }}.{{ q.type }} { {% for i in range(n) %}%{{ i }}{{ "" if loop.last else ", " }}{% endfor %} }, "
                 "{ %{{ n }}, %{{ n + 1 }}, %{{ n + 2 }}, %{{ n + 3 }} }, %{{ n + 4 }}, 1, 1, 1, 1;\n"
                 : {% for i in range(n) %}"+f"(acc[{{ i // 4 }}][{{ i % 4 }}]){{ "" if loop.last else ", " }}{% endfor %}

                 : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));
}
