/* Small floats (OCP's E4M3, E5M2, E2M1) in groups of neighbours: which of some scales leaves a group
 * the smallest squared error, the codes nearest to weights over their steps, and what these stand
 * for. A step is scale / outer.
 *
 *     error = sum ((nearest(w / step) * step - w)^2 * importance), products in float32, the sum in
 *     float64, weight after weight
 *
 * The search has a group a lane, so that a sum's order is the same whatever the width. */
#include "ops.h"
#include "simd.h"

#define QT_REAL_BITS 32
#include "real.h"

enum { HALF = QT_F64_LANES, WIDEST = 256 };

#define VWORD qt_vi32

QT_INLINE float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

QT_INLINE uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

QT_INLINE VWORD T(words)(V values)
{
    return (VWORD)values;
}

QT_INLINE V T(of_words)(VWORD words)
{
    return (V)words;
}

/* Towards zero. */
QT_INLINE VWORD T(whole)(V values)
{
    return __builtin_convertvector(values, VWORD);
}

QT_INLINE VWORD T(choose)(VI mask, VWORD yes, VWORD no)
{
    return (yes & mask) | (no & ~mask);
}

#include "small_floats_body.h"

/* What is tried in a group's place n, beside its first scale. */
static float other(const qt_small_floats *f, float scale, int n)
{
    return f->ladder ? step_away(scale, f->steps[n]) : multiple_of(scale, f->factors[n]);
}

typedef struct {
    qt_vf64 low, high;
} sums;

/* The first half of the lanes, or the second. */
QT_INLINE qt_vf64 wide(V values, int half)
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
QT_INLINE sums errors_of(const V *panel, const qt_small_floats *f, const float *importance,
                         int64_t width, V step, const small_book *b)
{
    sums total = {{0}, {0}};
    for (int64_t k = 0; k < width; k++) {
        V lost = T(nearest_float)(panel[k] / step, b) * step;
        lost = lost - panel[k];
        lost = lost * lost;
        if (f->importance)
            lost = lost * (((const V *)importance)[k]);
        total.low += wide(lost, 0);
        total.high += wide(lost, 1);
    }
    return total;
}

/* Puts other scales where they leave less; count: groups of this row from `group` on. */
static void search(const qt_small_floats *f, const float *row, float *scale, int64_t group,
                   int64_t count, const small_book *b)
{
    V panel[WIDEST], weighed[WIDEST], first = T(splat)(1), step;
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
        V tried = first;
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
QT_INLINE void round_lanes(const float *row, size_t some, V step, const small_book *b,
                           uint8_t *codes, float *values)
{
    V weight = {0}, number;
    memcpy(&weight, row, some * 4);
    number = T(nearest_float)(weight / step, b);
    if (codes) {
        qt_vu8x4 narrow = __builtin_convertvector(T(float_code)(number, b), qt_vu8x4);
        memcpy(codes, &narrow, some);
    }
    if (values) {
        number = number * step;
        memcpy(values, &number, some * 4);
    }
}

static void round_group(const float *row, int64_t count, float step, const small_book *b,
                        uint8_t *codes, float *values)
{
    V by = T(splat)(step);
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES)
        round_lanes(row + at, LANES, by, b, codes ? codes + at : NULL, values ? values + at : NULL);
    if (at < count)
        round_lanes(row + at, (size_t)(count - at), by, b, codes ? codes + at : NULL,
                    values ? values + at : NULL);
}

int QT_NAME(round_floats)(const qt_small_floats *f)
{
    if (f->rows < 0 || f->cols < 1 || f->group_size < 1 || f->tries < 0 ||
        f->book < QT_BOOK_E4M3 || f->book > QT_BOOK_E2M1 || (f->codes && f->values) ||
        (f->tries && f->group_size > WIDEST) ||
        (f->tries && !(f->ladder ? (const void *)f->steps : (const void *)f->factors)))
        return QT_E_ARGUMENT;
    small_book b = book_of(f->book);
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
