// Hopper's asynchronous products over shared memory, whose operands lie in rows of 128 bytes (64
// elements), the 16-byte chunks of a row exchanged by its number modulo 8.
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading, u32 stride) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | 1ull << 62;
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Keeps the compiler from using sums before the wait that precedes this.
template <int N> __device__ __forceinline__ void landed(float (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])::"memory");
}
// What this thread has written to shared memory is seen by later products.
__device__ __forceinline__ void fence_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

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
