// Weights that the next launches read, as far as they lie side by side: whoever has asked for all of its own has them brought to
// the L2 cache, so that memory is read while launches wait for each other. Nothing depends on it.
struct Ahead {
    static constexpr u32 PIECE = 4096;
    const u8* from;
    u64 bytes;                                         // a multiple of 16
    // Asks for piece `part` of each `parts`.
    __device__ __forceinline__ void bring(u32 part, u32 parts) const {
#if __CUDA_ARCH__ >= 900
#pragma unroll 1
        for (u64 at = (u64)part * PIECE; at < bytes; at += (u64)parts * PIECE)
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + at), "r"((u32)min((u64)PIECE, bytes - at)) : "memory");
#endif
    }
};
