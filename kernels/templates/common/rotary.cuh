// Sine and cosine of an f32 angle of any size that positions reach, by the steps of sincosf (rope.cuh) for angles below 105615. Beyond,
// where its own way would spill to local memory, the quadrant is taken off in f64.
__device__ __forceinline__ void rotary(float angle, float scale, float& sine, float& cosine) {
    const float shifted = __fadd_rn(__fmul_rn(angle, 6.36619747e-1f), 12582912.0f);   // the last bit of a number of that size is worth one: conversions are slow
    int quadrant = __float_as_int(shifted);
    const float quarters = shifted - 12582912.0f;
    float r = fmaf(quarters, -5.3903029534742384e-15f, fmaf(quarters, -7.5497894159e-8f, fmaf(quarters, -1.5707962513f, angle)));
    if (fabsf(angle) >= 105615.0f) {
        const double all = rint((double)angle * 0.63661977236758134);
        r = (float)fma(all, -1.5707963267948966, (double)angle);
        quadrant = (int)((i64)all & 3);
    }
    const float s = r * r;
    const float a = fmaf(fmaf(fmaf(-1.9574659e-4f, s, 8.332703e-3f), s, -1.6666663e-1f), fmaf(s, r, 0.0f), r);
    const float b = fmaf(fmaf(fmaf(fmaf(2.427958e-5f, s, -1.388786e-3f), s, 4.1666728e-2f), s, -4.99999970e-1f), s, 1.0f);
    const float sn = quadrant & 1 ? b : a, cs = quadrant & 1 ? a : b;
    sine = (quadrant & 2 ? -sn : sn) * scale;
    cosine = ((quadrant + 1) & 2 ? -cs : cs) * scale;
}
