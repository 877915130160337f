// w is the rows of all queries, keys and values. What rope turns together is in one thread: the two parts of an output with
// halves (neox), neighbours otherwise. What it leaves alone is taken in halves, too.
struct Op : Linear {
    static constexpr int D = {{ k_cache.dim }}, G = {{ k_cache.heads }}, VALUES = {{ v_cache.heads * v_cache.dim }};
    static constexpr int H = (N - G * D - VALUES) / D, R = {{ freqs.size }};
    static constexpr bool NEOX = {{ "true" if style == "neox" else "false" }};
    static constexpr int PARTS = NEOX ? 2 : 1, PER_HEAD = D / PARTS, QUERIES_KEYS = (H + G) * PER_HEAD;
    static constexpr int BOX = !NEOX ? 64 : D % 64 == 0 && R % 32 == 0 ? 32 : D % 32 == 0 && R % 16 == 0 ? 16 : 8;
    static_assert(D % 16 == 0 && R % 8 == 0 && VALUES % 16 == 0 && N % 64 == 0, "eight outputs have one fate");
    const {{ positions.type }}* positions;
    const {{ freqs.type }}* freqs;
    {{ k_cache.type }}* k_cache;
    {{ v_cache.type }}* v_cache;
    {{ rotated.type }}* rotated;
    const int* slots;
    __device__ __forceinline__ void take(const {{ positions.type }}* positions_, const {{ freqs.type }}* freqs_,
        {{ k_cache.type }}* k, {{ v_cache.type }}* v, {{ rotated.type }}* to, const int* slots_) {
        positions = positions_, freqs = freqs_, k_cache = k, v_cache = v, rotated = to, slots = slots_;
    }
    // Where in its head, or among the values, output i has its part.
    __device__ __forceinline__ static int place(int i, int part) {
        return !NEOX ? i : i < R ? i + part * R : i + (part == 0 ? R : D / 2);
    }
    __device__ __forceinline__ static int row(int q, int part) {
        if (q >= QUERIES_KEYS) return (H + G) * D + q - QUERIES_KEYS + part * (VALUES / 2);
        return q / PER_HEAD * D + place(q % PER_HEAD, part);
    }
    struct Token { int position, slot; };
    __device__ __forceinline__ static Token* kept() {
        __shared__ Token of_tokens[{{ p.groups * p.tokens }}];
        return of_tokens + threadIdx.x / 128 * {{ p.tokens }};
    }
    __device__ __forceinline__ void prepare() const {
        for (int t = threadIdx.x % 128; t < tokens; t += 128) kept()[t] = Token{positions[t], slots[t]};
    }
    __device__ __forceinline__ void turn(int position, int i, float& a, float& b) const {
        float sine, cosine;
        rotary(__fmul_rn((float)position, to_f32(freqs[i])), {{ scale | f32 }}, sine, cosine);
        const float turned = a * cosine - b * sine;
        b = b * cosine + a * sine;
        a = turned;
    }
    template <class C> __device__ __forceinline__ static void put(C* head, int i, const float (&a)[8], const float (&b)[8]) {
        ::store(head + place(i, 0), a);
        if (NEOX) ::store(head + place(i, 1), b);
    }
    __device__ __forceinline__ void finish(int q, int t, float (&a)[8], float (&b)[8], const Early&) const {
        const Token token = kept()[t];
        complete(a, row(q, 0), t);
        if (NEOX) complete(b, row(q, 1), t);
        if (q >= QUERIES_KEYS) {
            {{ v_cache.type }}* const to = v_cache + (i64)token.slot * VALUES + q - QUERIES_KEYS;
            ::store(to, a);
            if (NEOX) ::store(to + VALUES / 2, b);
            return;
        }
        const int head = q / PER_HEAD, i = q % PER_HEAD;
        if (NEOX && i < R) {
#pragma unroll
            for (int j = 0; j < 8; j++) turn(token.position, i + j, a[j], b[j]);
        } else if (!NEOX && i < 2 * R) {
#pragma unroll
            for (int j = 0; j < 8; j += 2) turn(token.position, (i + j) / 2, a[j], a[j + 1]);
        }
        if (head < H) put(rotated + ((i64)t * H + head) * D, i, a, b);
        else put(k_cache + ((i64)token.slot * G + head - H) * D, i, a, b);
    }
};
{% set tokens_of = x %}{% set taken = "positions, freqs, k_cache, v_cache, rotated, step->slots" %}
{% include "common/skinny_main.cuh" %}
