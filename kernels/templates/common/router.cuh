{# Routers: logits and the choice of `route`, of x that is normed where the op has an operand `norm`. #}
{% set normed = norm is defined %}
{% set experts = w.rows %}
{% include "common/prelude.cuh" %}
{% include "common/vec.cuh" %}
{% include "common/cluster.cuh" %}
{% include "common/route.cuh" %}
// RANKS blocks, a cluster where there are several, have the experts' rows between them, and TOKENS tokens; block r has the choice of
// token r. Rows of w are constant, so that a warp has its own in registers before it waits for x, if they are few.
constexpr int RANKS = {{ p.ranks }}, TOKENS = {{ p.tokens }}, WARPS = {{ p.warps }};
constexpr int K = {{ x.cols }}, N = wide<{{ x.type }}>(K) < wide<{{ w.type }}>(K) ? wide<{{ x.type }}>(K) : wide<{{ w.type }}>(K);
constexpr int EACH = (EXPERTS + RANKS * WARPS - 1) / (RANKS * WARPS), STEPS = (K + 32 * N - 1) / (32 * N);
constexpr bool AHEAD = EACH * STEPS * N * sizeof({{ w.type }}) <= 256;

// A float to the same place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ void store_at(float* at, int rank, float v) {
    if constexpr (RANKS == 1) {
        *at = v;
    } else {
#if __CUDA_ARCH__ >= 900
        asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.f32 [there], %2; }"
                     ::"r"((u32)__cvta_generic_to_shared(at)), "r"(rank), "f"(v) : "memory");
#endif
    }
}
// All threads of the cluster, or of the block that is alone.
__device__ __forceinline__ void meet() {
    if constexpr (RANKS == 1) __syncthreads();
    else cluster_sync();
}
extern "C" __global__ void {{ "__cluster_dims__(" ~ p.ranks ~ ", 1, 1) " if p.ranks > 1 }}__launch_bounds__({{ block }}) {{ kernel }}({{ params }}) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ float scores[EXPERTS], scratch[32];
    __shared__ u32 keys[EXPERTS + GROUPS];
    {{ x.type }}* const rows = ({{ x.type }}*)shared;  // TOKENS rows of x
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % RANKS;
    const i64 t0 = (i64)(blockIdx.x / RANKS) * TOKENS;
    const auto weight = [&](int i, int c) {
        const int e = min((rank * WARPS + warp) * EACH + i, EXPERTS - 1);
        return *(const Pack<{{ w.type }}, N>*)(w + (i64)e * K + min(c, K - N));
    };
    Pack<{{ w.type }}, N> early[AHEAD ? EACH : 1][AHEAD ? STEPS : 1];
    if constexpr (AHEAD) {
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int s = 0; s < STEPS; s++) early[i][s] = weight(i, (s * 32 + lane) * N);
    }
    pdl_launch();
    meet();                                            // the others' memory is there
    pdl_wait();
    const int tokens = (int)min((i64)TOKENS, {{ x.rows }} - t0);
    if (tokens <= 0) return;                           // all blocks of a cluster
    // WARPS / TOKENS warps have a token's row, in registers.
    constexpr int SHARE = WARPS / TOKENS, TURNS = (K + SHARE * 32 * N - 1) / (SHARE * 32 * N);
    const int t = warp / SHARE, c0 = (warp % SHARE * 32 + lane) * N;
    Pack<{{ x.type }}, N> held[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        const int c = c0 + i * SHARE * 32 * N;
        if (t < tokens && c < K) held[i] = *(const Pack<{{ x.type }}, N>*)(x + (t0 + t) * K + c);
    }
{% if normed %}
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        if (t >= tokens || c0 + i * SHARE * 32 * N >= K) continue;
#pragma unroll
        for (int j = 0; j < N; j++) squares += to_f32(held[i].v[j]) * to_f32(held[i].v[j]);
    }
    squares = warp_sum(squares);
    if (lane == 0) scratch[warp] = squares;
    __syncthreads();
    squares = 0.0f;
#pragma unroll
    for (int i = 0; i < SHARE; i++) squares += scratch[t * SHARE + i];
    const float inverse = rsqrtf(squares / K + {{ eps | f32 }});
{% endif %}
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        const int c = c0 + i * SHARE * 32 * N;
        if (t >= tokens || c >= K) continue;
{% if normed %}
        float v[N];
{% if norm %}
        float by[N];
        load(by, norm + c);
{% endif %}
#pragma unroll
        for (int j = 0; j < N; j++) v[j] = to_f32(held[i].v[j]) * inverse{{ " * (by[j] + " ~ (offset | f32) ~ ")" if norm }};
        held[i] = pack<{{ x.type }}>(v);
        if (c / (32 * N) % RANKS == rank) *(Pack<{{ x.type }}, N>*)(normed + (t0 + t) * K + c) = held[i];
{% endif %}
        *(Pack<{{ x.type }}, N>*)(rows + t * K + c) = held[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        float logits[TOKENS] = {};
#pragma unroll {{ 4 if p.tokens > 1 else 8 }}
        for (int s = 0; s < STEPS; s++) {
            const int c = (s * 32 + lane) * N;
            if (c >= K) break;
            Pack<{{ w.type }}, N> row;
            if constexpr (AHEAD) row = early[i][s];
            else row = weight(i, c);
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                float v[N];
                load(v, rows + t * K + c);
#pragma unroll
                for (int j = 0; j < N; j++) logits[t] += v[j] * to_f32(row.v[j]);
            }
        }
        const int e = (rank * WARPS + warp) * EACH + i;
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            logits[t] = warp_sum(logits[t]);
            if (e < EXPERTS && lane == 0 && t < tokens) store_at(scores + e, t, logits[t]{{ " + to_f32(bias[e])" if bias }});
        }
    }
    meet();
    if (rank < tokens && warp == 0) route_token(t0 + rank, scores, keys{{ ", choice_bias" if choice_bias }}, weights, ids);
}
