// A recurrence, token by token: `scan.cu.j2` says how. What includes it sets `memory`, the name of the state, and `result`, the rows.
constexpr int COLUMNS = {{ scan.columns }}, DEPTH = {{ scan.depth }}, SHARE = {{ p.columns }}, SLICES = {{ p.slices }};
constexpr int THREADS = SHARE * SLICES, OWN = (DEPTH + SLICES - 1) / SLICES;
constexpr bool EVEN = DEPTH % SLICES == 0, FOURS = DEPTH % (4 * SLICES) == 0;
// What of a token is in shared memory, and tokens of a group.
constexpr int WIDTH = {{ (scan.staged + 3) // 4 * 4 }}, GROUP = WIDTH <= 320 ? 16 : WIDTH <= 640 ? 8 : 4;

// Where along its column a thread's element j is: slices take turns, four elements each where that is even.
__device__ __forceinline__ int depth_of(int slice, int j) {
    return FOURS ? (j / 4 * SLICES + slice) * 4 + j % 4 : slice + j * SLICES;
}
// An input's share of a group of tokens, on its way to shared memory through a thread's registers: SPAN elements of each token.
template <class T, int SPAN, int AT> struct Staged {
    static constexpr int COUNT = (GROUP * SPAN + THREADS - 1) / THREADS;
    T own[COUNT];
    __device__ __forceinline__ void ask(const T* from, i64 elements, i64 first, i64 end) {
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            const int i = n * THREADS + threadIdx.x;
            const i64 t = first + i / SPAN;
            if (i < GROUP * SPAN && t < end) own[n] = from[t * elements + i % SPAN];
        }
    }
    __device__ __forceinline__ void keep(float* to) const {
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            const int i = n * THREADS + threadIdx.x;
            if (i < GROUP * SPAN) to[i / SPAN * WIDTH + AT + i % SPAN] = to_f32(own[n]);
        }
    }
};
template <int SPAN, int AT, class T> __device__ __forceinline__ Staged<T, SPAN, AT> staged(const T*) { return {}; }

