// Any number of tokens a sequence: a block has some of one sequence, and looks at all that they see. Tiles begin at multiples of
// COLS counted from position 0, so that a row is summed alike in every step.
constexpr int HKV = HEAD_GROUPS;                    // blocks side by side that share tokens
{% include "common/attention_tiles.cuh" %}

extern "C" __global__ void __launch_bounds__({{ block }}) {{ kernel }}({{ params }}) {
    extern __shared__ __align__(128) u8 shared[];
    const QueryTile tile = find_tile(step);
    pdl_wait();
    pdl_launch();
    if (tile.tokens == 0) return;
    const Work work{tile.b, tile.token, tile.tokens, tile.position, (int)(blockIdx.x % HKV),
                    first_seen(tile.position) / COLS, (tile.position + tile.tokens + COLS - 1) / COLS};
    Attend attend(shared);
    attend.run(step, work, q_latent, q_rope, latents, keys);
    attend.each([&](int r, int d, float x, float y) {
        if (!is_there(work, r)) return;
        const float2 end = attend.end(r);
        const float f = row_factor(end.x, end.y);
        *(u32*)(mixed + query_row(work, r) * R + d) = pack_pair(x * f, y * f);
    });
}
