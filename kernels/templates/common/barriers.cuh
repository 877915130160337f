// Barriers in shared memory, and copies that arrive at them (Hopper).
// Whether there is a copy engine.
#if __CUDA_ARCH__ >= 900
constexpr bool ENGINE = true;
#else
constexpr bool ENGINE = false;
#endif
__device__ __forceinline__ u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void barrier_init(u32 at, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }
// Arrives once what this thread has asked for by copies of 16 bytes is there: one of the arrivals that the barrier waits for.
__device__ __forceinline__ void barrier_arrive_copied(u32 at) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}
// At the barrier at the same place in block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive_at(u32 at, u32 rank) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(at), "r"(rank) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 at, u32 parity) {
    asm volatile("{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @done bra OVER; bra AGAIN; OVER: }" ::"r"(at), "r"(parity) : "memory");
}
// A tile that begins at (row, column).
__device__ __forceinline__ void copy_tile(u32 to, const TileMap* map, int column, int row, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, { %2, %3 }], [%4], %5;"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy) : "memory");
}
// Bytes side by side, multiples of 16.
__device__ __forceinline__ void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
// This block's shared memory to that of block `rank`, whose barrier counts the bytes.
__device__ __forceinline__ void send(u32 to, u32 from, u32 bytes, u32 barrier, u32 rank) {
    asm volatile("{ .reg .b32 there, its; mapa.shared::cluster.u32 there, %0, %4; mapa.shared::cluster.u32 its, %3, %4;\n"
                 "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%1], %2, [its]; }"
                 ::"r"(to), "r"(from), "r"(bytes), "r"(barrier), "r"(rank) : "memory");
}
// Of packed codes of 8 bits: 64 columns, half HALF of unit `unit` across, of the eights of rows from `eight` on, likewise to blocks
// of the cluster.
__device__ __forceinline__ void copy_coded_tile(u32 blocks, u32 to, const TileMap* map, int half, int unit, int eight, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, { %2, %3, %4, %5 }], [%6], %7, %8;"
                 ::"r"(to), "l"(map), "r"(0), "r"(eight), "r"(half * 4), "r"(unit), "r"(barrier), "h"((unsigned short)blocks), "l"(policy) : "memory");
}
// Whole units of packed codes: unit `unit` across, of the eights of rows from `eight` on.
__device__ __forceinline__ void copy_units(u32 to, const TileMap* map, int unit, int eight, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, { %2, %2, %3, %4 }], [%5], %6;"
                 ::"r"(to), "l"(map), "r"(0), "r"(unit), "r"(eight), "r"(barrier), "l"(policy) : "memory");
}
// The same of a tile whose rows are dealt (the README says how), to the same place in each block of the cluster whose bit is
// set in `blocks`, and so its bytes to their barriers; `row` is a multiple of 32.
__device__ __forceinline__ void copy_dealt_tile(u32 blocks, u32 to, const TileMap* map, int column, int row, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, { %2, %3, %3, %3, %4 }], [%5], %6, %7;"
                 ::"r"(to), "l"(map), "r"(column), "r"(0), "r"(row / 32), "r"(barrier), "h"((unsigned short)blocks), "l"(policy) : "memory");
}
