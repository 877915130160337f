// Query tiles for steps in which sequences have any number of tokens. A tile has up to TOKENS
// tokens of one sequence, and all query heads of one KV head: row r is token r / GROUP, head
// r % GROUP, so that the group shares every load of keys and values.
//
// A sequence's tiles are numbered from first[b] / TOKENS + b on. That leaves room for all of them
// (ceil(n / TOKENS) <= (first + n) / TOKENS - first / TOKENS + 1), needs no sum over sequences, and
// bounds the grid by T / TOKENS + sequences. Numbers left over are empty tiles.
struct QueryTile { int b, token, tokens, position; };   // first token, its row in the context

// Tile `id`, if it is one of sequence b's.
__device__ __forceinline__ bool is_tile_of(const Step* step, int b, int id, QueryTile& tile) {
    const int from = step->first[b], to = step->first[b + 1], in = id - (from / TOKENS + b);
    if (in < 0 || from + in * TOKENS >= to || id >= to / TOKENS + b + 1) return false;
    const int token = from + in * TOKENS;
    tile = QueryTile{b, token, min(TOKENS, to - token), step->positions[token]};
    return true;
}

// Every thread of the block gets it; no tokens: nothing to do. Long tiles first: causal work grows
// with the number, and what starts last should be short. KV heads are next to each other in the grid.
__device__ __forceinline__ QueryTile find_tile(const Step* step) {
    __shared__ QueryTile found;
    const int B = step->seqs, id = (int)((gridDim.x - 1 - blockIdx.x) / HKV);
    if (threadIdx.x == 0) found = QueryTile{0, 0, 0, 0};
    __syncthreads();
    for (int b = threadIdx.x; b < B; b += blockDim.x) {
        QueryTile tile;
        if (is_tile_of(step, b, id, tile)) found = tile;
    }
    __syncthreads();
    return found;
}
// The same of tile `id`, for a warp that looks on its own. Numbers ascend from sequence to sequence: it is one of the last one's whose
// tiles begin at `id` or before, which the lanes look for among as many as there are, then among those between two of them.
__device__ __forceinline__ QueryTile find_tile_by_warp(const Step* step, int id) {
    const int lane = threadIdx.x % 32;
    int b = 0, among = step->seqs;
    while (among > 1) {
        const int apart = (among + 31) / 32, other = b + lane * apart;
        const bool begins = lane * apart < among && step->first[other] / TOKENS + other <= id;
        const int last = max(__popc(__ballot_sync(0xffffffffu, begins)) - 1, 0);
        b += last * apart, among = min(apart, among - last * apart);
    }
    QueryTile tile{};
    if (!is_tile_of(step, b, id, tile)) tile.tokens = 0;
    return tile;
}