{%- macro elements() %}
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            const int depth = depth_of(slice, j);
            if (!EVEN && depth >= DEPTH) continue;
{%- endmacro %}
{%- macro places() %}
{%- for axis in scan.axes %}
    const int {{ axis.name }} = column / {{ axis.step }} % {{ axis.size }};
{%- endfor %}
{%- endmacro %}
extern "C" __global__ void __launch_bounds__({{ block }}) {{ kernel }}({{ params }}) {
    const int slice = threadIdx.x % SLICES, local = threadIdx.x / SLICES, seq = blockIdx.y;
    const bool is_there = blockIdx.x * SHARE + local < COLUMNS;
    const int column = is_there ? blockIdx.x * SHARE + local : COLUMNS - 1;
    {{- places() }}
{%- if scan.sums %}
    // Of what slices have: all of them get it.
    const auto sum = [](float x) {
#pragma unroll
        for (int d = 1; d < SLICES; d *= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
        return x;
    };
{%- endif %}
    pdl_launch();
    pdl_wait();
    if (seq >= step->seqs) return;
    const int* table = step->blocks + (i64)seq * step->block_stride;
    const i64 first = step->first[seq], end = step->first[seq + 1];
{%- if scan.staged %}
    __shared__ __align__(16) float group[2][GROUP * WIDTH];
{%- for input in scan.inputs if input.staged %}
    auto next_{{ input.name }} = staged<{{ input.staged.span }}, {{ input.staged.at }}>({{ input.operand }});
    const auto* const from_{{ input.name }} = {{ input.operand }} + [] {  // the block's first element of a token's
        const int column = blockIdx.x * SHARE, depth = 0;
        {{- places() }}
        return {{ input.at }};
    }();
{%- endfor %}
    const auto ask = [&](i64 t) {
{%- for input in scan.inputs if input.staged %}
        next_{{ input.name }}.ask(from_{{ input.name }}, {{ input.elements }}, t, end);
{%- endfor %}
    };
    const auto keep = [&](float* to) {
{%- for input in scan.inputs if input.staged %}
        next_{{ input.name }}.keep(to);
{%- endfor %}
        __syncthreads();
    };
    ask(first);
{%- endif %}
    float {{ scan.state }}[OWN];
{%- if scan.inner_is_summed and scan.state_is_f32 %}
    if constexpr (FOURS) {
#pragma unroll
        for (int j = 0; j < OWN; j += 4) {
            const int depth = depth_of(slice, j);
            slot_read4({{ memory }}, {{ memory }}_place, table, {{ scan.state_at }}, &{{ scan.state }}[j]);
        }
    } else
{%- endif %}
    {
        {{- elements() }}
            {{ scan.state }}[j] = slot_read({{ memory }}, {{ memory }}_place, table, {{ scan.state_at }});
        }
    }
{%- for input in scan.inputs if not input.per_token %}
{%- if input.deep %}
    float {{ input.name }}[OWN];
    {{- elements() }}
            {{ input.name }}[j] = to_f32({{ input.operand }}[{{ input.at }}]);
        }
{%- else %}
    const float {{ input.name }} = to_f32({{ input.operand }}[{{ input.at }}]);
{%- endif %}
{%- endfor %}
{%- if scan.staged %}
    keep(group[0]);
{%- endif %}
    for (i64 begin = first, turn = 0; begin < end; begin += GROUP, turn ^= 1) {
{%- if scan.staged %}
        ask(begin + GROUP);
{%- endif %}
        for (i64 t = begin; t < end && t < begin + GROUP; t++) {
{%- if scan.staged %}
            const float* const now = group[turn] + (t - begin) * WIDTH;
{%- endif %}
{%- for input in scan.inputs if input.per_token %}
{%- if input.staged and input.deep and scan.sums %}
            float {{ input.name }}[OWN];
            if constexpr (FOURS) {
#pragma unroll
                for (int j = 0; j < OWN; j += 4) *(float4*)&{{ input.name }}[j] = *(const float4*)(now + {{ input.staged.at }} + depth_of(slice, j));
            } else {
            {{- elements() }}
                {{ input.name }}[j] = now[{{ input.staged.at }} + depth];
            }
            }
{%- elif input.deep %}
            float {{ input.name }}[OWN];
            {{- elements() }}
                {{ input.name }}[j] = {{ "now[" ~ input.staged.at ~ (" + local" if input.staged.span > 1) ~ "]" if input.staged else "to_f32(" ~ input.operand ~ "[t * " ~ input.elements ~ " + " ~ input.at ~ "])" }};
            }
{%- elif input.staged %}
            const float {{ input.name }} = now[{{ input.staged.at }}{{ " + local" if input.staged.span > 1 }}];
{%- else %}
            const float {{ input.name }} = to_f32({{ input.operand }}[t * {{ input.elements }} + {{ input.at }}]);
{%- endif %}
{%- endfor %}
{%- for made in scan.body %}
{%- if made.sum %}
            // Four sums at a time, so that none waits for its last addition.
            float parts_{{ made.name }}[4] = {};
            {{- elements() }}
                parts_{{ made.name }}[j % 4] += {{ made.value }};
            }
            const float {{ made.name }} = sum((parts_{{ made.name }}[0] + parts_{{ made.name }}[1]) + (parts_{{ made.name }}[2] + parts_{{ made.name }}[3]));
{%- elif made.deep %}
            {{ "" if made.is_state else "float " ~ made.name ~ "[OWN];" }}
            {{- elements() }}
                {{ made.name }}[j] = {{ made.value }};
            }
{%- else %}
            const float {{ made.name }} = {{ made.value }};
{%- endif %}
{%- endfor %}
{%- if scan.result.deep %}
            {{- elements() }}
                if (is_there) {{ result.name }}[t * {{ scan.result.elements }} + {{ scan.result.at }}] = from_f32<{{ result.type }}>({{ scan.result.name }}[j]);
            }
{%- else %}
            if (is_there && slice == 0)
                {{ result.name }}[t * {{ scan.result.elements }} + {{ scan.result.at }}] = from_f32<{{ result.type }}>({{ scan.result.name }});
{%- endif %}
        }
{%- if scan.staged %}
        keep(group[turn ^ 1]);
{%- endif %}
    }
    if (!is_there) return;
{%- if scan.inner_is_summed and scan.state_is_f32 %}
    if constexpr (FOURS) {
#pragma unroll
        for (int j = 0; j < OWN; j += 4) {
            const int depth = depth_of(slice, j);
            slot_write4({{ memory }}, {{ memory }}_place, table, {{ scan.state_at }}, &{{ scan.state }}[j]);
        }
        return;
    }
{%- endif %}
    {{- elements() }}
            slot_write({{ memory }}, {{ memory }}_place, table, {{ scan.state_at }}, {{ scan.state }}[j]);
        }
}
