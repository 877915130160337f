// Rotary position embedding. The angle and its sine and cosine are f32, as the op defines them.
struct Turn { float cos, sin; };
__device__ __forceinline__ Turn turn_of(int position, float frequency, float scale) {
    Turn turn;
    sincosf((float)position * frequency, &turn.sin, &turn.cos);
    return {turn.cos * scale, turn.sin * scale};
}
