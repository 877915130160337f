{% set columns = p.outputs if p.outputs is defined else p.tokens %}{% set n = columns // 2 %}
{% if not x.quantised %}
// sums[64, {{ columns }}] = (add ? sums : 0) + a[64, 16] b[{{ columns }}, 16]'
__device__ __forceinline__ void tile_product(float (&s)[{{ columns // 8 }}][4], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %{{ n + 2 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ columns }}k16.f32.{{ x.type }}.{{ x.type }} { {% for i in range(n) %}%{{ i }}{{ "" if loop.last else ", " }}{% endfor %} }, "
                 "%{{ n }}, %{{ n + 1 }}, p, 1, 1, 0, 0; }\n"
                 : {% for i in range(n) %}"+f"(s[{{ i // 4 }}][{{ i % 4 }}]){{ "" if loop.last else ", " }}{% endfor %}

                 : "l"(a), "l"(b), "r"(add));
}
// The same, where the lanes of four warps have a: 16 rows each, as `mma.m16n8k16` takes them.
__device__ __forceinline__ void tile_product(float (&s)[{{ columns // 8 }}][4], const u32 (&a)[4], u64 b, int add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %{{ n + 5 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ columns }}k16.f32.{{ x.type }}.{{ x.type }} { {% for i in range(n) %}%{{ i }}{{ "" if loop.last else ", " }}{% endfor %} }, "
                 "{ %{{ n }}, %{{ n + 1 }}, %{{ n + 2 }}, %{{ n + 3 }} }, %{{ n + 4 }}, p, 1, 1, 0; }\n"
                 : {% for i in range(n) %}"+f"(s[{{ i // 4 }}][{{ i % 4 }}]){{ "" if loop.last else ", " }}{% endfor %}

                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
{% else %}
{% set n = p.piece // 2 %}
{% if p.outputs is defined %}
// some[64, {{ n * 2 }}] = (add ? some : 0) + a[64, 32] b[{{ n * 2 }}, 32]' of 8-bit floats.
__device__ __forceinline__ void tile_product_eight(float (&s)[{{ n // 4 }}][4], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %{{ n + 2 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ n * 2 }}k32.f32.e4m3.e4m3 { {% for i in range(n) %}%{{ i }}{{ "" if loop.last else ", " }}{% endfor %} }, "
                 "%{{ n }}, %{{ n + 1 }}, p, 1, 1; }\n"
                 : {% for i in range(n) %}"+f"(s[{{ i // 4 }}][{{ i % 4 }}]){{ "" if loop.last else ", " }}{% endfor %}

                 : "l"(a), "l"(b), "r"(add));
}
{% else %}
// The same of 32 columns of 8-bit floats, for {{ n * 2 }} tokens.
__device__ __forceinline__ void tile_product_eight(float (&s)[{{ n // 4 }}][4], const u32 (&a)[4], u64 b, int add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %{{ n + 5 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ n * 2 }}k32.f32.e4m3.e4m3 { {% for i in range(n) %}%{{ i }}{{ "" if loop.last else ", " }}{% endfor %} }, "
                 "{ %{{ n }}, %{{ n + 1 }}, %{{ n + 2 }}, %{{ n + 3 }} }, %{{ n + 4 }}, p, 1, 1; }\n"
                 : {% for i in range(n) %}"+f"(s[{{ i // 4 }}][{{ i % 4 }}]){{ "" if loop.last else ", " }}{% endfor %}

                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
{% endif %}
{% endif %}
