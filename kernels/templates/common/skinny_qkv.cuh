// w is the rows of all queries, keys and values. What rope turns together is in one thread: the two parts of an output with
// halves (neox), neighbours otherwise. What it leaves alone is taken in halves, too.
struct Op : Linear {
    static constexpr int D = {{ k_cache.dim }}, G = {{ k_cache.heads }}, VALUES = {{ v_cache.heads * v_cache.dim }};
    static constexpr int H = (N - G * D - VALUES) / D, R = {{ freqs.size }};
    static constexpr bool NEOX = {{ "true" if style == "neox" else "false" }};
    static constexpr int PARTS = NEOX ? 2 : 1, PER_HEAD = D / PARTS, QUERIES_KEYS = (H + G) * PER_HEAD;
    static constexpr int BOX = !NEOX ? 64 : D % 64 == 0 && R % 32 == 0 ? 32 : D % 32 == 0 && R % 16 == 0 ? 16 : 8;
    static constexpr int APART = {{ "NEOX ? R : 0" if p.outputs is defined else "0" }};   // halves are a head's then, of values, too
    static constexpr int TURNS = NEOX ? 8 : 4;         // that eight outputs have
    static_assert(APART == 0 || (D == 2 * R && VALUES % D == 0), "halves of heads");
    static_assert(D % 16 == 0 && R % 8 == 0 && VALUES % 16 == 0 && N % 64 == 0, "eight outputs have one fate");
    const {{ positions.type }}* positions;
    const {{ freqs.type }}* freqs;
    {{ k_cache.type }}* k_cache;
    {{ v_cache.type }}* v_cache;
    {{ rotated.type }}* rotated;
    const Step* step;                                  // an argument, where registers would hold what it points to
    __device__ __forceinline__ void take(const {{ positions.type }}* positions_, const {{ freqs.type }}* freqs_,
        {{ k_cache.type }}* k, {{ v_cache.type }}* v, {{ rotated.type }}* to, const Step* step_) {
        positions = positions_, freqs = freqs_, k_cache = k, v_cache = v, rotated = to, step = step_;
    }
    // Where in its head, or among the values, output i has its part.
    __device__ __forceinline__ static int place(int i, int part) {
        return !NEOX ? i : i < R ? i + part * R : i + (part == 0 ? R : D / 2);
    }
    __device__ __forceinline__ static int row(int q, int part) {
        if (APART == 0 && q >= QUERIES_KEYS) return (H + G) * D + q - QUERIES_KEYS + part * (VALUES / 2);
        return q / PER_HEAD * D + place(q % PER_HEAD, part);
    }
    // Of output i of a head, and of the pair that it is turned by.
    __device__ __forceinline__ void angle(int position, int i, float& sine, float& cosine) const {
        rotary(__fmul_rn((float)position, to_f32(freqs[i])), {{ scale | f32 }}, sine, cosine);
    }
{% if p.outputs is defined %}
    // Where a token's rows go in the cache, and what turns eight outputs: a thread has the same ones of several heads.
    struct Early {
        int slot;
        float sine[TURNS], cosine[TURNS];
        __device__ __forceinline__ void angle(const Op&, int, int j, float& s, float& c) const { s = sine[j], c = cosine[j]; }
    };
    __device__ __forceinline__ Early early(int q, int t) const {
        Early by = {step->slots[t]};
        const int position = positions[t], i = q % PER_HEAD / (8 / TURNS);
        if (q < QUERIES_KEYS && i < R) {
#pragma unroll
            for (int j = 0; j < TURNS; j++) angle(position, i + j, by.sine[j], by.cosine[j]);
        }
        return by;
    }
    __device__ __forceinline__ static const Early& of_token(int, const Early& early) { return early; }
{% else %}
    struct Token {
        int position, slot;
        __device__ __forceinline__ void angle(const Op& op, int i, int j, float& s, float& c) const { op.angle(position, i + j, s, c); }
    };
    __device__ __forceinline__ static Token* kept() {
        __shared__ Token of_tokens[{{ p.groups * p.tokens }}];
        return of_tokens + threadIdx.x / 128 * {{ p.tokens }};
    }
    __device__ __forceinline__ void prepare() const {
        for (int t = threadIdx.x % 128; t < tokens; t += 128) kept()[t] = Token{positions[t], step->slots[t]};
    }
    __device__ __forceinline__ static Token of_token(int t, const Early&) { return kept()[t]; }
{% endif %}
    // j-th of those that eight outputs from output i on of a head are turned by.
    template <class By> __device__ __forceinline__ void turn(const By& by, int i, int j, float& a, float& b) const {
        float sine, cosine;
        by.angle(*this, i, j, sine, cosine);
        const float first = fmaf(a, cosine, -__fmul_rn(b, sine));   // as rope_kv_write's sums come to be
        b = fmaf(b, cosine, __fmul_rn(a, sine));
        a = first;
    }
    template <class C> __device__ __forceinline__ static void put(C* head, int i, const float (&a)[8], const float (&b)[8]) {
        ::store(head + place(i, 0), a);
        if (NEOX) ::store(head + place(i, 1), b);
    }
    __device__ __forceinline__ void finish(int q, int t, float (&a)[8], float (&b)[8], const Early& early) const {
        const auto& by = of_token(t, early);
        complete(a, row(q, 0), t);
        if (NEOX) complete(b, row(q, 1), t);
{% if w.packing %}
        round_as<{{ rotated.type }}>(a);               // as the product alone would give it
        if (NEOX) round_as<{{ rotated.type }}>(b);
{% endif %}
        if (q >= QUERIES_KEYS) {
            {{ v_cache.type }}* const to = v_cache + (i64)by.slot * VALUES - (H + G) * D;
            ::store(to + row(q, 0), a);
            if (NEOX) ::store(to + row(q, 1), b);
            return;
        }
        const int head = q / PER_HEAD, i = q % PER_HEAD;
        if (NEOX && i < R) {
#pragma unroll
            for (int j = 0; j < 8; j++) turn(by, i, j, a[j], b[j]);
        } else if (!NEOX && i < 2 * R) {
#pragma unroll
            for (int j = 0; j < 8; j += 2) turn(by, i / 2, j / 2, a[j], a[j + 1]);
        }
        if (head < H) put(rotated + ((i64)t * H + head) * D, i, a, b);
        else put(k_cache + ((i64)by.slot * G + head - H) * D, i, a, b);
    }
};
{% set tokens_of = x %}{% set taken = "positions, freqs, k_cache, v_cache, rotated, step" %}
{% include "common/skinny_main.cuh" %}
