/* Small floats (OCP's E4M3, E5M2, E2M1) in groups of neighbours: which of some scales leaves a group
 * the smallest squared error, the codes nearest to weights over their steps, and what these stand
 * for. A step is scale / outer.
 *
 *     error = sum ((nearest(w / step) * step - w)^2 * importance), products in float32, the sum in
 *     float64, weight after weight
 *
 * The search has a group a lane, so that a sum's order is the same whatever the width. The nearest
 * number, ties to even, is found by adding and taking away so many of a number's power of two that
 * float32 has no room for more bits than the code has. */
#include "ops.h"
#include "simd.h"

enum { LANES = QT_F32_LANES, HALF = QT_F64_LANES, WIDEST = 256, E4M3_LAST = 126 };

typedef struct {
    qt_vf32 most, much, below, small; /* below: where steps are equal, and what makes them 1 */
    qt_vi32 least_unit, shift_of_code;
    int32_t mantissa, bias, sign;
} book;

static qt_vf32 of_f32(float value)
{
    qt_vf32 all;
    for (int i = 0; i < LANES; i++)
        all[i] = value;
    return all;
}

static qt_vi32 of_i32(int32_t value)
{
    qt_vi32 all;
    for (int i = 0; i < LANES; i++)
        all[i] = value;
    return all;
}

/* 2^exponent, of normal numbers. */
static float power(int exponent)
{
    uint32_t bits = (uint32_t)(exponent + 127) << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static int read_book(const qt_small_floats *f, book *b)
{
    static const struct {
        int32_t mantissa, bias, sign;
        float most;
    } known[] = {{3, 7, 7, 448.0f}, {2, 15, 7, 57344.0f}, {1, 1, 3, 6.0f}};
    if (f->book < QT_BOOK_E4M3 || f->book > QT_BOOK_E2M1)
        return 0;
    int32_t mantissa = known[f->book].mantissa, bias = known[f->book].bias;
    b->mantissa = mantissa;
    b->bias = bias;
    b->sign = known[f->book].sign;
    b->most = of_f32(known[f->book].most);
    b->much = of_f32(1.5f * power(23 - mantissa));
    b->below = of_f32(power(1 - bias));
    b->small = of_f32(power(mantissa + bias - 1));
    b->least_unit = of_i32((128 - bias) << 23);
    b->shift_of_code = of_i32((127 - bias) << mantissa);
    return 1;
}

QT_INLINE qt_vf32 select_f32(qt_vi32 mask, qt_vf32 yes, qt_vf32 no)
{
    return (qt_vf32)(((qt_vi32)yes & mask) | ((qt_vi32)no & ~mask));
}

/* The nearest numbers, of the signs of values. */
QT_INLINE qt_vf32 nearest(qt_vf32 values, const book *b)
{
    qt_vi32 sign = (qt_vi32)values & INT32_MIN;
    qt_vf32 found = select_f32(values > b->most, b->most, values);
    found = select_f32(found < -b->most, -b->most, found);
    qt_vi32 unit = (qt_vi32)found & 0x7f800000;
    qt_vi32 tiny = unit < b->least_unit;
    unit = (unit & ~tiny) | (b->least_unit & tiny);
    qt_vf32 much = (qt_vf32)unit * b->much;
    found = (found + much) - much;
    return (qt_vf32)((qt_vi32)found | sign);
}

/* The codes of the nearest numbers. */
QT_INLINE qt_vi32 code_of(qt_vf32 number, const book *b)
{
    qt_vi32 bits = (qt_vi32)number;
    qt_vf32 size = (qt_vf32)(bits & INT32_MAX);
    qt_vi32 large = ((bits & INT32_MAX) >> (23 - b->mantissa)) - b->shift_of_code;
    qt_vi32 equal = size < b->below;
    qt_vi32 small = __builtin_convertvector(select_f32(equal, size, of_f32(0)) * b->small, qt_vi32);
    qt_vi32 sign = (qt_vi32)((qt_vu32)bits >> 31) << b->sign;
    return ((small & equal) | (large & ~equal)) | sign;
}

/* A positive number that E4M3 has, to its code and back. */
static int e4m3_code(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return number < power(-6) ? (int)(number * 512.0f) : (int)(bits >> 20) - (120 << 3);
}

static float e4m3_number(int code)
{
    return code < 8 ? (float)code * power(-9)
                    : (1.0f + (float)(code & 7) * 0.125f) * power((code >> 3) - 7);
}

/* What is tried in a group's place n, beside its first scale. */
static float other(const qt_small_floats *f, float scale, int n)
{
    if (f->ladder) {
        int code = e4m3_code(scale) + f->steps[n];
        return e4m3_number(code < 1 ? 1 : code > E4M3_LAST ? E4M3_LAST : code);
    }
    float found = scale * f->factors[n], least = power(-126) * 0.5f;
    return found > least ? found : least;
}

typedef struct {
    qt_vf64 low, high;
} sums;

/* The first half of the lanes, or the second. */
QT_INLINE qt_vf64 wide(qt_vf32 values, int half)
{
#if defined(QT_ISA_AVX512)
    return (qt_vf64)_mm512_cvtps_pd(half ? _mm512_extractf32x8_ps((__m512)values, 1)
                                         : _mm512_castps512_ps256((__m512)values));
#elif defined(QT_ISA_AVX2)
    return (qt_vf64)_mm256_cvtps_pd(half ? _mm256_extractf128_ps((__m256)values, 1)
                                         : _mm256_castps256_ps128((__m256)values));
#else
    qt_vf32_half part;
    memcpy(&part, (const float *)&values + half * HALF, sizeof part);
    return __builtin_convertvector(part, qt_vf64);
#endif
}

/* The errors of LANES groups [width][LANES]. */
QT_INLINE sums errors_of(const qt_vf32 *panel, const qt_small_floats *f, const float *importance,
                         int64_t width, qt_vf32 step, const book *b)
{
    sums total = {{0}, {0}};
    for (int64_t k = 0; k < width; k++) {
        qt_vf32 lost = nearest(panel[k] / step, b) * step;
        lost = lost - panel[k];
        lost = lost * lost;
        if (f->importance)
            lost = lost * (((const qt_vf32 *)importance)[k]);
        total.low += wide(lost, 0);
        total.high += wide(lost, 1);
    }
    return total;
}

/* Puts other scales where they leave less; count: groups of this row from `group` on. */
static void search(const qt_small_floats *f, const float *row, float *scale, int64_t group,
                   int64_t count, const book *b)
{
    qt_vf32 panel[WIDEST], weighed[WIDEST], first = of_f32(1), step;
    int64_t width = f->group_size;
    memset(panel, 0, (size_t)width * sizeof *panel);
    memset(weighed, 0, (size_t)width * sizeof *weighed);
    for (int64_t lane = 0; lane < count; lane++) {
        int64_t from = (group + lane) * width;
        int64_t last = f->cols - from < width ? f->cols - from : width;
        for (int64_t k = 0; k < last; k++)
            ((float *)&panel[k])[lane] = row[from + k];
        if (f->importance)
            for (int64_t k = 0; k < last; k++)
                ((float *)&weighed[k])[lane] = f->importance[from + k];
        ((float *)&first)[lane] = scale[group + lane];
    }
    step = first / f->outer;
    sums least = errors_of(panel, f, (const float *)weighed, width, step, b);
    for (int n = 0; n < f->tries; n++) {
        qt_vf32 tried = first;
        for (int64_t lane = 0; lane < count; lane++)
            ((float *)&tried)[lane] = other(f, ((const float *)&first)[lane], n);
        sums found = errors_of(panel, f, (const float *)weighed, width, tried / f->outer, b);
        const double *now = (const double *)&found;
        double *best = (double *)&least;
        for (int64_t lane = 0; lane < count; lane++)
            if (now[lane] < best[lane]) {
                best[lane] = now[lane];
                scale[group + lane] = ((const float *)&tried)[lane];
            }
    }
}

/* Codes of LANES neighbours, or of `some`, that share a step, or what they stand for. */
QT_INLINE void round_lanes(const float *row, size_t some, qt_vf32 step, const book *b,
                           uint8_t *codes, float *values)
{
    qt_vf32 weight = {0}, number;
    memcpy(&weight, row, some * 4);
    number = nearest(weight / step, b);
    if (codes) {
        qt_vu8x4 narrow = __builtin_convertvector(code_of(number, b), qt_vu8x4);
        memcpy(codes, &narrow, some);
    }
    if (values) {
        number = number * step;
        memcpy(values, &number, some * 4);
    }
}

static void round_group(const float *row, int64_t count, float step, const book *b, uint8_t *codes,
                        float *values)
{
    qt_vf32 by = of_f32(step);
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES)
        round_lanes(row + at, LANES, by, b, codes ? codes + at : NULL, values ? values + at : NULL);
    if (at < count)
        round_lanes(row + at, (size_t)(count - at), by, b, codes ? codes + at : NULL,
                    values ? values + at : NULL);
}

