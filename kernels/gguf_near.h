/* The point of a lattice nearest to a few weights, among the neighbours of their codes. */
#ifndef QTOOL_GGUF_NEAR_H
#define QTOOL_GGUF_NEAR_H

#include "gguf_encode_lanes.h"
#include "gguf_lattice.h"

#if !defined(QT_ONE_LANE)
ALWAYS const gguf_lattice *lattice_of(const panel *p, int which)
{
    (void)p;
    return gguf_lattice_of(which);
}

/* The list of the neighbours of codes that are no point, of which `find` says `found`. */
ALWAYS const uint16_t *neighbours(const gguf_lattice *lattice, int32_t found)
{
    return lattice->near - (found + 1);
}
#endif

/* How coordinates of a point are packed; known where a search is compiled. */
typedef struct {
    int bits, coordinates;
    int short_lists; /* most have at most eight neighbours */
} near_shape;

/* What each code stands for, over and over to fill a vector: a lookup sees the bits of the next
 * coordinate above those of its own. */
typedef struct {
    float value[16];
} near_values;

ALWAYS near_values values_of(int bits, const float *value)
{
    near_values all;
    for (int k = 0; k < 16; k++)
        all.value[k] = value[k & ((1 << bits) - 1)];
    return all;
}

#if defined(QT_ISA_AVX512) || defined(QT_ISA_AVX2)

ALWAYS I load_u16(const uint16_t *from)
{
#if defined(QT_ISA_AVX512)
    return (I)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from));
#else
    return (I)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from));
#endif
}

ALWAYS V look_up_low(V table, I index)
{
#if defined(QT_ISA_AVX512)
    return (V)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
#else
    return (V)_mm256_permutevar8x32_ps((__m256)table, (__m256i)index);
#endif
}

/* The number of the first lane that holds the least of eight. */
ALWAYS int first_least(__m256 sum)
{
    __m256 all = _mm256_min_ps(sum, _mm256_permute2f128_ps(sum, sum, 1));
    all = _mm256_min_ps(all, _mm256_permute_ps(all, 0x4e));
    all = _mm256_min_ps(all, _mm256_permute_ps(all, 0xb1));
    unsigned ties = (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(sum, all, _CMP_EQ_OQ));
    return __builtin_ctz(ties | 0x80);
}

/* best_near for a list of at most eight. */
ALWAYS unsigned best_of_eight(const uint16_t *list, near_shape shape, const near_values *values,
                              const float *x, const float *w, float scale)
{
    __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(values->value), _mm256_set1_ps(scale));
    __m256i point = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(list + 1)));
    __m256 sum = _mm256_setzero_ps();
    QT_UNROLL
    for (int i = 0; i < shape.coordinates; i++) {
        __m256 error = _mm256_sub_ps(scaled, _mm256_broadcast_ss(x + i));
        __m256 weighted = _mm256_mul_ps(_mm256_broadcast_ss(w + i), error);
        __m256 term = _mm256_mul_ps(weighted, error);
        __m256i index = _mm256_srli_epi32(point, shape.bits * i);
        sum = _mm256_add_ps(sum, _mm256_permutevar8x32_ps(term, index));
    }
    return list[1 + first_least(sum)];
}

/* The packed point of a list for which sum w (scale q - x)^2 is least, the first of equals; a
 * neighbour in every lane. */
ALWAYS unsigned best_near(const uint16_t *list, near_shape shape, const near_values *values,
                          const float *x, const float *w, float scale)
{
    if (shape.short_lists && list[0] <= 8)
        return best_of_eight(list, shape, values, x, w, scale);
    V term[8], scaled = load(values->value) * scale, best = splat(0x1.fffffep127f);
    I at = isplat(0), here = iota();
    QT_UNROLL
    for (int i = 0; i < shape.coordinates; i++) {
        V error = scaled - x[i];
        term[i] = w[i] * error * error;
    }
    for (int k = 0; k < list[0]; k += LANES, here += LANES) {
        I point = load_u16(list + 1 + k);
        V sum = look_up_low(term[0], point);
        QT_UNROLL
        for (int i = 1; i < shape.coordinates; i++)
            sum += look_up_low(term[i], point >> (shape.bits * i));
        M better = lt(sum, best);
        best = pick(better, sum, best);
        at = ipick(better, here, at);
    }
#if defined(QT_ISA_AVX512)
    float least_sum = _mm512_reduce_min_ps((__m512)best);
    M ties = _mm512_cmp_ps_mask((__m512)best, _mm512_set1_ps(least_sum), _CMP_EQ_OQ);
    return list[1 + (ties ? _mm512_mask_reduce_min_epu32(ties, (__m512i)at) : 0)];
#else
    __m256 all = _mm256_min_ps((__m256)best, _mm256_permute2f128_ps((__m256)best, (__m256)best, 1));
    all = _mm256_min_ps(all, _mm256_permute_ps(all, 0x4e));
    all = _mm256_min_ps(all, _mm256_permute_ps(all, 0xb1));
    __m256i places = (__m256i)ipick(best == (V)all, at, isplat(0x7fffffff));
    __m128i low = _mm_min_epi32(_mm256_castsi256_si128(places), _mm256_extracti128_si256(places, 1));
    low = _mm_min_epi32(low, _mm_shuffle_epi32(low, 0x4e));
    low = _mm_min_epi32(low, _mm_shuffle_epi32(low, 0xb1));
    int first = _mm_cvtsi128_si32(low);
    return list[1 + (first == 0x7fffffff ? 0 : first)];
#endif
}

#else

ALWAYS unsigned best_near(const uint16_t *list, near_shape shape, const near_values *values,
                          const float *x, const float *w, float scale)
{
    int codes = 1 << shape.bits;
    float term[8][8], best = 0x1.fffffep127f;
    unsigned found = list[1];
    for (int i = 0; i < shape.coordinates; i++)
        for (int k = 0; k < codes; k++) {
            float error = scale * values->value[k] - x[i];
            term[i][k] = w[i] * error * error;
        }
    for (int k = 1; k <= list[0]; k++) {
        unsigned point = list[k];
        float sum = 0;
        for (int i = 0; i < shape.coordinates; i++)
            sum += term[i][(int)(point >> (shape.bits * i)) & (codes - 1)];
        if (sum < best) {
            best = sum;
            found = point;
        }
    }
    return found;
}

#endif

#if defined(QT_ONE_LANE)

ALWAYS void store_rows(const V *from, int n, float to[LANES][32])
{
    for (int i = 0; i < n; i++)
        to[0][i] = from[i];
}

#else

/* Numbers of lanes as rows: to[lane][i] = from[i][lane] for n, a multiple of 16. */
ALWAYS void store_rows(const V *from, int n, float to[LANES][32])
{
    for (int i = 0; i < n; i += LANES) {
        V square[LANES];
        QT_UNROLL
        for (int k = 0; k < LANES; k++)
            square[k] = from[i + k];
        transpose(square);
        QT_UNROLL
        for (int lane = 0; lane < LANES; lane++)
            store(&to[lane][i], square[lane]);
    }
}

#endif

#endif
