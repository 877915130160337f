template <class T> __device__ T pointee(const T*);

// Copies `rows` rows of `width` elements; from(row) and to(row) say where they begin. Rows begin at
// multiples of every power of two that divides `offsets`, the bits of all strides and starts together.
template <class From, class To>
__device__ __forceinline__ void copy_rows(i64 rows, i64 width, i64 offsets, From from, To to) {
    auto copy = [&](auto* unit) {
        typedef decltype(pointee(unit)) P;
        const i64 n = sizeof(P) / sizeof(*to(0)), packs = width / n;
        for (i64 i = thread_index(); i < rows * packs; i += thread_count()) {
            const i64 row = i / packs, at = i % packs * n;
            *(P*)(to(row) + at) = *(const P*)(from(row) + at);
        }
    };
    if ((width | offsets) * (i64)sizeof(*to(0)) % 16 == 0) copy((Vec16*)nullptr);
    else copy(to(0));
}
