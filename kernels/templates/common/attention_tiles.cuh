// Query tiles for steps in which sequences have any number of tokens. A tile has up to TOKENS
// tokens of one sequence, and all query heads of one KV head: row r is token r / GROUP, head
// r % GROUP, so that the group shares every load of keys and values.
//
// A sequence's tiles are numbered from first[b] / TOKENS + b on. That leaves room for all of them
// (ceil(n / TOKENS) <= (first + n) / TOKENS - first / TOKENS + 1), needs no sum over sequences, and
// bounds the grid by T / TOKENS + sequences. Numbers left over are empty tiles.
struct QueryTile { int b, token, tokens, position; };   // first token, its row in the context

// Every thread of the block gets it; no tokens: nothing to do. Long tiles first: causal work grows
// with the number, and what starts last should be short. KV heads are next to each other in the grid.
__device__ __forceinline__ QueryTile find_tile(const Step* step) {
    __shared__ QueryTile found;
    const int B = step->seqs, id = (int)((gridDim.x - 1 - blockIdx.x) / HKV);
    const int* first = step->first;
    if (threadIdx.x == 0) found = QueryTile{0, 0, 0, 0};
    __syncthreads();
    for (int b = threadIdx.x; b < B; b += blockDim.x) {
        const int from = first[b], to = first[b + 1], in = id - (from / TOKENS + b);
        if (in >= 0 && from + in * TOKENS < to && id < to / TOKENS + b + 1) {
            const int token = from + in * TOKENS;
            found = QueryTile{b, token, min(TOKENS, to - token), step->positions[token]};
        }
    }
    __syncthreads();
    return found;
}
