// States of a fixed size: a sequence's lies spread over its blocks of an array of the cache. `place` has the first of
// these blocks in its upper half, the bytes of a block in its lower; `table` is the sequence's row of step->blocks.
template <class T>
__device__ __forceinline__ T* slot_at(T* array, u64 place, const int* table, u32 element, int which) {
    const u32 block = (u32)place, first = (u32)(place >> 32), at = element * sizeof(T);
    // at / block and what is left, by a division that is the same for all elements: the quotient is at most 1 too small.
    u32 n = __umulhi(at, 0xffffffffu / block), rest = at - n * block;
    if (rest >= block) n++, rest -= block;
    const int own = table[2 * (first + n) + which];
    return own < 0 ? nullptr : (T*)((char*)array + (i64)own * block + rest);
}
// An element before the step: zero where a sequence begins.
template <class T>
__device__ __forceinline__ float slot_read(T* array, u64 place, const int* table, u32 element) {
    const T* from = slot_at(array, place, table, element, 1);
    return from ? to_f32(*from) : 0.0f;
}
// Four of them side by side, the first at a multiple of four.
__device__ __forceinline__ void slot_read4(const float* array, u64 place, const int* table, u32 element, float* x) {
    if ((u32)place % 16 != 0) {
        for (int n = 0; n < 4; n++) x[n] = slot_read(array, place, table, element + n);
        return;
    }
    const float* from = slot_at(array, place, table, element, 1);
    const float4 v = from ? *(const float4*)from : float4{};
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}
// And after it. Another sequence, or a snapshot, may go on from what was read, which is never written unless it is the same.
template <class T>
__device__ __forceinline__ void slot_write(T* array, u64 place, const int* table, u32 element, float x) {
    *slot_at(array, place, table, element, 0) = from_f32<T>(x);
}
__device__ __forceinline__ void slot_write4(float* array, u64 place, const int* table, u32 element, const float* x) {
    if ((u32)place % 16 != 0) {
        for (int n = 0; n < 4; n++) slot_write(array, place, table, element + n, x[n]);
        return;
    }
    *(float4*)slot_at(array, place, table, element, 0) = float4{x[0], x[1], x[2], x[3]};
}
