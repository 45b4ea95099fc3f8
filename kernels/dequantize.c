/* Packed codes to floats: value = (code - zero) * scale. The difference has at most 9 bits, so it
 * is exact in float32 and the product rounds once: no instruction set can differ. */
#include "gguf_books.h"
#include "ops.h"
#include "put.h"
#include "tiles.h"

#include <stdlib.h>

/* What is needed where groups do not follow whole vectors: the group of each column, and the
 * scales and zeros of the row at work. Room past the last for what whole vectors read. */
typedef struct {
    const int32_t *index;   /* [cols], or NULL: groups do follow */
    const uint16_t *beside; /* of every 32 columns the first, the 17th, the second, the 18th, ... */
    float *scale, *zero;    /* [groups] */
    void *space;
} qt_lookup;

/* How a number of the group of each lane is found: of up to 128 groups by AVX-512 in so many pairs
 * of registers, else (0) one by one. */
ALWAYS int group_pairs(const qt_dequantizing *d)
{
#if defined(QT_ISA_AVX512)
    return d->groups <= 32 ? 1 : d->groups <= 64 ? 2 : d->groups <= 128 ? 4 : 0;
#else
    (void)d;
    return 0;
#endif
}

static int make_lookup(const qt_dequantizing *d, qt_lookup *of)
{
    enum { MORE = 128 };
    size_t cols = (size_t)d->packing.cols, groups = (size_t)d->groups, k = 0;
    *of = (qt_lookup){0};
    if (!d->g_idx && d->group_size >= 2 * LANES)
        return QT_OK;
    of->space = malloc((2 * cols + 2 * groups + 4 * MORE) * 4);
    if (!of->space)
        return QT_E_MEMORY;
    int32_t *index = of->space;
    for (; k < cols; k++)
        index[k] = d->g_idx ? d->g_idx[k] : (int32_t)((int64_t)k / d->group_size);
    memset(index + cols, 0, MORE * sizeof *index);
    of->index = index;
    of->scale = (float *)of->space + cols + MORE;
    of->zero = of->scale + groups + MORE;
    uint16_t *beside = (uint16_t *)(of->zero + groups + MORE);
    of->beside = beside;
    if (d->packing.bits == 4 && group_pairs(d) == 1)
        for (k = 0; k < cols; k += 32)
            for (int i = 0; i < 16; i++) {
                beside[k + 2 * i] = (uint16_t)index[k + i];
                beside[k + 2 * i + 1] = (uint16_t)index[k + 16 + i];
            }
    return QT_OK;
}

static void look_at_row(const qt_dequantizing *d, int64_t row, const qt_lookup *of)
{
    const float *scale = d->scale + row * d->groups;
    const uint8_t *zero = d->zero + row * d->groups;
    int64_t group = 0;
    for (; group + LANES <= d->groups; group += LANES) {
        V some = load(scale + group);
        store(of->scale + group, pick(eq(some, some), some, splat(NAN)));
        store(of->zero + group, to_float(load_u8(zero + group)));
    }
    for (; group < d->groups; group++) {
        of->scale[group] = qt_plain_nan(scale[group]);
        of->zero[group] = (float)zero[group];
    }
}

/* A number of the group of each lane. */
ALWAYS V of_groups(const float *numbers, const int32_t *index, int pairs)
{
#if defined(QT_ISA_AVX512)
    __m512i i = _mm512_loadu_si512(index);
    __m512 found[4];
    if (!pairs)
        return (V)_mm512_i32gather_ps(i, numbers, 4);
    for (int pair = 0; pair < pairs; pair++)
        found[pair] = _mm512_permutex2var_ps(_mm512_loadu_ps(numbers + 32 * pair), i,
                                             _mm512_loadu_ps(numbers + 32 * pair + 16));
    M odd = pairs > 1 ? _mm512_test_epi32_mask(i, _mm512_set1_epi32(32)) : 0;
    for (int pair = 0; pair + 1 < pairs; pair += 2)
        found[pair] = _mm512_mask_mov_ps(found[pair], odd, found[pair + 1]);
    if (pairs == 4)
        found[0] = _mm512_mask_mov_ps(
            found[0], _mm512_test_epi32_mask(i, _mm512_set1_epi32(64)), found[2]);
    return (V)found[0];
#elif defined(QT_ISA_AVX2)
    (void)pairs;
    return (V)_mm256_i32gather_ps(numbers, _mm256_loadu_si256((const void *)index), 4);
#else
    (void)pairs;
    V found;
    for (int lane = 0; lane < LANES; lane++)
        found[lane] = numbers[index[lane]];
    return found;
#endif
}

/* Constant numbers of pairs. */
#define QT_FOR_PAIRS(pairs, call) \
    switch (pairs) {              \
    case 1: call(1); break;       \
    case 2: call(2); break;       \
    case 4: call(4); break;       \
    default: call(0); break;      \
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

#if defined(QT_ISA_AVX512)
#include "four_lanes.h"
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
