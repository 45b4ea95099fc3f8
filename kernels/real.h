/* Names for one floating type, chosen by QT_REAL_BITS (32 or 64), and arithmetic on vectors of it.
 * Included once per type by a source that then includes its body; no include guard.
 *
 * V is a vector, VI the integer vector of equal lanes, PANEL the number of rows a panel holds: two
 * vectors, so that a tile of accumulators fills the registers. SINGLE rounds to float32. */
#undef REAL
#undef V
#undef VI
#undef VCODE
#undef LANES
#undef PANEL
#undef FMA
#undef ROUND_MAGIC
#undef EXPONENT_MASK
#undef MANTISSA_BITS
#undef EXPONENT_BIAS
#undef SINGLE
#undef T

#if QT_REAL_BITS == 32
#define REAL float
#define V qt_vf32
#define VI qt_vi32
#define VCODE qt_vu8x4
#define LANES QT_F32_LANES
#define FMA qt_fma_f32
#define ROUND_MAGIC 0x1.8p23f
#define EXPONENT_MASK 0x7f800000
#define MANTISSA_BITS 23
#define EXPONENT_BIAS 127
#define SINGLE(v) (v)
#define T(name) QT_PASTE(QT_PASTE(name, f32), QT_ISA)
#else
#define REAL double
#define V qt_vf64
#define VI qt_vi64
#define VCODE qt_vu8x8
#define LANES QT_F64_LANES
#define FMA qt_fma_f64
#define ROUND_MAGIC 0x1.8p52
#define EXPONENT_MASK 0x7ff0000000000000
#define MANTISSA_BITS 52
#define EXPONENT_BIAS 1023
#define SINGLE(v) \
    __builtin_convertvector(__builtin_convertvector(v, qt_vf32_half), qt_vf64)
#define T(name) QT_PASTE(QT_PASTE(name, f64), QT_ISA)
#endif
#define PANEL (2 * LANES)

static inline V T(load)(const REAL *from)
{
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline void T(store)(REAL *to, V v)
{
    memcpy(to, &v, sizeof v);
}

static inline V T(splat)(REAL x)
{
    return (V){0} + x;
}

static inline V T(select)(VI mask, V yes, V no)
{
    return (V)(((VI)yes & mask) | ((VI)no & ~mask));
}

/* Both give b where a is a NaN. */
static inline V T(min)(V a, V b)
{
    return T(select)(a < b, a, b);
}

static inline V T(max)(V a, V b)
{
    return T(select)(a > b, a, b);
}

static inline V T(abs)(V a)
{
    return T(max)(a, -a);
}

/* Nearest integer, ties to even, for |a| < 2^22. */
static inline V T(round)(V a)
{
    return (a + ROUND_MAGIC) - ROUND_MAGIC;
}

/* Without its mantissa: 2^e of a positive number 2^e * m, 1 <= m < 2. */
static inline V T(power_of_two)(V a)
{
    return (V)((VI)a & ((VI){0} + EXPONENT_MASK));
}

/* a^p for a >= 0 and p > 0, to about 1e-5: log2 of the mantissa by the series of atanh, 2^x by
 * Taylor's, in a fixed order, so that it is the same everywhere (libm's pow is not). */
static inline V T(power)(V a, REAL p)
{
    const REAL two_over_ln2 = (REAL)2.885390081777927, ln2 = (REAL)0.6931471805599453;
    VI bits = (VI)a;
    V exponent = __builtin_convertvector((bits >> MANTISSA_BITS) - EXPONENT_BIAS, V);
    V mantissa = (V)((bits & ~((VI){0} + EXPONENT_MASK)) | (VI)T(splat)((REAL)1));
    V s = (mantissa - (REAL)1) / (mantissa + (REAL)1), ss = s * s;
    V series = (((ss / (REAL)9 + (REAL)1 / 7) * ss + (REAL)1 / 5) * ss + (REAL)1 / 3) * ss + 1;
    V y = (exponent + s * series * two_over_ln2) * p;
    y = T(min)(T(max)(y, T(splat)((REAL)-120)), T(splat)((REAL)120));
    V whole = T(round)(y), x = (y - whole) * ln2;
    V e = (((((x / 6 + 1) * x / 5 + 1) * x / 4 + 1) * x / 3 + 1) * x / 2 + 1) * x + 1;
    VI raise = (__builtin_convertvector(whole, VI) + EXPONENT_BIAS) << MANTISSA_BITS;
    return T(select)(a > (REAL)0, e * (V)raise, (V){0});
}
