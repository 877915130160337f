// Sine and cosine of an f32 angle of any size that positions reach, to f32's accuracy: the quadrant is
// taken off in f64, where sinf's own way for large angles would spill to local memory.
__device__ __forceinline__ void rotary(float angle, float scale, float& sine, float& cosine) {
    const double quarters = rint((double)angle * 0.63661977236758134);
    const float r = (float)fma(quarters, -1.5707963267948966, (double)angle), s = r * r;
    const int quadrant = (int)((i64)quarters & 3);
    const float a = r + r * s * (-1.6666654611e-1f + s * (8.3321608736e-3f - s * 1.9515295891e-4f));
    const float b = 1.0f - 0.5f * s
        + s * s * (4.166664568298827e-2f + s * (-1.388731625493765e-3f + s * 2.443315711809948e-5f));
    const float sn = quadrant & 1 ? b : a, cs = quadrant & 1 ? a : b;
    sine = (quadrant & 2 ? -sn : sn) * scale;
    cosine = ((quadrant + 1) & 2 ? -cs : cs) * scale;
}