int QT_NAME(round_floats)(const qt_small_floats *f)
{
    book b;
    if (f->rows < 0 || f->cols < 1 || f->group_size < 1 || f->tries < 0 || !read_book(f, &b) ||
        (f->codes && f->values) || (f->tries && f->group_size > WIDEST) ||
        (f->tries && !(f->ladder ? (const void *)f->steps : (const void *)f->factors)))
        return QT_E_ARGUMENT;
    int64_t groups = (f->cols + f->group_size - 1) / f->group_size;
    for (int64_t r = 0; r < f->rows; r++) {
        const float *row = f->weight + r * f->cols;
        float *scale = f->scale + r * groups;
        if (f->tries)
            for (int64_t g = 0; g < groups; g += LANES)
                search(f, row, scale, g, groups - g < LANES ? groups - g : LANES, &b);
        if (!f->codes && !f->values)
            continue;
        for (int64_t g = 0; g < groups; g++) {
            int64_t at = g * f->group_size;
            int64_t count = f->cols - at < f->group_size ? f->cols - at : f->group_size;
            round_group(row + at, count, scale[g] / f->outer, &b,
                        f->codes ? f->codes + r * f->cols + at : NULL,
                        f->values ? f->values + r * f->cols + at : NULL);
        }
    }
    return QT_OK;
}
