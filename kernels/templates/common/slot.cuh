// States of a fixed size: a sequence's lies spread over its blocks of an array of the cache. `place` has the first of
// these blocks in its upper half, the bytes of a block in its lower; `table` is the sequence's row of step->blocks.
template <class T>
__device__ __forceinline__ T* slot_at(T* array, u64 place, const int* table, u32 element, int which) {
    const u32 block = (u32)place, first = (u32)(place >> 32), at = element * sizeof(T);
    const int own = table[2 * (first + at / block) + which];
    return own < 0 ? nullptr : (T*)((char*)array + (i64)own * block + at % block);
}
// An element before the step: zero where a sequence begins.
template <class T>
__device__ __forceinline__ float slot_read(T* array, u64 place, const int* table, u32 element) {
    const T* from = slot_at(array, place, table, element, 1);
    return from ? to_f32(*from) : 0.0f;
}
// And after it. Another sequence, or a snapshot, may go on from what was read, which is never written unless it is the same.
template <class T>
__device__ __forceinline__ void slot_write(T* array, u64 place, const int* table, u32 element, float x) {
    *slot_at(array, place, table, element, 0) = from_f32<T>(x);
}
