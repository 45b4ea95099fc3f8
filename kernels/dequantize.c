/* Packed codes to floats: value = (code - zero) * scale. The difference has at most 9 bits, so it
 * is exact in float32 and the product rounds once: no instruction set can differ. */
#include "gguf_books.h"
#include "ops.h"
#include "put.h"
#include "tiles.h"

#include <stdlib.h>



/* What is needed where groups do not follow whole vectors: the group of each column, and the
 * scales and zeros of the row at work. Room for a pair of vectors past the last. */
typedef struct {
    const int32_t *index; /* [cols], or NULL: groups do follow */
    float *scale, *zero;  /* [groups] */
    void *space;
} qt_lookup;

static int make_lookup(const qt_dequantizing *d, qt_lookup *of)
{
    enum { MORE = 32 };
    size_t cols = (size_t)d->packing.cols, groups = (size_t)d->groups;
    *of = (qt_lookup){d->g_idx, NULL, NULL, NULL};
    if (!d->g_idx && d->group_size >= 2 * LANES)
        return QT_OK;
    of->space = malloc((cols + 2 * groups + 3 * MORE) * 4);
    if (!of->space)
        return QT_E_MEMORY;
    int32_t *index = of->space;
    for (size_t k = 0; k < cols + MORE; k++)
        index[k] = k >= cols ? 0 : d->g_idx ? d->g_idx[k] : (int32_t)((int64_t)k / d->group_size);
    of->index = index;
    of->scale = (float *)of->space + cols + MORE;
    of->zero = of->scale + groups + MORE;
    return QT_OK;
}

static void look_at_row(const qt_dequantizing *d, int64_t row, const qt_lookup *of)
{
    for (int64_t group = 0; group < d->groups; group++) {
        of->scale[group] = qt_plain_nan(d->scale[row * d->groups + group]);
        of->zero[group] = (float)d->zero[row * d->groups + group];
    }
}

/* A number of the group of each lane. Few groups are looked up in registers. */
ALWAYS V of_groups(const float *numbers, const int32_t *index, int few)
{
#if defined(QT_ISA_AVX512)
    __m512i i = _mm512_loadu_si512(index);
    if (few)
        return (V)_mm512_permutex2var_ps(_mm512_loadu_ps(numbers), i,
                                         _mm512_loadu_ps(numbers + 16));
    return (V)_mm512_i32gather_ps(i, numbers, 4);
#elif defined(QT_ISA_AVX2)
    (void)few;
    return (V)_mm256_i32gather_ps(numbers, _mm256_loadu_si256((const void *)index), 4);
#else
    (void)few;
    V found;
    for (int lane = 0; lane < LANES; lane++)
        found[lane] = numbers[index[lane]];
    return found;
#endif
}

#define QT_BODY "dequantize_body.h"
#include "each_dtype.h"

int QT_NAME(dequantize)(const qt_dequantizing *d)
{
    if (qt_packing_refused(&d->packing) || d->group_size < 1 || d->groups < 1)
        return QT_E_ARGUMENT;
    switch (d->dtype) {
    case QT_F32:
        return dequantize_f32(d);
    case QT_F16:
        return dequantize_f16(d);
    case QT_BF16:
        return dequantize_bf16(d);
    }
    return QT_E_ARGUMENT;
}
