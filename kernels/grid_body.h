/* The arithmetic of integer grids, for the type V that V, VI, REAL and T() name: vectors, a row a
 * lane, on the CPU (real.h), one number on a GPU (cuda/integers.h). No product may be contracted with a
 * sum, and division rounds to nearest.
 *
 *     low = min(w, 0), high = max(w, 0)
 *     asymmetric: scale = (high - low) / (2^b - 1),     zero = round(-low / scale)
 *     symmetric:  scale = max|w| / reach,               zero = 2^(b-1)
 *     code = clamp(round(w / scale) + zero, 0, 2^b - 1),   dq = (code - zero) * scale
 *
 * The scale is rounded to its stored dtype before anything is computed with it. */

typedef struct {
    V scale, zero; /* zero as an integer */
} T(group);

/* Positive numbers rounded to nearest even in the scale's dtype, kept inside its finite range and
 * above zero: adding 1.5 * 2^22 ulps of the target pushes the surplus bits out. */
QT_INLINE V T(round_scale)(V a, int dtype)
{
    if (dtype == QT_SCALE_F32)
        return T(max)(a, T(splat)((REAL)0x1p-126));
    int f16 = dtype == QT_SCALE_F16;
    REAL least = (REAL)(f16 ? 0x1p-24 : 0x1p-100), most = (REAL)(f16 ? 65504.0 : 0x1p100);
    a = T(min)(a, T(splat)(most));
    V ulp = T(power_of_two)(a) * (REAL)(f16 ? 0x1p-10 : 0x1p-7);
    if (f16)
        ulp = T(max)(ulp, T(splat)(least));
    V magic = ulp * ROUND_MAGIC;
    return T(max)((a + magic) - magic, T(splat)(least));
}

/* The rounded value in units of the scale: code - zero. */
QT_INLINE V T(quantize)(V w, T(group) g, REAL most_code)
{
    return T(round)(T(min)(T(max)(w / g.scale, -g.zero), T(splat)(most_code) - g.zero));
}

QT_INLINE T(group) T(group_of_range)(const qt_quantizer *quantizer, V low, V high)
{
    REAL most_code = (REAL)((1 << quantizer->bits) - 1);
    T(group) g;
    V range = quantizer->symmetric ? T(max)(high, -low) : high - low;
    V step = range / (quantizer->symmetric ? (REAL)quantizer->reach : most_code);
    g.scale = T(round_scale)(step, quantizer->scale_dtype);
    g.scale = T(select)(range == (REAL)0, T(splat)((REAL)1), g.scale);
    if (quantizer->symmetric)
        g.zero = T(splat)((REAL)(1 << (quantizer->bits - 1)));
    else
        g.zero = T(round)(T(min)(-low / g.scale, T(splat)(most_code)));
    return g;
}
