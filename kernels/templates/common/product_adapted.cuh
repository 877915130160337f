// Within product.cuh: what its blocks do of low-rank parts, which are adapted.cuh's.
    // What adapted.cuh keeps in shared memory, behind the sums: rows of `b`, first halves, and a tile's low-rank parts.
    static_assert(GROUPS == 1 && CHUNK == TOKENS && !STREAMS && !Op::CODED && !Op::GROUPED, "shape");
    __device__ __forceinline__ u8* adapted_rows() const { return base + WEIGHTS * W_BYTES + ACTIVATIONS * X_BYTES + CHUNK * ROW * 4 * (MERGES ? 2 : 1); }
    __device__ __forceinline__ u8* adapted_low() const { return adapted_rows() + 32768; }
    __device__ __forceinline__ float* adapted_parts() const { return (float*)(adapted_low() + 4 * SHARE * (Adapted::RANKS + 16)); }
    // Four warps: low-rank parts, a tile after the other.
    __device__ __forceinline__ void adapt() {
        const Adapted& adapted = op.adapted;
        const u32 rows = shared_at(adapted_rows());
        Turn turn = first();
        const auto fetch = [&]() {
            if (turn.item < work) adapted.template fetch<Op>(place(turn.item).output, 0, rows);
        };
        for (int i = Adapted::me(); i < SHARE * ROW; i += 128) adapted_parts()[i] = 0;
        // Banks are weights. An exception to reading nothing of a step before the wait: slots that are the step's input are there already;
        // where a kernel makes them they may be stale, and are then read once more.
        Adapted::Held held;
        adapted.list();
        adapted.ask(held, blockIdx.x, 0);
        adapted.ask_ahead(blockIdx.x);
        adapted.ask_ahead(blockIdx.x + gridDim.x);
        fetch();
        pdl_wait();
        adapted.take(held, blockIdx.x, 0);
        if (adapted.is_stale()) {
            copy_wait<0>();
            adapted.list();
            adapted.ask(held, blockIdx.x, 0);
            adapted.take(held, blockIdx.x, 0);
            fetch();
        }
        adapted.shrink(held, (float (*)[8][Adapted::RANKS])adapted_low());
        // Of a single tile those parts are needed that it is of.
        const int last = Op::N - 1, q0 = turn.item < work ? place(turn.item).output : 0;
        const bool single = after(turn).item >= work;
        const int from = single ? Adapted::part_of(Op::row(q0, 0)) : 0, to = single ? Adapted::part_of(min(Op::row(q0 + OUTPUTS - 1, Op::PARTS - 1), last)) : Adapted::PARTS - 1;
        adapted.gather(({{ x.type }}*)adapted_low(), from, to - from + 1);
        bool left = false;
        while (turn.item < work) {
            adapted.template expand<Op, ROW>(adapted_parts(), place(turn.item).output, rows, shared_at(adapted_low()));
            adapted.give();
            turn = after(turn);
            fetch();
            if (!left) adapted.leave(), left = true;   // while others finish the tile
            adapted.await_back();
        }
        if (!left) adapted.leave();
    }
