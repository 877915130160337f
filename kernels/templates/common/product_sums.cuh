    // Within product.cuh: where the sums of blocks and of warpgroups meet, and what becomes of them.
    // Makes a block's sums those of all of K, where other blocks had stages of the tile, too: see left_sums.cuh. False for all but the last one.
    // A block leaves at most two tiles' sums: of the one that its share begins in, and of the one that it ends in.
    __device__ __forceinline__ bool collect(float (&sums)[TOKENS / 8][4], const Turn& turn, int group, int me) const {
        if constexpr (!STREAMS) return true;
        if (turn.w_steps == W_STEPS) return true;
        constexpr int EACH = TOKENS / 8 * 128;         // of a warpgroup
        const auto of = [&](int block, bool begins) { return (float4*)scratch + ((block * 2 + begins) * GROUPS + group) * EACH + me; };
        const int from = block_of(turn.item * W_STEPS), to = block_of(turn.item * W_STEPS + W_STEPS - 1);
        u32* const count = (u32*)((float4*)scratch + gridDim.x * 2 * GROUPS * EACH) + turn.item * GROUPS + group;
        leave_sums(of(blockIdx.x, turn.w_begin == 0), sums);
        if (!is_last_to_leave<GROUPS>(count, to - from, group, me)) return false;
        add_left_sums(sums, to - from + 1, [&](int i) { return of(from + i, i == 0); });
        return true;
    }

    // Sums go to shared memory, a token a row, so that what belongs together meets in one thread. All warpgroups that part a tile's
    // K share what is left to do of it; where results are rounded, all that part its rows do, too, so that a group is sixteen threads'.
    __device__ __forceinline__ void finish(const float (&sums)[TOKENS / 8][4], Place at, int group, int me, int& chunks) {
        constexpr int BUFFER = CHUNK * ROW * (MERGES ? 2 : 1);   // floats of a warpgroup
        // What warpgroups share: outputs, and threads.
        constexpr int SHARED = Op::ROUNDS ? OUTPUTS * TALL : OUTPUTS, SHARING = 128 * (Op::ROUNDS ? GROUPS : SLICES);
        static_assert(!Op::ROUNDS || (ONCE && !MERGES && SLICES == 1 && SHARED == 128 && ALL % 128 == 0), "a tile is a group");
        static_assert(!ONCE || (CHUNK == TOKENS && GROUPS * BUFFER * 4 <= WEIGHTS * W_BYTES + ACTIVATIONS * (X_BYTES + SCALES)), "room for sums");
        const int before = Op::ROUNDS ? 0 : group - slice(), q0 = at.output + before / SLICES * OUTPUTS, mine = SHARING == 128 ? me : (int)threadIdx.x;
        float* const first = (float*)(base + (ONCE ? 0 : WEIGHTS * W_BYTES + ACTIVATIONS * (X_BYTES + SCALES))) + before * BUFFER;   // of the tile
        float* const own = first + (group - before) * BUFFER;
        float* const inbound = own + CHUNK * ROW;      // SHARE tokens of each block of the cluster
        const auto together = [&]() { asm volatile("bar.sync %0, %1;" ::"r"(1 + before / SLICES), "n"(SHARING) : "memory"); };
#pragma unroll
        for (int c = 0; c < TOKENS / CHUNK; c++, chunks++) {
            const int base_token = at.token + c * CHUNK, tokens = min(CHUNK, at.end - base_token);
            const int from = MERGES ? rank * SHARE : 0, to = MERGES ? min(tokens, from + SHARE) : tokens;
            // What a thread will finish: eight outputs of a token each time. What that takes beside sums is asked for before they meet.
            constexpr int EIGHTS = SHARED / 8, EACH = (SHARE * EIGHTS + SHARING - 1) / SHARING;
            const auto item = [&](int n) { return mine + from * EIGHTS + n * SHARING; };
            const auto is_there = [&](int i) { return i < to * EIGHTS && q0 + i % EIGHTS * 8 < ALL; };
            typename Op::Early early[EACH];
            const auto ask = [&]() {
#pragma unroll
                for (int n = 0; n < EACH; n++)
                    if (is_there(item(n))) early[n] = op.early(q0 + item(n) % EIGHTS * 8, base_token + item(n) / EIGHTS);
            };
            if (!ONCE) ask();
            if (ONCE) {                                // all have read the rings, and other blocks hear of it
                asm volatile("bar.sync %0, %1;" ::"n"(1 + GROUPS), "n"(128 * GROUPS) : "memory");
                if (MERGES && me < RANKS && me != rank) barrier_arrive_at(inbound_empty + group * 8, me);
            } else if (!MERGES) together();            // all have read the chunk before
            else if (chunks > 0) barrier_wait(inbound_empty + group * 8, (chunks - 1) & 1);
#pragma unroll
            for (int j = 0; j < CHUNK / 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    own[(j * 8 + lane % 4 * 2 + i % 2) * ROW + warp % 4 * 16 + lane / 4 + i / 2 * 8] = sums[c * (CHUNK / 8) + j][i];
            if (ONCE) ask();                           // no register holds sums any more
            if (MERGES) fence_products();
            together();
            if (MERGES) {
                const u32 full = inbound_full + group * 8;
                if (me == 0) barrier_expect(full, (RANKS - 1) * SHARE * ROW * 4);
                if (ONCE && me < RANKS) barrier_wait(inbound_empty + group * 8, 0);
                if (me < RANKS && me != rank) send(shared_at(inbound + rank * SHARE * ROW), shared_at(own + me * SHARE * ROW), SHARE * ROW * 4, full, me);
#pragma unroll
                for (int i = 0; i < SLICES; i++) barrier_wait(inbound_full + (group - slice() + i) * 8, chunks & 1);
            }
{% if adapts is defined %}
            op.adapted.await();
{% endif %}
#pragma unroll
            for (int n = 0; n < EACH; n++) {
                const int i = item(n), t = i / EIGHTS, q = i % EIGHTS * 8;
                const int other = SHARED == OUTPUTS ? 0 : q / OUTPUTS;   // the warpgroup of those that share that has it
                if (!is_there(i)) continue;
                float v[2][8] = {};
#pragma unroll
                for (int part = 0; part < Op::PARTS; part++)
#pragma unroll
                    for (int s = 0; s < RANKS * SLICES{{ " + 1" if adapts is defined }}; s++) {
                        const int of_rank = s / SLICES;
                        const float* buffer = first + (s % SLICES + other) * BUFFER;
                        const float* of = (of_rank == rank ? buffer + t * ROW : buffer + CHUNK * ROW + (of_rank * SHARE + t - from) * ROW) + q - other * OUTPUTS + part * 32;
{% if adapts is defined %}
                        if (s == RANKS) of = adapted_parts() + (t - from) * ROW + q + part * 32;
{% endif %}
                        const float4 a = *(const float4*)of, b = *(const float4*)(of + 4);
                        v[part][0] += a.x, v[part][1] += a.y, v[part][2] += a.z, v[part][3] += a.w;
                        v[part][4] += b.x, v[part][5] += b.y, v[part][6] += b.z, v[part][7] += b.w;
                    }
                op.finish(q0 + q, base_token + t, v[0], v[1], early[n]);
            }
{% if adapts is defined %}
            op.adapted.give_back();
{% endif %}
            if (MERGES && !ONCE) {
                together();
                if (me < RANKS && me != rank) barrier_arrive_at(inbound_empty + group * 8, me);
            }
        }
    }
