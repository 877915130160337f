// Row `row` = h * T + t of a ragged [H, T, S]: where it begins, and how many elements it has.
struct RaggedRow { i64 start; int t, context; };
__device__ __forceinline__ RaggedRow ragged_row(const Step* step, i64 row) {
    const int t = (int)(row % step->T);
    return {row / step->T * step->pairs + step->pair_start[t], t, step->context[step->seq[t]]};
}
