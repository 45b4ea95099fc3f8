/* The point of a lattice nearest to a few weights, among the neighbours of their codes. */
#ifndef QTOOL_GGUF_NEAR_H
#define QTOOL_GGUF_NEAR_H

#include "gguf_encode_lanes.h"
#include "gguf_lattice.h"

/* How coordinates of a point are packed, and what each code stands for, over and over to fill a
 * vector: a lookup sees the bits of the next coordinate above those of its own. */
typedef struct {
    int bits, coordinates;
    float value[16];
} near_shape;

ALWAYS near_shape shape_of(int bits, const float *value)
{
    near_shape shape = {bits, bits == 2 ? 8 : 4, {0}};
    for (int k = 0; k < 16; k++)
        shape.value[k] = value[k & ((1 << bits) - 1)];
    return shape;
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

/* The packed point of a list for which sum w (scale q - x)^2 is least, the first of equals; a
 * neighbour in every lane. */
ALWAYS unsigned best_near(const uint16_t *list, const near_shape *shape, const float *x,
                          const float *w, float scale)
{
    V term[8], scaled = load(shape->value) * scale, best = splat(0x1.fffffep127f);
    I at = isplat(0), here = iota();
    QT_UNROLL
    for (int i = 0; i < shape->coordinates; i++) {
        V error = scaled - x[i];
        term[i] = w[i] * error * error;
    }
    for (int k = 0; k < list[0]; k += LANES, here += LANES) {
        I point = load_u16(list + 1 + k);
        V sum = look_up_low(term[0], point);
        QT_UNROLL
        for (int i = 1; i < shape->coordinates; i++)
            sum += look_up_low(term[i], point >> (shape->bits * i));
        M better = lt(sum, best);
        best = pick(better, sum, best);
        at = ipick(better, here, at);
    }
#if defined(QT_ISA_AVX512)
    float least_sum = _mm512_reduce_min_ps((__m512)best);
#else
    __m128 half = _mm_min_ps(_mm256_castps256_ps128((__m256)best),
                             _mm256_extractf128_ps((__m256)best, 1));
    half = _mm_min_ps(half, _mm_movehl_ps(half, half));
    float least_sum = _mm_cvtss_f32(_mm_min_ss(half, _mm_movehdup_ps(half)));
#endif
    unsigned ties = mask_bits(eq(best, splat(least_sum)));
    int32_t places[LANES];
    memcpy(places, &at, sizeof at);
    int32_t first = places[ties ? __builtin_ctz(ties) : 0];
    for (ties &= ties - 1; ties; ties &= ties - 1) {
        int32_t other = places[__builtin_ctz(ties)];
        first = other < first ? other : first;
    }
    return list[1 + first];
}

#else

ALWAYS unsigned best_near(const uint16_t *list, const near_shape *shape, const float *x,
                          const float *w, float scale)
{
    int codes = 1 << shape->bits;
    float term[8][8], best = 0x1.fffffep127f;
    unsigned found = list[1];
    for (int i = 0; i < shape->coordinates; i++)
        for (int k = 0; k < codes; k++) {
            float error = scale * shape->value[k] - x[i];
            term[i][k] = w[i] * error * error;
        }
    for (int k = 1; k <= list[0]; k++) {
        unsigned point = list[k];
        float sum = 0;
        for (int i = 0; i < shape->coordinates; i++)
            sum += term[i][(int)(point >> (shape->bits * i)) & (codes - 1)];
        if (sum < best) {
            best = sum;
            found = point;
        }
    }
    return found;
}

#endif

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
