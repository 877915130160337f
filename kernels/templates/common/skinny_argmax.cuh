{% include "common/ranked.cuh" %}
{% set gathers = rows is defined %}
{% set logit = {"f32": "float", "bf16": "bf16", "f16": "f16"}[dtype] if dtype else x.type %}
// The column of x{{ "[rows]" if gathers }} · wᵀ + bias with the largest number, as {{ logit }}, of each token: the first of equals, and NO_TOKEN
// where one is NaN or none is above -inf. Nothing of the product goes to memory: a block keeps, for each token, the rank of
// the largest of its columns, and the last block to finish puts the blocks' ranks together.
struct Op : Neighbours {
    typedef {{ logit }} Logit;
    static constexpr bool HERE = {{ "true" if tokens.max <= 128 else "false" }};  // ranks have room in shared memory
    u32* ids;
    u32* arrived;                                      // blocks that have finished
    u64* largest;                                      // of each token; 0 before there is any
{% if gathers %}
    const {{ rows.type }}* picked;
    __device__ __forceinline__ i64 source(int t) const { return picked[t]; }
    __device__ __forceinline__ void take(u32* to, u8* scratch, const {{ rows.type }}* rows) {
        picked = rows;
{% else %}
    __device__ __forceinline__ void take(u32* to, u8* scratch) {
{% endif %}
        ids = to, arrived = (u32*)scratch, largest = (u64*)scratch + 1;
        if (HERE)                                      // every body waits for all threads before the first sums
            for (int t = threadIdx.x; t < tokens; t += blockDim.x) of_block()[t] = 0;
    }
    __device__ __forceinline__ static u64* of_block() {
        __shared__ u64 ranks[128];
        return ranks;
    }
    __device__ __forceinline__ u64 rank(int n, float sum) const {
        const float v = to_f32(from_f32<Logit>(sum + bias_of(n)));
        return v != v ? BROKEN : sane(v) > NONE ? ranked(sane(v), n) : 0;
    }
    // Few numbers are larger than those before them: most cost one read.
    __device__ __forceinline__ void keep(int t, u64 rank) const {
        u64* const at = HERE ? of_block() + t : largest + t;
        if (rank > *(volatile u64*)at) atomicMax(at, rank);
    }
    __device__ __forceinline__ void emit(int q, int t, float a, float b, float) const {
        const u64 first = rank(2 * q, a), second = 2 * q + 1 < N ? rank(2 * q + 1, b) : 0;
        keep(t, first > second ? first : second);
    }
{% if p.activations is defined or p.mma_rows is defined %}
    __device__ __forceinline__ void finish(int q, int t, float (&a)[8], const float (&)[8], const Early& = Early()) const {
        u64 best = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u64 one = rank(q + i, a[i]);
            best = one > best ? one : best;
        }
        keep(t, best);
    }
{% endif %}
    // Once the block has no more sums. All threads call it; those that did not wait for the kernel before write nothing
    // until others have.
    __device__ __forceinline__ void close() const {
        __shared__ bool last;
        __syncthreads();
        if (HERE) {
            for (int t = threadIdx.x; t < tokens; t += blockDim.x)
                if (of_block()[t] != 0) atomicMax(largest + t, of_block()[t]);
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) last = atomicAdd(arrived, 1) == gridDim.x * gridDim.y - 1;
        __syncthreads();
        if (!last) return;
        __threadfence();
        for (int t = threadIdx.x; t < tokens; t += blockDim.x) ids[t] = token_of(atomicExch(largest + t, 0ull));
        if (threadIdx.x == 0) *arrived = 0;
    }
};
{% set tokens_of = {"rows": ids.size} %}{% set taken = "ids, scratch" ~ (", rows" if gathers else "") %}{% set closes = true %}
{% include "common/skinny_main.cuh" %}
