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

#if defined(QT_ISA_AVX512) || defined(QT_ISA_AVX2)
#define QT_PLACES 1

/* Where the codes of two vectors lie, given how many are before them in the first of their words. */
enum { PLACED_WORDS = 8, MOST_CODES = 10 }; /* words of them all; codes in a word */

typedef struct {
    I word[2], shift[2]; /* of each lane: which word, how far up */
    int64_t step, next;  /* words to the next two vectors, codes before those in their word */
} qt_places;

ALWAYS void qt_find_places(qt_places *places, int bits)
{
    const int each = 32 / bits;
    for (int before = 0; before < each; before++) {
        qt_places *at = places + before;
        for (int i = 0; i < 2 * LANES; i++) {
            at->word[i / LANES][i % LANES] = (before + i) / each;
            at->shift[i / LANES][i % LANES] = (before + i) % each * bits;
        }
        at->step = (before + 2 * LANES) / each;
        at->next = (before + 2 * LANES) % each;
    }
}

/* The codes of one of the vectors, with what lies above them in their words; `skip` of the words
 * come before. */
ALWAYS I qt_placed_codes(const uint8_t *words, int32_t skip, const qt_places *at, int i)
{
    __m256i all = _mm256_loadu_si256((const void *)words);
    I word = at->word[i] + skip;
#if defined(QT_ISA_AVX512)
    __m512i own = _mm512_permutexvar_epi32((__m512i)word, _mm512_castsi256_si512(all));
    return (I)_mm512_srlv_epi32(own, (__m512i)at->shift[i]);
#else
    __m256i own = _mm256_permutevar8x32_epi32(all, (__m256i)word);
    return (I)_mm256_srlv_epi32(own, (__m256i)at->shift[i]);
#endif
}
#endif

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
